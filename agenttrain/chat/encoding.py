"""Text to token ids and back, with control tokens inside other people's text kept as text.

A control token (``<|im_end|>``, ``<tool_call>``) steers the model when the template writes it and
must be ordinary text when a user or a tool wrote it. Messages are therefore *marked* before they
are rendered: each control token in them is wrapped in two Unicode noncharacters, which templates
pass through and which no text of others may hold (`clean` sees to that). In a rendering, what is
not wrapped was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agenttrain.types import AgenttrainError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
KNOWN_PIECES = 256
"""Pieces between control tokens whose ids are kept."""
FEW_CONTROL = 64
"""Control tokens that are found in a text faster than the text is encoded."""
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
    """Control tokens by their text: special tokens, and added ones that the template writes."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None:
            raise ChatError(
                f"model.path: {type(tokenizer).__name__} is not backed by the `tokenizers` "
                "library; save the tokenizer with a tokenizer.json"
            )
        added = dict(sorted(core.get_added_tokens_decoder().items()))
        # Added tokens that no template writes, such as Gemma's runs of blanks, are plain text.
        self.control = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        self._full = _copy(core, added, hidden=())
        self._plain = _copy(core, added, hidden=self.control)
        self._control, self._pieces = _patterns([t for t in added.values() if t.content in self])
        self._refuse_forgeable()
        self._known: dict[tuple[bool, str], tuple[int, ...]] = {}
        self._by_piece = self._encodes_by_piece()

    def __contains__(self, text: str) -> bool:
        return text in self.control

    def _refuse_forgeable(self) -> None:
        for text, token_id in self.control.items():
            if token_id in self.encode_plain(text):
                raise ChatError(
                    f"the tokenizer makes the control token {text!r} from plain text, so a tool "
                    "could forge it; use a tokenizer with byte-level pieces"
                )

    def encode(self, rendering: str) -> list[int]:
        """Ids of a rendering: control tokens are tokens, except those that `mark` wrapped.

        Example: ``encode("<|im_start|>user\\nhi<|im_end|>")`` is what the tokenizer itself gives.
        """
        if not self._by_piece and OPEN not in rendering and CLOSE not in rendering:
            return self._full.encode(rendering, add_special_tokens=False).ids
        ids: list[int] = []
        for control, piece in self.pieces(rendering):
            ids += self._piece_ids(control, piece)
        return ids

    def _piece_ids(self, control: bool, piece: str) -> tuple[int, ...]:
        """Ids of a piece; what all prompts share (the tools, the system prompt) is kept."""
        found = self._known.get((control, piece))
        if found is None:
            encode = self._full.encode if control else self._plain.encode
            found = tuple(encode(unmark(piece), add_special_tokens=False).ids)
            if len(self._known) >= KNOWN_PIECES:
                self._known.clear()
            self._known[control, piece] = found
        return found

    def _encodes_by_piece(self) -> bool:
        """Whether a text behind a control token is encoded as it is at a text's beginning.

        Some SentencePiece tokenizers put a blank before what begins a text, and only there.
        """
        if len(self.control) > FEW_CONTROL:
            return False
        probes = [f"a b{text} c\nd{text}\n e{text}f" for text in self.control]
        return all(
            [i for control, piece in self.pieces(probe) for i in self._piece_ids(control, piece)]
            == self._full.encode(probe, add_special_tokens=False).ids
            for probe in probes
        )

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

    def mark(self, value: Any, keep: Collection[str] = ()) -> Any:
        """A copy of a message, schema or text whose control tokens are wrapped, None keys gone.

        Those in `keep` are left as they are.
        """
        if isinstance(value, str):
            return self._control.sub(
                lambda found: found[0] if found[0] in keep else f"{OPEN}{found[0]}{CLOSE}",
                clean(value),
            )
        if isinstance(value, dict):
            return {self.mark(k): self.mark(v, keep) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [self.mark(item, keep) for item in value]
        return value

    def pieces(self, rendering: str) -> Iterator[tuple[bool, str]]:
        """Split a rendering into the template's own control tokens (True) and all else (False)."""
        start = 0
        for match in self._pieces.finditer(rendering):
            if match["control"] is None:
                continue
            if match.start() > start:
                yield False, rendering[start : match.start()]
            yield True, match[0]
            start = match.end()
        if start < len(rendering):
            yield False, rendering[start:]


def unmark(text: str) -> str:
    """`text` without marks."""
    return text.translate(_MARKS)


def _patterns(control: Sequence[AddedToken]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds control tokens in a text; and in a rendering, with the blanks that they absorb."""
    control = sorted(control, key=lambda token: -len(token.content))
    texts = "|".join(re.escape(token.content) for token in control) or "(?!)"
    absorbing = "|".join(
        r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
        for token in control
    )
    return re.compile(texts), re.compile(
        f"{OPEN}(?:{texts}){CLOSE}|(?P<control>{absorbing or '(?!)'})"
    )


def _copy(core: Any, added: dict[int, AddedToken], hidden: Any) -> Any:
    """A tokenizer over the same model, in which the `hidden` added tokens are never found."""
    copy = Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(core, part) is not None:
            setattr(copy, part, getattr(core, part))
    for token_id, token in added.items():
        if token.content not in hidden:
            copy.add_tokens([token])
        elif copy.token_to_id(token.content) is None:
            # Takes the id, so that later tokens keep theirs; cleaned text cannot hold the mark.
            copy.add_tokens([AddedToken(OPEN + token.content, special=True, normalized=False)])
        if token.content not in hidden and copy.token_to_id(token.content) != token_id:
            raise ChatError(
                f"the added token {token.content!r} has id {token_id}, which does not follow "
                "from its place in tokenizer.json; renumber the added tokens without holes"
            )
    return copy
