"""Where the assistant's own text ends in a rendering, and what the template makes of replies.

The seam is found in the rendering of a minimal conversation that has the shape of the real one:
calls named and numbered as the real ones, a placeholder at the end of the assistant's text and one
for each reply. Nothing counts end-of-turn tokens, so it does not matter which they are, or whether
there are any.
"""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.chat.behaviour import Render
from agenttrain.chat.encoding import ChatError, Encoder, clean, unmark
from agenttrain.chat.render import USER
from agenttrain.types import AssistantTurn, Message, ToolCall

BODY = "\ufdd2"
"""Stands for what the assistant wrote last; like the reply placeholders, `clean` forbids it."""
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


def placeholder(index: int) -> str:
    """Stands for the text of reply `index`."""
    return f"\ufdd3{index}\ufdd4"


class Seam:
    """Splits the text behind an assistant's own into the end of its turn and what follows that.

    An answer's end is known from an answer that nothing follows. A turn with calls ends the same
    way, or by the last control token of what closes its calls (``<|call|>`` of harmony,
    ``<|tool_response>`` of Gemma 4); where answers have no end of their own (GLM), by the control
    token of whatever follows.
    """

    def __init__(self, render: Render, encoder: Encoder) -> None:
        self._render = render
        self._encoder = encoder

    def split(
        self, turn: AssistantTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> tuple[str, str]:
        """(end of turn, text behind it) in marked text: ``("<|im_end|>", "\\n<|im_start|>…")``.

        The end is empty where the template writes no control token there. Raises ChatError where
        the seam is not to be found.
        """
        # A short message of the turn's shape whose text ends with BODY and little after it. Content
        # and reasoning beside calls stay out: a model writes them before its calls, but some
        # templates refuse them there (GPT-OSS) or render them after the replies (Gemma 4).
        assistant: Message = {"role": "assistant", "content": "" if turn.calls else BODY}
        if turn.calls:
            functions = [{"name": call.name, "arguments": {"a": BODY}} for call in turn.calls]
            assistant["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(turn.calls, functions, strict=True)
            ]
        closing, end = self._closing(assistant)
        text = _after_body(self._render([USER, assistant, *replies], generation_prompt))
        if not text.startswith(closing):
            raise ChatError(
                f"the chat template ends a turn with {unmark(closing)!r}, but with "
                f"{unmark(text[: len(closing)])!r} once replies follow; set chat_template"
            )
        text = text[len(closing) :]
        if end and text.startswith(end):
            return end, text[len(end) :]
        if (other := self._first_control(text)) or not end:
            return other, text[len(other) :]
        raise ChatError(
            f"the chat template ends an answer with {unmark(end)!r}, but with "
            f"{unmark(text[: len(end)])!r} once replies follow; set chat_template"
        )

    def answer_end(self) -> str:
        """The end of an answer that nothing follows, e.g. ``<|im_end|>``."""
        answer = _after_body(self._render([USER, {"role": "assistant", "content": BODY}], False))
        return self._to_last_control(answer)

    def _closing(self, assistant: Message) -> tuple[str, str]:
        """(text that closes the turn's calls, the end of turn) where nothing follows."""
        end = self.answer_end()
        if not assistant.get("tool_calls"):
            return "", end
        text = _after_body(self._render([USER, assistant], False))
        if not end:
            return text.rstrip(), ""
        closed = self._to_last_control(text)
        if not closed.endswith(end):
            # Calls end by a token of their own.
            pieces = list(self._encoder.pieces(closed))
            end = pieces[-1][1] if pieces else ""
        return closed.removesuffix(end), end

    def _to_last_control(self, text: str) -> str:
        pieces = list(self._encoder.pieces(text))
        while pieces and not pieces[-1][0]:
            pieces.pop()
        return "".join(piece for _, piece in pieces)

    def _first_control(self, text: str) -> str:
        """Up to the control token that begins a text after nothing but blanks."""
        begin = ""
        for control, piece in self._encoder.pieces(text):
            begin += piece
            if control:
                return begin
            if piece.strip():
                break
        return ""


def _after_body(rendering: str) -> str:
    _, body, after = rendering.rpartition(BODY)
    if not body:
        raise ChatError(
            "the chat template does not render the assistant's tool calls or content; set "
            "chat_template to a template that does (hermes adds tools to any)"
        )
    return after


class ReplyTexts:
    """Texts of replies as the template writes them; most leave them alone, which is probed once."""

    def __init__(self, seam: Seam, encoder: Encoder) -> None:
        self._seam = seam
        self._encoder = encoder
        self._frames: dict[str, tuple[str, str]] = {}
        self._verbatim: dict[str, bool] = {}

    def __call__(self, reply: Message) -> str:
        """The text as it stands in a rendering. Raises ChatError for content that is no text."""
        role, content = reply["role"], reply.get("content") or ""
        if not isinstance(content, str):
            raise ChatError(f"a reply of the role {role} holds {type(content).__name__}, not text")
        if role not in self._verbatim:
            self._verbatim[role] = all(self._transformed(role, p) == p for p in REPLY_PROBES)
        return clean(content) if self._verbatim[role] else self._transformed(role, content)

    def after_turn(self, role: str, text: str) -> tuple[str, str]:
        """`Seam.split` of a turn that gets one reply of `role`."""
        turn = CALL if role == "tool" else ANSWER
        reply = {"role": role, "content": text}
        if role == "tool":
            reply |= {"tool_call_id": turn.calls[0].id, "name": turn.calls[0].name}
        return self._seam.split(turn, [reply], generation_prompt=True)

    def _transformed(self, role: str, text: str) -> str:
        """Return what stands between the constant text before and after a reply."""
        if role not in self._frames:
            _, frame = self.after_turn(role, placeholder(0))
            before, _, after = frame.partition(placeholder(0))
            self._frames[role] = before, after
        before, after = self._frames[role]
        _, rendered = self.after_turn(role, self._encoder.mark(text))
        end = len(rendered) - len(after)
        if end < len(before) or not rendered.startswith(before) or not rendered.endswith(after):
            raise ChatError(
                f"what the chat template writes around a reply of the role {role} changes with "
                f"the reply's text ({text[:40]!r}); set chat_template"
            )
        return unmark(rendered[len(before) : end])
