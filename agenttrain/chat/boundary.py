"""The boundary between a completion and the next one: its place in a rendering, and its tokens.

`TurnBoundary` finds it by rendering a minimal conversation of the same shape: the calls have the
real names and ids, BODY stands at the end of the assistant's text, and a slot in each reply.
End-of-turn tokens are not counted, so a template may have any of them, or none.

`build_suffix` and `fill_suffix` tokenise the text after the boundary. The text around the
slots is constant and tokenised once. Each reply is tokenised per call, together with the
text between the nearest control tokens on either side, so that tokens merge across its edges as
they do in the full rendering::

    <|im_end|>                              end of turn: added when the completion lacks it
    \\n<|im_start|>user\\n<tool_response>     constant ids
    \\n{reply 0}\\n                           tokenised per call
    </tool_response><|im_end|>\\n<|im_…      constant ids
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from agenttrain.chat.encoding import ChatError, Encoder, clean, unmark
from agenttrain.chat.probing import USER, Render
from agenttrain.types import AssistantTurn, Message, Origin, ToolCall
from agenttrain.utils.content import parts

BODY = "\ufdd2"
"""Placeholder for the end of the assistant's text. `clean` removes it, as it does the replies'
slots, from the text of others."""
REPLY_PROBES = (
    "",
    "a",
    " \n a\t\n\n",
    '{"a": "é"}',
    "[1]",
    "'\"\\",
    "<b>&amp;</b>",
    "\u2028\ufeff",
)
"""Texts that show whether a template changes replies (trims, escapes, parses them)."""
ANSWER = AssistantTurn(content="c", reasoning=None, calls=())
CALL = AssistantTurn(
    content="", reasoning=None, calls=(ToolCall(id="call_0_0", name="f", arguments={}),)
)


def slot(index: int) -> str:
    """Return the slot numbered `index`, which stands for a text of a reply."""
    return f"\ufdd3{index}\ufdd4"


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """Splits the text after an assistant's message into the end of its turn and what follows it.

    It renders a short conversation of the same shape, in which the placeholder BODY ends the
    assistant's text, and looks at the text after BODY.

    The text after BODY is `closing`, which closes the calls (empty in an answer), then `end`, which
    ends the turn, then the text after the turn::

        template  turn    closing               end              after the turn
        Qwen      answer                        <|im_end|>       \\n<|im_start|>user\\n…
        Qwen      calls   "}}\\n</tool_call>     <|im_end|>       \\n<|im_start|>user\\n…
        GPT-OSS   answer                        <|end|>          <|start|>user<|message|>…
        GPT-OSS   calls   "}                    <|call|>         <|start|>functions.f…
        GLM       answer                        <|user|>         \\n…
        GLM       calls   </arg_value>\\n</too…  <|observation|>  \\n<tool_response>…

    In GLM a turn has no end of its own: it ends with the token that begins the next message.
    """

    render: Render
    """Renders messages to marked text: control tokens in the messages' own texts are wrapped."""
    encoder: Encoder
    """Splits marked text into the template's control tokens and other text."""

    def split(
        self, turn: AssistantTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> tuple[str, str]:
        """Return (end of turn, text after it), such as ``("<|im_end|>", "\\n<|im_start|>…")``.

        Both are marked text. The end is empty if the template writes no control token there. Raises
        ChatError if the boundary cannot be found.
        """
        assistant = _short_message(turn)
        # These are of a turn that no message follows: GPT-OSS then ends an answer with <|return|>,
        # GLM with nothing.
        closing, end = self._calls_end(assistant) if turn.calls else ("", self.answer_end())
        conversation = [USER, assistant, *replies]
        text = _text_after_body(self.render(conversation, generation_prompt=generation_prompt))
        if not text.startswith(closing):
            raise ChatError(
                f"the chat template ends a turn with {unmark(closing)!r}, but with "
                f"{unmark(text[: len(closing)])!r} once replies follow; set chat_template"
            )
        text = text[len(closing) :]
        if end and text.startswith(end):
            return end, text[len(end) :]
        # With a message after it, the turn may end otherwise: with <|end|> in GPT-OSS, <|user|> in
        # GLM. Such an end is the next control token, if only blanks stand before it.
        up_to_control = ""
        for control, piece in self.encoder.pieces(text):
            up_to_control += piece
            if control:
                return up_to_control, text[len(up_to_control) :]
            if piece.strip():
                break
        if not end:  # the template marks no end of turn at all
            return "", text
        raise ChatError(
            f"the chat template ends an answer with {unmark(end)!r}, but with "
            f"{unmark(text[: len(end)])!r} once replies follow; set chat_template"
        )

    def _calls_end(self, assistant: Message) -> tuple[str, str]:
        """Return (text that closes the calls, end of the turn) of a message that nothing follows.

        `assistant` is a message of `_short_message`: the placeholder BODY is the last argument of
        its calls, and the text after BODY closes the calls and ends the turn. Examples::

            Qwen     "}}\\n</tool_call>", "<|im_end|>"     as answers end
            GPT-OSS  "}", "<|call|>"                      answers end with <|return|>
            GLM      "</arg_value>\\n</tool_call>", ""     no turn has an end of its own
        """
        after_body = _text_after_body(self.render([USER, assistant], generation_prompt=False))
        answer_end = self.answer_end()
        if not answer_end:
            return after_body.rstrip(), ""
        closing_and_end = self._up_to_last_control(after_body)
        if closing_and_end.endswith(answer_end):
            return closing_and_end.removesuffix(answer_end), answer_end
        # Calls end with another token than answers. It is the last piece: (is control, text).
        pieces = list(self.encoder.pieces(closing_and_end))
        _, end = pieces[-1] if pieces else (False, "")
        return closing_and_end.removesuffix(end), end

    def answer_end(self) -> str:
        """Return the end of an answer that nothing follows, e.g. ``<|im_end|>``."""
        answer: Message = {"role": "assistant", "content": BODY}
        rendering = self.render([USER, answer], generation_prompt=False)
        return self._up_to_last_control(_text_after_body(rendering))

    def _up_to_last_control(self, text: str) -> str:
        """Return the text up to its last control token, inclusive; empty if it has none.

        Example: ``"}\\n</tool_call><|im_end|>\\n"`` without the newline at its end.
        """
        pieces = list(self.encoder.pieces(text))  # (is control, text)
        while pieces and not pieces[-1][0]:
            pieces.pop()
        return "".join(piece for _, piece in pieces)


def _short_message(turn: AssistantTurn) -> Message:
    """Return a stand-in for a turn's message, to find where its end begins in a rendering.

    The placeholder BODY is the last text in it: the content of an answer, or the argument of the
    last call. So the text after BODY in a rendering is what the template writes after the turn's
    own text, which does not depend on the turn's content and arguments. Content and reasoning
    beside calls are left out: a model writes them before its calls, but some templates refuse them
    there (GPT-OSS) or render them after the replies (Gemma 4).
    """
    if not turn.calls:
        return {"role": "assistant", "content": BODY}
    functions = [{"name": call.name, "arguments": {"a": BODY}} for call in turn.calls]
    calls = [
        {"id": call.id, "type": "function", "function": function}
        for call, function in zip(turn.calls, functions, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _text_after_body(rendering: str) -> str:
    """Return the text after the last placeholder BODY, the end of the assistant's own text.

    Raises ChatError if a rendering has none.
    """
    _, body, after = rendering.rpartition(BODY)
    if not body:
        raise ChatError(
            "the chat template does not render the assistant's tool calls or content; set "
            "chat_template to a template that does (hermes adds tools to any)"
        )
    return after


@dataclass(frozen=True, slots=True)
class ReplyTexts:
    """Returns the texts of replies as the template renders them; it may trim or escape texts.

    Example: ``reply_texts({"role": "tool", "content": " 7\\n"})`` is ``7`` if the template trims.

    The text is rendered in a short conversation, and the constant text around it, the frame, is cut
    off. A role is verbatim if the template leaves its texts unchanged, which REPLY_PROBES show at
    the role's first reply. Its later texts are not rendered, but only cleaned of the characters
    that this package reserves, as every text of others is.
    """

    boundary: TurnBoundary
    encoder: Encoder
    _frames: dict[str, tuple[str, str]] = field(default_factory=dict, init=False, compare=False)
    """Constant text (before, after) a reply's own text, by role."""
    _verbatim: dict[str, bool] = field(default_factory=dict, init=False, compare=False)
    """Role -> True if the template renders texts of such replies unchanged."""

    def __call__(self, reply: Message) -> str:
        """Return the reply's text as it is rendered. Raises ChatError if its content is no text."""
        role, content = reply["role"], reply.get("content") or ""
        if not isinstance(content, str):
            raise ChatError(f"a reply of the role {role} holds {type(content).__name__}, not text")
        return clean(content) if self._is_verbatim(role) else self._rendered_text(role, content)

    def texts_beside_images(self, reply: Message) -> list[str]:
        """Return the texts of a reply with images, as rendered. Raises ChatError.

        Rendered together with images, a changed text could not be told from the text around it, so
        that the template must leave the role's texts unchanged.
        """
        if not self._is_verbatim(reply["role"]):
            raise ChatError(
                f"the chat template changes the texts of replies of the role {reply['role']}, so "
                "that they cannot hold images; set chat_template"
            )
        return [clean(part) for part in parts(reply["content"]) if isinstance(part, str)]

    def _is_verbatim(self, role: str) -> bool:
        """Return True if the template changes none of REPLY_PROBES; it is tried once per role."""
        if role not in self._verbatim:
            self._verbatim[role] = all(self._rendered_text(role, p) == p for p in REPLY_PROBES)
        return self._verbatim[role]

    def after_turn(self, role: str, text: str) -> tuple[str, str]:
        """Return (end of turn, text after it) for a turn with one reply: `text` by `role`."""
        turn = CALL if role == "tool" else ANSWER
        reply = {"role": role, "content": text}
        if role == "tool":
            reply |= {"tool_call_id": turn.calls[0].id, "name": turn.calls[0].name}
        return self.boundary.split(turn, [reply], generation_prompt=True)

    def _rendered_text(self, role: str, text: str) -> str:
        """Return a reply's text as it is rendered, without the constant text around it.

        A template may change the text, e.g. strip it. The text around it is found once per role,
        by rendering a placeholder (a slot) in place of the text.
        """
        # `after_turn` renders an assistant's turn and the reply. The end of that turn, the first of
        # its two results, is not needed here.
        if role not in self._frames:
            _, rendered_slot = self.after_turn(role, slot(0))
            before, _, after = rendered_slot.partition(slot(0))
            self._frames[role] = before, after
        before, after = self._frames[role]
        # Control tokens in the text are wrapped (`mark`), so that the search for the end of the
        # turn does not take them for the template's own.
        _, rendered = self.after_turn(role, self.encoder.mark(text))
        end = len(rendered) - len(after)
        # Before and after must both stand there, and must not overlap.
        if end < len(before) or not rendered.startswith(before) or not rendered.endswith(after):
            raise ChatError(
                f"what the chat template writes around a reply of the role {role} changes with "
                f"the reply's text ({text[:40]!r}); set chat_template"
            )
        return unmark(rendered[len(before) : end])


Spans = list[tuple[Origin, list[int]]]
_start_of, _end_of = itemgetter(0), itemgetter(1)
"""Of a token's offsets in a text: (start, end)."""
_REPLY = re.compile("\ufdd3(\\d+)\ufdd4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyBlock:
    """A text between two control tokens that holds replies: literal texts and indices of replies.

    Example, for ``\\n{reply 0}\\n``: ``ReplyBlock(parts=("\\n", 0, "\\n"))``
    """

    parts: tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """The context after a turn, with gaps for the texts of its replies.

    It is the same for all turns of one shape, which are turns that call the same tools and have
    replies of the same roles: only the texts of the replies differ.
    """

    end_ids: tuple[int, ...]
    """The end of the turn, of which a control token is the last: ``<|im_end|>``. Empty if the
    template writes none."""
    blocks: tuple[tuple[int, ...] | ReplyBlock, ...]
    """The context after the end: ids of constant text, and text to fill with replies."""
    glue_length: int
    """Number of tokens of `blocks` if all replies are empty texts: the template's own tokens."""
    last_end_ids: tuple[int, ...] = ()
    """The end of an answer that nothing follows, e.g. GPT-OSS's ``<|return|>``; empty unless it
    differs from `end_ids`."""


def build_suffix(end: str, text: str, encoder: Encoder, *, slots: int) -> Suffix:
    """Tokenise the end of a turn and the text after it.

    `text` has the slots 0 to `slots` - 1, one for each text of a reply. Text between control
    tokens that holds a slot becomes a ReplyBlock, which `fill_suffix` tokenises with each
    reply. All other text is constant. The suffix's `glue_length` counts the tokens that remain
    if all replies are empty.
    """
    if _REPLY.findall(text) != [str(index) for index in range(slots)]:
        raise ChatError(
            f"the chat template does not show each of {slots} replies once and in order: "
            f"{_REPLY.sub('<reply>', unmark(text))!r}; set chat_template"
        )
    blocks: list[tuple[int, ...] | ReplyBlock] = []
    constant = ""
    for control, piece in encoder.pieces(text):
        if control or not _REPLY.search(piece):  # it holds no reply, so its ids never change
            constant += piece
            continue
        blocks += [tuple(encoder.encode(constant))] if constant else []
        constant = ""
        # re.split with a group puts the indices of replies at odd places: ["\n", "0", "\n"].
        literals_and_indices = _REPLY.split(piece)
        parts = tuple(
            int(part) if place % 2 else unmark(part)
            for place, part in enumerate(literals_and_indices)
        )
        blocks.append(ReplyBlock(parts=parts))
    blocks += [tuple(encoder.encode(constant))] if constant else []
    return Suffix(
        end_ids=tuple(encoder.encode(end)),
        blocks=tuple(blocks),
        glue_length=sum(len(ids) for _, ids in fill_suffix(blocks, [""] * slots, encoder)),
    )


def fill_suffix(
    blocks: Sequence[tuple[int, ...] | ReplyBlock], texts: Sequence[str], encoder: Encoder
) -> Spans:
    """Return the ids of `blocks` with the replies' texts filled in, as (origin, ids).

    An int in a block's `parts` is the index of a reply in `texts`. Example, for the block
    ``\\n{reply 0}\\n`` and the reply "7": the template's id of ``\\n``, the tool's of ``7``, the
    template's of ``\\n``. A token that holds any character of a reply is the tool's, such as
    ``7\\n`` if the tokenizer merges them.
    """
    unmerged: Spans = []
    for block in blocks:
        if not isinstance(block, ReplyBlock):
            unmerged.append((Origin.template, list(block)))
            continue
        pieces = [texts[part] if isinstance(part, int) else part for part in block.parts]
        ids, offsets = encoder.encode_plain_offsets("".join(pieces))  # offsets: (start, end)
        next_token = 0  # the first token that has no origin yet
        piece_end = 0  # in the joined pieces
        for part, piece in zip(block.parts, pieces, strict=True):
            piece_start, piece_end = piece_end, piece_end + len(piece)
            is_reply = isinstance(part, int)
            if not is_reply or not piece:
                continue
            # The reply's tokens are those that hold any of its characters: from the first token
            # that ends after `piece_start`, up to the first that begins at `piece_end` or later.
            first = bisect_right(offsets, piece_start, lo=next_token, key=_end_of)
            after = bisect_left(offsets, piece_end, lo=first, key=_start_of)
            unmerged += [
                (Origin.template, ids[next_token:first]),
                (Origin.tool, ids[first:after]),
            ]
            next_token = after
        unmerged.append((Origin.template, ids[next_token:]))
    spans: Spans = []
    for origin, ids in unmerged:  # join neighbours of one origin
        if spans and spans[-1][0] is origin:
            spans[-1][1].extend(ids)
        elif ids:
            spans.append((origin, ids))
    return spans
