"""Encode text to token ids and decode it; control tokens in the text of others stay text.

A control token (``<|im_end|>``, ``<tool_call>``) steers the model when the template writes it, and
must be ordinary text when a user or a tool wrote it. Every token that was added to a tokenizer's
vocabulary is a control token, special or not, unless `Encoder.ordinary` gives a reason against it.
Messages are therefore *marked* before they are rendered: each control token in them is wrapped in
two Unicode noncharacters. Templates pass these through, and `clean` removes them from the text of
others. In a rendering, a control token that is not wrapped was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agenttrain.types import AgenttrainError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""The marks: Unicode noncharacters that wrap a control token of a message."""
CACHED_PIECES = 256
"""Pieces between control tokens whose ids are cached."""
BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space in the sense of the `tokenizers` library, where a token absorbs the blanks beside
it."""
LARGE = 2**14
"""Characters of a text that is encoded without the interpreter's lock, so that other threads run
meanwhile: a megabyte takes a second."""
SPACE = "\u2581"
"""A blank as SentencePiece writes it."""
_RESERVED = re.compile("[\\ud800-\\udfff\\ufdd0-\\ufdef]")
_MARKS = str.maketrans("", "", OPEN + CLOSE)


class ChatError(AgenttrainError):
    """A tokenizer, template or message that cannot be used; the message says what to change."""


def clean(text: str) -> str:
    """Replace lone surrogates and this package's marks in a text by U+FFFD."""
    return text if text.isascii() else _RESERVED.sub("\ufffd", text)


