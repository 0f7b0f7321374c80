"""Text to token ids and back, with control tokens inside other people's text kept as text.

A control token (``<|im_end|>``, ``<tool_call>``) steers the model when the template writes it and
must be ordinary text when a user or a tool wrote it: every token that was added to a tokenizer's
vocabulary is one, special or not, unless `Encoder.ordinary` says why not. Messages are therefore
*marked* before they are rendered: each control token in them is wrapped in two Unicode
noncharacters, which templates pass through and which no text of others may hold (`clean` sees to
that). In a rendering, what is not wrapped was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agenttrain.types import AgenttrainError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
CACHED_PIECES = 256
"""Pieces between control tokens whose ids are cached."""
BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space as the `tokenizers` library knows it where a token absorbs what surrounds it."""
SPACE = "\u2581"
"""How SentencePiece writes a blank."""
_RESERVED = re.compile("[\\ud800-\\udfff\\ufdd0-\\ufdef]")
_MARKS = str.maketrans("", "", OPEN + CLOSE)


class ChatError(AgenttrainError):
    """A tokenizer, template or message that cannot be used; the message says what to change."""


def clean(text: str) -> str:
    """`text` with lone surrogates and reserved noncharacters replaced by U+FFFD.

    Neither can stand in a valid UTF-8 file, and the noncharacters are this module's own marks.
    """
    return text if text.isascii() else _RESERVED.sub("\ufffd", text)


