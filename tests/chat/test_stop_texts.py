"""Stop texts in completions whose tokens arrive one by one."""

from __future__ import annotations

import parts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.chat.stop_texts import StopScan, cut_message

CHAT = parts.chat()


def scan(texts: list[str], stops: list[str]) -> tuple[str, int | None]:
    """Read tokens with these texts."""
    read = StopScan(lambda ids: "".join(texts[i] for i in ids), stops)
    for index in range(len(texts)):
        read.push(index)
    read.finish()
    return read.text, read.end


@pytest.mark.parametrize(
    ("texts", "stops", "text", "end"),
    [
        (["in", " Par", "is", "."], ["Paris"], "in ", 3),
        (["in", " Paris!"], ["is!", "Paris"], "in ", 2),  # both complete in one token
        (["ab", "cd", "ef"], ["bcdef", "cd"], "ab", 2),  # the first that is complete
        (["aa", "ab"], ["aab"], "a", 2),
        (["x"], ["y"], "x", None),
        (["x"], [], "x", None),
    ],
)
def test_the_first_text_that_is_complete(texts, stops, text: str, end: int | None) -> None:
    assert scan(texts, stops) == (text, end)


@given(
    texts=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_end_is_the_shortest_prefix_that_holds_a_text(texts, stops) -> None:
    prefixes = ["".join(texts[:count]) for count in range(1, len(texts) + 1)]
    ends = [i + 1 for i, p in enumerate(prefixes) if any(stop in p for stop in stops)]
    message = {"content": prefixes[ends[0] - 1] if ends else "".join(texts)}
    cut_message(message, stops)
    assert scan(texts, stops) == (message["content"], ends[0] if ends else None)


def test_characters_of_several_tokens_and_ends_of_turn() -> None:
    ids = parts.ids("Grüße 🌍 there<|im_end|>")
    read = StopScan(CHAT.text_of, ["🌍"])
    ended = [read.push(token) for token in ids]
    assert (read.text, ended.index(True) + 1) == ("Grüße ", read.end)
    untouched = StopScan(CHAT.text_of, ["<|im_end|>", "<|"])
    for token in ids:
        untouched.push(token)
    untouched.finish()
    assert (untouched.text, untouched.end) == ("Grüße 🌍 there", None)
