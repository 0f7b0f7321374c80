"""Rewards by similarity: of one answer, and of the answers of several turns."""

from __future__ import annotations

import time
from typing import Any

import pytest
from reward_cases import called, made, reward

from agenttrain.rewards.builtin.similarity import Similarity, TurnSimilarity, similarity
from agenttrain.rewards.function import RewardError
from agenttrain.types import Rollout

TAGS = ["list", "longer"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<r>tibah</r>", 1.0),
        ("First <r>\ntibah </r>, then <r>x</r>", 1.0),  # the first tag, without white space
        ("<r>tibxx</r>", 0.6),  # tib matches: 2 * 3 / (5 + 5)
        ("<r></r>", 0.0),
        ("<r>tibah", 0.0),
        ("tibah", 0.0),
    ],
)
def test_the_text_in_the_tags_is_compared(text: str, expected: float) -> None:
    assert reward(Similarity(tag="r"), made(text, answer="tibah")) == expected


def test_an_answer_without_tags_and_one_that_was_handed_in() -> None:
    assert reward(Similarity(), made("abcf", answer="abcd")) == 0.75
    assert reward(Similarity(power=2), made("abcf", answer="abcd")) == 0.5625
    assert reward(Similarity(), made("", answer="abcd")) == 0.0
    handed_in = made("", called("done", answer="abcf"), answer="abcd")
    assert reward(Similarity(tool="done"), handed_in) == 0.75
    assert reward(Similarity(tool="done"), made("abcd", answer="abcd")) == 0.0


def test_a_long_answer_is_compared_by_its_beginning_and_counted_whole() -> None:
    assert reward(Similarity(), made("xxab", answer="ab")) == pytest.approx(4 / 6)
    assert reward(Similarity(), made("abxxxxxx", answer="ab")) == 0.4  # 2 * 2 / (8 + 2)
    # Of three lengths, "xxxxxa", one letter matches: 2 * 1 / (7 + 2).
    assert reward(Similarity(), made("xxxxxab", answer="ab")) == pytest.approx(2 / 9)


def test_an_answer_that_never_ends_takes_no_longer_than_a_long_one() -> None:
    started = time.thread_time()
    # 3 times 100 characters are compared of 60,000, whose comparison takes seconds.
    assert similarity("e " * 30_000, "e x " * 25) < 0.01
    assert time.thread_time() - started < 0.5


def spoken(*answers: str, **columns: Any) -> Rollout:
    """A rollout of several turns of the user."""
    rollout = made(answers[0], **columns)
    for answer in answers[1:]:
        messages = rollout.trajectories[0].messages
        messages.append({"role": "user", "content": "And now?"})
        messages.append({"role": "assistant", "content": answer})
    return rollout


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["<list>ab</list>", "<longer>ab</longer>", "<longer>ab</longer>"], 1.0),
        # White space, empty lines and case do not count.
        (["<list>\n  AB \n\n</list>", "<longer>ab</longer>", "<longer>ab</longer>"], 1.0),
        # "ax" is half of "ab": (1 + 0.5 + 1) / 3 = 2.5 / 3, to the power of 8.
        (["<list>ab</list>", "<longer>ax</longer>", "<longer>ab</longer>"], (2.5 / 3) ** 8),
        # The last turn did not take place.
        (["<list>ab</list>", "<longer>ab</longer>"], (2 / 3) ** 8),
        # The first turn's tag does not hold for the second.
        (["<list>ab</list>", "<list>ab</list>", "<longer>ab</longer>"], (2 / 3) ** 8),
        # A second attempt counts if it is better, and makes the turn worth nothing if it is not.
        (
            ["<list>ax</list> or <list>ab</list>", "<longer>ab</longer>", "<longer>ab</longer>"],
            1.0,
        ),
        (
            ["<list>ab</list> or <list>ab</list>", "<longer>ab</longer>", "<longer>ab</longer>"],
            (2 / 3) ** 8,
        ),
    ],
)
def test_the_mean_of_the_turns_is_raised(answers: list[str], expected: float) -> None:
    rollout = spoken(*answers, answers=["ab", "ab", "ab"])
    assert reward(TurnSimilarity(tags=TAGS, power=8), rollout) == pytest.approx(expected)


def test_each_turn_can_be_raised_by_itself() -> None:
    rollout = spoken("<list>ab</list>", "<longer>ax</longer>", answers=["ab", "ab"])
    assert reward(TurnSimilarity(tags=TAGS, power=2), rollout) == 0.5625  # 0.75 ** 2
    each = TurnSimilarity(tags=TAGS, power=2, each_turn=True)
    assert reward(each, rollout) == 0.625  # (1 + 0.25) / 2


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(ValueError, match="power=0"):
        Similarity(power=0)
    with pytest.raises(ValueError, match="tags='list'"):
        TurnSimilarity(tags="list")  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="must list a text for each turn"):
        reward(TurnSimilarity(tags=TAGS), made("x", answers="ab"))