class Encoder:
    """Encodes and decodes with copies of a tokenizer's core, free of truncation and padding.

    A control token becomes its id where the template wrote it, and stays ordinary text where a
    message holds it. `mark` wraps those of messages before they are rendered, `encode` tells both
    kinds apart by the wrapping, and `encode_plain` encodes a text without any control token.

    The tokens that were added to the vocabulary are sorted by these properties. `template` is the
    chat template's source, `plain` a family's list of ordinary tokens::

        added token        special  in template  in plain  it is in
        <|im_end|>         yes      yes          no        control, steering_ids
        <tool_call>        no       yes          no        control, steering_ids, unspecial
        <|repo_name|>      no       no           no        control, unspecial
        <table>            no       no           yes       ordinary
    """

    control: dict[str, int]
    """Control tokens, text -> id: every added token that is not in `ordinary`. Only the template
    can write one: the same text in a message is encoded as ordinary text."""
    steering_ids: frozenset[int]
    """Ids of control tokens that are special or occur in the template. They are left out of a
    completion's text. Any other control token that was sampled is content."""
    unspecial: tuple[str, ...]
    """Control tokens that were added to the vocabulary, but not as special tokens."""
    ordinary: dict[str, str]
    """Added tokens that text of users and tools may become too, text -> the reason."""

    def __init__(
        self, tokenizer: Any, template: str, plain: Mapping[str, str] | None = None
    ) -> None:
        """`plain` maps added tokens that are ordinary text to the reason.

        It has no effect on tokens that are special or occur in the template.
        """
        core = getattr(tokenizer, "backend_tokenizer", None)  # of the `tokenizers` library
        if core is None:
            raise ChatError(
                f"model.path: {type(tokenizer).__name__} is not backed by the `tokenizers` "
                "library; save the tokenizer with a tokenizer.json"
            )
        added = dict(sorted(core.get_added_tokens_decoder().items()))
        # Tokens that steer the model for certain, whatever `plain` says.
        steering = {t.content for t in added.values() if t.special or t.content in template}
        self.ordinary = _ordinary_tokens(added.values(), steering, plain or {})
        ids = {token.content: token_id for token_id, token in added.items()}
        self.control = {text: ids[text] for text in ids if text not in self.ordinary}
        self.steering_ids = frozenset(ids[text] for text in steering if text in self.control)
        self._full = _without_tokens(core, added, hidden=())
        """Recognises all added tokens: for control tokens, and for renderings without marks."""
        self._plain = _without_tokens(core, added, hidden=self.control)
        """Recognises no control token: for texts in which none may appear."""
        self._demote_forgeable_tokens(core, added)
        self.unspecial = tuple(
            t.content for t in added.values() if t.content in self.control and not t.special
        )
        texts = _alternatives(self.control) if self.control else "(?!)"  # matches nothing
        self._control_pattern = re.compile(texts)
        # Matches marked tokens, and bare ones with the group `control`: the template wrote these.
        self._pieces_pattern = re.compile(f"{OPEN}(?:{texts}){CLOSE}|(?P<control>{texts})")
        # Control token -> (absorbs blanks on its left, on its right).
        self._absorbing = {
            token.content: (token.lstrip, token.rstrip)
            for token in added.values()
            if token.lstrip or token.rstrip
        }
        self._control_ids = frozenset(self.control.values())
        self._cached_ids: dict[tuple[bool, str], tuple[int, ...]] = {}
        """A piece of `pieces` -> its ids."""
        self._pieces_suffice = self._encodes_by_piece()
        """A rendering has the same ids whether it is encoded whole or by its `pieces`."""

    def _demote_forgeable_tokens(self, core: Any, added: dict[int, AddedToken]) -> None:
        """Move control tokens that plain text can become from `control` to `ordinary`.

        The model's own vocabulary may hold a control token too. Plain text then becomes that token,
        though `_plain` does not recognise it. Raises ChatError for a token that steers the model.
        """
        forgeable = [
            text for text, token_id in self.control.items() if token_id in self.encode_plain(text)
        ]
        for text in forgeable:
            if self.control.pop(text) in self.steering_ids:
                raise ChatError(
                    f"the tokenizer makes the control token {text!r} from plain text, so a "
                    "tool could forge it; use a tokenizer with byte-level pieces"
                )
            self.ordinary[text] = "the tokenizer's pieces make it from plain text too"
        if forgeable:
            self._plain = _without_tokens(core, added, hidden=self.control)

    def encode(self, rendering: str) -> list[int]:
        """Encode a rendering: control tokens are tokens, except those that `mark` wrapped.

        Without marks the result is the tokenizer's own.
        """
        # Encoding control tokens and the texts between them one by one is always safe, and fast,
        # because pieces are cached. But with some tokenizers (SentencePiece) a piece alone gets
        # other ids than in the whole text: their renderings are encoded whole where that is safe.
        if not self._pieces_suffice and (ids := self._encode_whole(rendering)) is not None:
            return ids
        ids = []
        for control, piece in self.pieces(rendering):
            # Cached, because all prompts of a run share pieces: the tools, the system message.
            piece_ids = self._cached_ids.get((control, piece))
            if piece_ids is None:
                core = self._full if control else self._plain
                piece_ids = tuple(_encoding(core, unmark(piece)).ids)
                if len(self._cached_ids) >= CACHED_PIECES:
                    self._cached_ids.clear()
                self._cached_ids[control, piece] = piece_ids
            ids += piece_ids
        return ids

    def _encode_whole(self, rendering: str) -> list[int] | None:
        """Return the ids of a rendering as the tokenizer gives them; None if that is not safe.

        It is not if the rendering has marks, which would be encoded too, or if the tokenizer makes
        more control tokens than the template wrote: a normalizer can turn text into one, e.g.
        ＜think＞ into <think>.
        """
        if OPEN in rendering or CLOSE in rendering:
            return None
        ids = _encoding(self._full, rendering).ids
        encoded_count = sum(token_id in self._control_ids for token_id in ids)
        written_count = sum(is_control for is_control, _ in self.pieces(rendering))
        return ids if encoded_count == written_count else None

    def _encodes_by_piece(self) -> bool:
        """Return True if encoding piece by piece gives the ids of the whole text."""
        probe = "".join(f"a b{text} c\nd{text}\n e{text}f" for text in self.control)
        ids: list[int] = []
        for control, piece in self.pieces(probe):
            encode = self._full.encode if control else self._plain.encode
            ids += encode(piece, add_special_tokens=False).ids
        return ids == self._full.encode(probe, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text, in which control tokens are ordinary text."""
        return _encoding(self._plain, clean(text)).ids

    def encode_plain_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text as `encode_plain` does, and each token's (start, end) in it."""
        encoding = _encoding(self._plain, clean(text))
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return self._full.decode(token_ids, skip_special_tokens=False)

    def mark(self, value: Any, bare: Collection[str] = ()) -> Any:
        """Copy a message, schema or text with its control tokens wrapped, except those in `bare`.

        Example, with the wrapping shown as brackets: ``"see <|im_end|>"`` ->
        ``"see [<|im_end|>]"``. `unmark` removes the wrapping. `bare` are tokens that the author of
        the text may write as control tokens: an assistant's ``<think>``. They stand in its texts;
        keys are names, so that all tokens in them are wrapped. Keys whose value is None are left
        out: many templates test only if a key exists, and would write ``None``.
        """
        if isinstance(value, str):
            # `clean` removes wrapping characters that the text holds itself.
            return self._control_pattern.sub(
                lambda token: token[0] if token[0] in bare else f"{OPEN}{token[0]}{CLOSE}",
                clean(value),
            )
        if isinstance(value, dict):
            return {self.mark(k): self.mark(v, bare) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [self.mark(item, bare) for item in value]
        return value

    def pieces(self, rendering: str) -> Iterator[tuple[bool, str]]:
        """Split a rendering into the template's control tokens (True) and other text (False).

        Example, with the wrapping of `mark` shown as brackets: ``"<|im_start|>see [<|im_end|>]"``
        -> ``(True, "<|im_start|>"), (False, "see [<|im_end|>]")``. Some tokens absorb the blanks
        beside them: such a token's piece is ``"\\n<|end|>"``.
        """
        text_start = 0  # end of the last control token: the text before the next begins there
        search_start = 0  # end of the last token, control or wrapped
        while (match := self._pieces_pattern.search(rendering, search_start)) is not None:
            search_start = match.end()
            token = match["control"]
            if token is None:  # wrapped by `mark`: a part of the text
                continue
            token_start, token_end = match.span()
            absorbs_left, absorbs_right = self._absorbing.get(token, (False, False))
            if absorbs_left:
                token_start = text_start + len(rendering[text_start:token_start].rstrip(BLANKS))
            while absorbs_right and token_end < len(rendering) and rendering[token_end] in BLANKS:
                token_end += 1
            if token_start > text_start:
                yield False, rendering[text_start:token_start]
            yield True, rendering[token_start:token_end]
            text_start = search_start = token_end
        if text_start < len(rendering):
            yield False, rendering[text_start:]


def _ordinary_tokens(
    added: Iterable[AddedToken], steering: Collection[str], plain: Mapping[str, str]
) -> dict[str, str]:
    """Return the added tokens that are ordinary text, with the reason.

    They are white space and, with the reasons of `plain`, those in it that do not steer the model.
    """
    ordinary = {}
    for token in added:
        if token.special:
            continue
        if not token.content.replace(SPACE, " ").strip():
            ordinary[token.content] = "white space"
        elif token.content not in steering and token.content in plain:
            ordinary[token.content] = plain[token.content]
    return ordinary


def _encoding(core: Any, text: str) -> Any:
    """Return a tokenizer's encoding of a text, without tokens added before or after it.

    `encode_batch` releases the interpreter's lock, so that other threads run while a large text is
    encoded. Short texts are faster without it.
    """
    if len(text) < LARGE:
        return core.encode(text, add_special_tokens=False)
    return core.encode_batch([text], add_special_tokens=False)[0]


def unmark(text: str) -> str:
    """Remove the marks from a text."""
    return text.translate(_MARKS)


def _alternatives(texts: Collection[str]) -> str:
    """Build a pattern that matches the longest of the texts at a position.

    It shares common beginnings, so that the time of a search does not grow with the number of
    texts. Example: ab, abc and d give ``(?:ab(?:c)?|d)``.
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:1], []).append(text)
    optional = branches.pop("", None) is not None  # one text ends here
    parts = []
    for group in branches.values():
        # What the first and the last text in sorted order share, all texts between them share too.
        first, last = min(group), max(group)
        length = 0
        while length < len(first) and first[length] == last[length]:
            length += 1
        head = first[:length]
        parts.append(re.escape(head) + _alternatives([text[len(head) :] for text in group]))
    pattern = "|".join(parts)
    if not parts or (len(parts) == 1 and not optional):
        return pattern
    return f"(?:{pattern})" + ("?" if optional else "")


def _without_tokens(core: Any, added: dict[int, AddedToken], hidden: Collection[str]) -> Any:
    """Return a tokenizer over the same model that does not recognise the `hidden` added tokens.

    The text of a hidden token is encoded like any other text. All other tokens keep their ids. The
    copy has no post-processor, so it adds no token at the beginning or end of a text. Raises
    ChatError for a token whose id would change.
    """
    copy = Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(core, part) is not None:
            setattr(copy, part, getattr(core, part))
    tokens = []
    for token in added.values():
        if token.content not in hidden:
            tokens.append(token)
            continue
        has_id_in_model = copy.token_to_id(token.content) is not None
        if not has_id_in_model:
            # Added tokens get the next free ids. Without this token, the one after it would get its
            # id, so a stand-in takes the id. It matches no text: it begins with the character OPEN,
            # which `clean` and `unmark` remove from every text before it is encoded.
            tokens.append(AddedToken(OPEN + token.content, special=True, normalized=False))
    copy.add_tokens(tokens)  # all at once: each call takes time for every token that exists
    for token_id, token in added.items():
        if token.content not in hidden and copy.token_to_id(token.content) != token_id:
            raise ChatError(
                f"the added token {token.content!r} has id {token_id}, which does not follow "
                "from its place in tokenizer.json; renumber the added tokens without holes"
            )
    return copy
