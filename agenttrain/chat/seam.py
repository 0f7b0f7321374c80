"""Where the assistant's own text ends in a rendering, and what the template makes of replies.

The seam is found in the rendering of a minimal conversation that has the shape of the real one:
calls named and numbered as the real ones, a placeholder at the end of the assistant's text and one
for each reply. Nothing counts end-of-turn tokens, so it does not matter which they are, or whether
there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agenttrain.chat.encoding import ChatError, Encoder, clean, unmark
from agenttrain.chat.render import USER
from agenttrain.types import AssistantTurn, Message, ToolCall

Render = Callable[[Sequence[Message], bool], str]
"""Marked messages, and whether to add the generation prompt -> marked text."""

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


def text_after(
    render: Render, turn: AssistantTurn, replies: Sequence[Message], *, generation_prompt: bool
) -> tuple[str, str]:
    """(ending, text): how an answer ends, and all that follows the assistant's own (marked) text.

    Example: ``("<|im_end|>\\n", "<|im_end|>\\n<|im_start|>user\\n…")``. Raises ChatError where the
    seam is not to be found.
    """
    assistant = _stand_in(turn)
    ending = _after_body(render([USER, {"role": "assistant", "content": BODY}], False))
    # What follows the placeholder in the last call: `"}}\n</tool_call>`, and then the ending.
    closing = _after_body(render([USER, assistant], False))
    if not closing.endswith(ending):
        raise ChatError(
            f"the chat template ends an answer with {unmark(ending)!r} but a tool call with "
            f"{unmark(closing)!r}: where a turn with calls ends is not known; set chat_template"
        )
    closing = closing.removesuffix(ending)
    text = _after_body(render([USER, assistant, *replies], generation_prompt))
    if not text.startswith(closing):
        raise ChatError(
            f"the chat template ends a turn with {unmark(closing)!r}, but with "
            f"{unmark(text[: len(closing)])!r} once replies follow; set chat_template"
        )
    return ending, text[len(closing) :]


def _stand_in(turn: AssistantTurn) -> Message:
    """A short message of the turn's shape whose text ends with BODY and little after it."""
    message: Message = {"role": "assistant", "content": "" if turn.calls else BODY}
    if turn.calls and turn.content:
        message["content"] = "c"
    if turn.reasoning:
        message["reasoning_content"] = "r"
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": {"a": BODY}},
            }
            for call in turn.calls
        ]
    return message


def _after_body(rendering: str) -> str:
    _, found, after = rendering.rpartition(BODY)
    if not found:
        raise ChatError(
            "the chat template does not render the assistant's tool calls or content; set "
            "chat_template to a template that does"
        )
    return after


class ReplyTexts:
    """What the template makes of a reply's text; most leave it alone, which is found out once."""

    def __init__(self, render: Render, encoder: Encoder) -> None:
        self._render = render
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
        """`text_after` a turn that gets one reply of `role`."""
        turn = CALL if role == "tool" else ANSWER
        reply = {"role": role, "content": text}
        if role == "tool":
            reply |= {"tool_call_id": turn.calls[0].id, "name": turn.calls[0].name}
        return text_after(self._render, turn, [reply], generation_prompt=True)

    def _transformed(self, role: str, text: str) -> str:
        """What stands between the constant text before and after a reply."""
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
