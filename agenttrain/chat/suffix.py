"""Text that a template writes between the end of a completion and the next one.

`seam.py` gives the text that follows a turn of one shape, with a placeholder for each reply. What
surrounds the placeholders is constant and is tokenised once; per call only the replies are, each
from the nearest control token before it to the nearest one after it, so that merges across its
edges are those of the full rendering::

    <|im_end|>                              end of turn: added when the completion lacks it
    \\n<|im_start|>user\\n<tool_response>     constant ids
    \\n{reply 0}\\n                           tokenised per call
    </tool_response><|im_end|>\\n<|im_…      constant ids
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from agenttrain.chat.encoding import ChatError, Encoder, unmark
from agenttrain.types import Origin

Spans = list[tuple[Origin, list[int]]]
_REPLY = re.compile("\ufdd3(\\d+)\ufdd4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Text between two control tokens that holds replies: literals, and replies by position.

    Example: ``Open(parts=("\\n", 0, "\\n"))``
    """

    parts: tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """The context after a completion of one shape, but for its replies."""

    end_ids: tuple[int, ...]
    """The end of the turn, up to its control token; empty where the template writes none."""
    blocks: tuple[tuple[int, ...] | Open, ...]
    glue_length: int
    """Tokens of `blocks` with empty replies."""
    last_end_ids: tuple[int, ...] = ()
    """The end of an answer that nothing follows, where the template then writes another than
    `end_ids`."""


def build(end: str, text: str, encoder: Encoder, *, replies: int) -> Suffix:
    """Tokenise the constant part of `Seam.split`, whose text holds `replies` placeholders."""
    if _REPLY.findall(text) != [str(index) for index in range(replies)]:
        raise ChatError(
            f"the chat template does not show each of {replies} replies once and in order: "
            f"{_REPLY.sub('<reply>', unmark(text))!r}; set chat_template"
        )
    blocks: list[tuple[int, ...] | Open] = []
    constant = ""
    for control, piece in encoder.pieces(text):
        if control or not _REPLY.search(piece):
            constant += piece
            continue
        blocks += [tuple(encoder.encode(constant))] if constant else []
        constant = ""
        # re.split with a group: literal, index, literal, index, …, literal
        parts = _REPLY.split(piece)
        blocks.append(
            Open(parts=tuple(int(p) if i % 2 else unmark(p) for i, p in enumerate(parts)))
        )
    blocks += [tuple(encoder.encode(constant))] if constant else []
    return Suffix(
        end_ids=tuple(encoder.encode(end)),
        blocks=tuple(blocks),
        glue_length=sum(len(ids) for _, ids in fill(blocks, [""] * replies, encoder)),
    )


def fill(blocks: Sequence[tuple[int, ...] | Open], texts: Sequence[str], encoder: Encoder) -> Spans:
    """The ids of `blocks` with the replies' texts in their places."""
    spans: Spans = []
    for block in blocks:
        if isinstance(block, Open):
            filled = _fill_open(block, texts, encoder)
        else:
            filled = [(Origin.template, list(block))]
        for origin, ids in filled:
            if spans and spans[-1][0] is origin:
                spans[-1][1].extend(ids)
            elif ids:
                spans.append((origin, ids))
    return spans


def _fill_open(block: Open, texts: Sequence[str], encoder: Encoder) -> Spans:
    """Tokens that hold any character of a reply are the tool's, the others the template's."""
    pieces = [texts[part] if isinstance(part, int) else part for part in block.parts]
    ids, offsets = encoder.encode_plain_offsets("".join(pieces))
    spans: Spans = []
    done = position = 0
    for part, piece in zip(block.parts, pieces, strict=True):
        position += len(piece)
        if isinstance(part, str) or not piece:
            continue
        first = bisect_right(offsets, position - len(piece), lo=done, key=lambda o: o[1])
        last = bisect_left(offsets, position, lo=first, key=lambda o: o[0])
        spans += [(Origin.template, ids[done:first]), (Origin.tool, ids[first:last])]
        done = last
    return [*spans, (Origin.template, ids[done:])]