class Encoder:
    """Encodes and decodes with copies of a tokenizer's core, so nobody's settings interfere."""

    control: dict[str, int]
    """Control tokens by their text: every added token that is not in `ordinary`."""
    written: frozenset[int]
    """Ids of control tokens that are special or stand in the template: no part of what a model
    says, whereas another that it sampled is content."""
    unspecial: tuple[str, ...]
    """Control tokens that are merely added, not special."""
    ordinary: dict[str, str]
    """Added tokens that anybody's text may become, and why."""

    def __init__(
        self, tokenizer: Any, template: str, plain: Mapping[str, str] | None = None
    ) -> None:
        """`plain`: added tokens that are ordinary text, and why; of no effect on tokens that are
        special or that the template writes."""
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None:
            raise ChatError(
                f"model.path: {type(tokenizer).__name__} is not backed by the `tokenizers` "
                "library; save the tokenizer with a tokenizer.json"
            )
        added = dict(sorted(core.get_added_tokens_decoder().items()))
        steering = {t.content for t in added.values() if t.special or t.content in template}
        self.ordinary = {}
        for token in added.values():
            if token.special:
                continue
            if not token.content.replace(SPACE, " ").strip():
                self.ordinary[token.content] = "white space"
            elif token.content not in steering and token.content in (plain or {}):
                self.ordinary[token.content] = (plain or {})[token.content]
        ids = {token.content: token_id for token_id, token in added.items()}
        self.control = {text: ids[text] for text in ids if text not in self.ordinary}
        self.written = frozenset(ids[text] for text in steering if text in self.control)
        self._full = _copy(core, added, hidden=())
        self._plain = _copy(core, added, hidden=self.control)
        # What the tokenizer makes from plain text stays text, unless it steers a model.
        if forgeable := [text for text in self.control if ids[text] in self.encode_plain(text)]:
            for text in forgeable:
                if self.control.pop(text) in self.written:
                    raise ChatError(
                        f"the tokenizer makes the control token {text!r} from plain text, so a "
                        "tool could forge it; use a tokenizer with byte-level pieces"
                    )
                self.ordinary[text] = "the tokenizer's pieces make it from plain text too"
            self._plain = _copy(core, added, hidden=self.control)
        self.unspecial = tuple(
            t.content for t in added.values() if t.content in self.control and not t.special
        )
        texts = _alternatives(self.control) if self.control else "(?!)"
        self._control = re.compile(texts)
        # In a rendering: marked tokens, or bare ones, which are the template's.
        self._pieces = re.compile(f"{OPEN}(?:{texts}){CLOSE}|(?P<control>{texts})")
        self._absorbing = {
            token.content: (token.lstrip, token.rstrip)
            for token in added.values()
            if token.lstrip or token.rstrip
        }
        self._control_ids = frozenset(self.control.values())
        self._cached_ids: dict[tuple[bool, str], tuple[int, ...]] = {}
        self._by_piece = self._encodes_by_piece()

    def encode(self, rendering: str) -> list[int]:
        """Ids of a rendering: control tokens are tokens, except those that `mark` wrapped.

        Example: ``encode("<|im_start|>user\\nhi<|im_end|>")`` is what the tokenizer itself gives.
        """
        if not self._by_piece and OPEN not in rendering and CLOSE not in rendering:
            ids = self._full.encode(rendering, add_special_tokens=False).ids
            # A normalizer can make a control token of a text that holds none, as of ＜think＞.
            count = sum(token_id in self._control_ids for token_id in ids)
            if count == sum(control for control, _ in self.pieces(rendering)):
                return ids
        ids = []
        for control, piece in self.pieces(rendering):
            # All prompts of a run share pieces: the tools and the system message.
            piece_ids = self._cached_ids.get((control, piece))
            if piece_ids is None:
                encode = self._full.encode if control else self._plain.encode
                piece_ids = tuple(encode(unmark(piece), add_special_tokens=False).ids)
                if len(self._cached_ids) >= CACHED_PIECES:
                    self._cached_ids.clear()
                self._cached_ids[control, piece] = piece_ids
            ids += piece_ids
        return ids

    def _encodes_by_piece(self) -> bool:
        """Check that a text behind a control token is encoded as at a text's beginning.

        Some SentencePiece tokenizers put a blank before what begins a text, and only there.
        """
        probe = "".join(f"a b{text} c\nd{text}\n e{text}f" for text in self.control)
        ids: list[int] = []
        for control, piece in self.pieces(probe):
            encode = self._full.encode if control else self._plain.encode
            ids += encode(piece, add_special_tokens=False).ids
        return ids == self._full.encode(probe, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which no control token is a token."""
        return self._plain.encode(clean(text), add_special_tokens=False).ids

    def encode_plain_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode_plain`, and for each token where in the text (start, end) it comes from."""
        encoding = self._plain.encode(clean(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self._full.decode(token_ids, skip_special_tokens=False)

    def mark(self, value: Any, bare: Collection[str] = ()) -> Any:
        """Copy a message, schema or text with its control tokens wrapped and None keys left out.

        Control tokens in `bare` are left as they are.
        """
        if isinstance(value, str):
            return self._control.sub(
                lambda token: token[0] if token[0] in bare else f"{OPEN}{token[0]}{CLOSE}",
                clean(value),
            )
        if isinstance(value, dict):
            return {self.mark(k): self.mark(v, bare) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [self.mark(item, bare) for item in value]
        return value

    def pieces(self, rendering: str) -> Iterator[tuple[bool, str]]:
        """Split a rendering into the template's own control tokens (True) and all else (False)."""
        start = position = 0
        while (match := self._pieces.search(rendering, position)) is not None:
            position = match.end()
            if (text := match["control"]) is None:
                continue
            before = rendering[start : match.start()]
            left, right = self._absorbing.get(text, (False, False))
            kept = before.rstrip(BLANKS) if left else before
            while right and position < len(rendering) and rendering[position] in BLANKS:
                position += 1
            if kept:
                yield False, kept
            yield True, rendering[start + len(kept) : position]
            start = position
        if start < len(rendering):
            yield False, rendering[start:]


def unmark(text: str) -> str:
    """`text` without marks."""
    return text.translate(_MARKS)


def _alternatives(texts: Collection[str]) -> str:
    """Pattern of the longest of the texts at a place, in time that does not grow with their
    number: they share their beginnings. Example: of ab, abc and d it is ``(?:ab(?:c)?|d)``."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:1], []).append(text)
    optional = branches.pop("", None) is not None
    parts = []
    for group in branches.values():
        first, last = min(group), max(group)
        pairs = enumerate(zip(first, last, strict=False))
        head = first[: next((i for i, (a, b) in pairs if a != b), len(first))]
        parts.append(re.escape(head) + _alternatives([text[len(head) :] for text in group]))
    pattern = "|".join(parts)
    if not parts or (len(parts) == 1 and not optional):
        return pattern
    return f"(?:{pattern})" + "?" * optional


def _copy(core: Any, added: dict[int, AddedToken], hidden: Any) -> Any:
    """Build a tokenizer over the same model, in which the `hidden` added tokens are never found."""
    copy = Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(core, part) is not None:
            setattr(copy, part, getattr(core, part))
    tokens = []
    for token in added.values():
        if token.content not in hidden:
            tokens.append(token)
        elif copy.token_to_id(token.content) is None:
            # Takes the id, so that later tokens keep theirs; cleaned text cannot hold the mark.
            tokens.append(AddedToken(OPEN + token.content, special=True, normalized=False))
    copy.add_tokens(tokens)  # all at once: each call costs time for every token that there is
    for token_id, token in added.items():
        if token.content not in hidden and copy.token_to_id(token.content) != token_id:
            raise ChatError(
                f"the added token {token.content!r} has id {token_id}, which does not follow "
                "from its place in tokenizer.json; renumber the added tokens without holes"
            )
    return copy


CHARACTERS_PER_TOKEN = 8
"""First guess at how much text can fill a limit; doubled until it does."""
PREFIX = 8
"""An ASCII text has at most a token per character, and these that a tokenizer may put before it."""
MARKERS = ("… [{:,} characters clipped]", "…")


def clip(encoder: Encoder, text: str, max_tokens: int) -> str:
    """Return the whole text, or its head and a marker, in at most `max_tokens` plain tokens.

    Reads only as much of the text as can fit, whatever its length. Where the marker has no room, a
    bare ``…`` stands for the rest, or nothing. Example: ``clip(encoder, "7 " * 9999, 12)`` is
    ``"7 7 7… [19,993 characters clipped]"``.
    """
    text = clean(text)
    if text.isascii() and len(text) + PREFIX <= max_tokens:
        return text
    size = max(max_tokens, 1) * CHARACTERS_PER_TOKEN
    while True:
        ids, offsets = encoder.encode_plain_offsets(text[:size])
        if len(ids) > max_tokens:
            break
        if size >= len(text):
            return text
        size *= 2
    for marker in MARKERS:
        kept = max_tokens - len(encoder.encode_plain(marker.format(len(text))))
        # The longer marker is worth its tokens only where most of the limit is left for the text.
        if marker == MARKERS[0] and 2 * kept < max_tokens:
            continue
        while kept >= 0:
            head = text[: offsets[kept - 1][1]] if kept else ""
            clipped = head + marker.format(len(text) - len(head))
            # Tokens can merge across the cut or, with a character cut in two, split.
            excess = len(encoder.encode_plain(clipped)) - max_tokens
            if excess <= 0:
                return clipped
            kept -= excess
    return ""
