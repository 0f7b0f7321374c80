"""Wordle: its marks, its games, its words."""

from __future__ import annotations

import pytest
from adapter_kit import environments, run, texts
from parts import call

from agenttrain.data.bundled import wordle
from agenttrain.environments.builtin.wordle import Wordle, marks
from agenttrain.types import StopReason, ToolError


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("agent", "agent", "GGGGG"),
        ("about", "civil", "-----"),
        # The second e is in its place; one more e of elder is left for the first.
        ("sleek", "elder", "-GYG-"),
        # Both i of civil are in their places: the others have no mark.
        ("piiii", "civil", "-G-G-"),
        # Both a of bacca are in their places.
        ("aabaa", "bacca", "-GY-G"),
        # label has one more l and one a.
        ("llama", "label", "GYY--"),
    ],
)
def test_marks(guess: str, word: str, expected: str) -> None:
    assert marks(guess, word) == expected


def guess(word: str) -> str:
    return call("guess", f'{{"word": "{word}"}}')


def test_a_game_that_is_won() -> None:
    done = run(guess("apple"), guess("Ocean"), worlds=environments(Wordle), row={"word": "ocean"})
    assert "Find the secret word of five letters in 6 guesses" in texts(done, "user")[0]
    # apple against ocean: a and e occur elsewhere.
    assert texts(done, "tool") == [
        "a p p l e\nY - - - Y\n5 guesses left",
        "o c e a n\nG G G G G\n4 guesses left",
    ]
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == pytest.approx(0.9)


def test_a_game_that_is_lost_earns_the_places_that_were_guessed() -> None:
    # Against ocean: only the final n of train is in place, then also o (other) and the a (urban).
    words = ("train", "other", "urban")
    done = run(*map(guess, words), worlds=environments(Wordle, guesses=3), row={"word": "ocean"})
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == pytest.approx(0.15)  # n, o, a


@pytest.mark.parametrize(
    ("guesses", "second", "last"),
    [
        (8, 0.9, 0.3),  # 1 - 7 * 0.1
        (9, 0.9125, 0.3),  # steps of 0.7 / 8
        (10, 1 - 0.7 / 9, 0.3),
    ],
)
def test_the_last_guess_earns_more_than_any_lost_game(
    guesses: int, second: float, last: float
) -> None:
    def reward(*words: str, word: str) -> float:
        game = Wordle(guesses=guesses)
        game.reset({"word": word})
        for guess_word in words:
            game.guess(guess_word)
        return game.reward(None)  # type: ignore[arg-type]

    assert reward("apple", "ocean", word="ocean") == pytest.approx(second)
    assert reward(*["apple"] * (guesses - 1), "ocean", word="ocean") == pytest.approx(last)
    # Each letter of light is in its place in one of these.
    lost = ("limit", "right")
    assert reward(*lost, *["apple"] * (guesses - 2), word="light") == pytest.approx(0.25)


def test_a_guess_that_is_no_word_costs_a_turn_and_no_guess() -> None:
    worlds = environments(Wordle, guesses=1)
    done = run(guess("xyzzy"), guess("ocean"), worlds=worlds, row={"word": "ocean"})
    assert [result.error for result in done.tool_results] == [ToolError.exception, None]
    assert done.environment_reward == 1.0


def test_rows_of_other_data_are_refused() -> None:
    done = run(guess("ocean"), worlds=environments(Wordle), row={})
    assert done.stop_reason is StopReason.error
    assert "use data=wordle" in str(done.error)
    with pytest.raises(ValueError, match="guesses=0"):
        Wordle(guesses=0)


def test_the_splits_share_no_word() -> None:
    words = {
        split: {wordle.row(split, index, 0)["word"] for index in range(2000)}
        for split in wordle.RESIDUES
    }
    assert len(wordle.FIVE_LETTERS) == 555
    assert len(words["test"]) == 111
    assert len(words["train"]) > 400
    assert not words["train"] & words["test"]
