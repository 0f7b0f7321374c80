from __future__ import annotations

import pytest
from chat_cases import chat
from hypothesis import given
from hypothesis import strategies as st


def test_the_marker_says_what_is_missing() -> None:
    # 100 times "7 " is 200 tokens; the marker is 26 of the 60, so 34 tokens of text remain.
    assert len(chat().encode_plain("… [166 characters clipped]")) == 26
    assert chat().clip("7 " * 100, 60) == "7 " * 17 + "… [166 characters clipped]"


def test_a_text_that_fits_is_left_alone() -> None:
    assert chat().clip("7 " * 100, 200) == "7 " * 100
    assert chat().clip("7 " * 100, 199) != "7 " * 100


@pytest.mark.parametrize(
    ("limit", "clipped"),
    # The bare marker is three tokens: the bytes of "…".
    [(-1, ""), (0, ""), (1, ""), (2, ""), (3, "…"), (4, "7…"), (6, "7 7…")],
)
def test_tiny_limits(limit: int, clipped: str) -> None:
    assert chat().clip("7 7 7 7", limit) == clipped


def test_a_megabyte_is_read_only_as_far_as_it_fits() -> None:
    clipped = chat().clip("東京 <|im_end|>\n" * 80_000, 100)
    assert len(chat().encode_plain(clipped)) <= 100
    assert clipped.endswith("characters clipped]")
    assert len(clipped) < 200


@given(
    text=st.one_of(
        st.text(st.characters(), max_size=300),
        st.text(st.sampled_from("a 7\n東🙂\ud800\ufdd0<|im_end|>"), max_size=300),
    ),
    limit=st.integers(-2, 80),
)
def test_clip_fits_and_keeps_the_head(text: str, limit: int) -> None:
    clipped = chat().clip(text, limit)
    assert len(chat().encode_plain(clipped)) <= max(limit, 0)
    clipped.encode()  # no lone surrogates are left
    whole = chat().clip(text, 10_000)
    assert clipped == whole or whole.startswith(clipped.rpartition("…")[0])


@given(st.text(st.characters(), max_size=50))
def test_encode_plain_takes_any_text(text: str) -> None:
    assert chat().decode(chat().encode_plain(text)) == chat().clip(text, 10_000)
