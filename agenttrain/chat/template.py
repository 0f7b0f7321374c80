"""Conversations to token ids and completions back to messages, for one tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agenttrain.chat.clip import clip
from agenttrain.chat.encoding import ChatError, Encoder
from agenttrain.chat.families import ResponseSpec
from agenttrain.chat.render import USER, render
from agenttrain.chat.response import parse_response
from agenttrain.chat.seam import ReplyTexts, placeholder, text_after
from agenttrain.chat.suffix import Suffix, build, fill, split_end
from agenttrain.types import AssistantTurn, Finish, Message, Origin

CACHED_SHAPES = 4096


class Chat:
    """Renders with `template`, parses with `response`.

    Example of one turn: the prompt's ids, what the model sampled, the suffix's::

        ids = chat.prompt_ids([{"role": "user", "content": "3 + 4?"}], schemas)
        turn = chat.parse(sampled, schemas, turn=0)          # one call: add(a=3, b=4)
        replies = [{"role": "tool", "content": "7", "tool_call_id": turn.calls[0].id}]
        chat.suffix(turn, replies, completion_ids=sampled, finish=Finish.stop,
                    generation_prompt=True)   # [(template, […]), (tool, [29]), (template, […])]
    """

    stop_token_ids: tuple[int, ...]
    """What a completion may end with: end-of-sequence ids, then what the template ends turns by."""
    template: str
    """The template's source, after fixes: what must be saved with the model."""

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        response: ResponseSpec,
        *,
        kwargs: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.template = template
        self.kwargs = dict(kwargs or {})
        self.encoder = Encoder(tokenizer, template)
        self._tokenizer = tokenizer
        self._response = response
        self._suffixes: dict[Any, Suffix] = {}
        self._reply_text = ReplyTexts(self._render_marked, self.encoder)
        self.stop_token_ids = tuple(dict.fromkeys([*eos_token_ids, *self._turn_ends()]))
        self._delimiters = (
            response.call_open,
            response.call_close,
            response.reasoning_open,
            response.reasoning_close,
        )
        self._stripped = frozenset(self.stop_token_ids) | {
            token_id
            for text, token_id in self.encoder.control.items()
            if text not in self._delimiters
        }
        self._in_reasoning = (
            self.render([USER], generation_prompt=True).rstrip().endswith(response.reasoning_open)
        )

    def prompt_ids(self, messages: Sequence[Message], schemas: Sequence[dict]) -> list[int]:
        """[T] Ids of the messages and the generation prompt.

        Control tokens in messages and schemas are encoded as plain text, but for the marks of
        reasoning and calls in what the assistant itself has said. Raises ChatError for content
        that is no text, and when the template refuses the messages.
        """
        for message in messages:
            _refuse_media(message)
        marked = [
            self.encoder.mark(m, self._delimiters if m.get("role") == "assistant" else ())
            for m in messages
        ]
        tools = self.encoder.mark(schemas)
        return self.encoder.encode(self.render(marked, tools, generation_prompt=True))

    def render(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict] = (),
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The template's text for messages that are already marked where they must be."""
        return render(
            self._tokenizer,
            self.template,
            messages,
            schemas,
            generation_prompt=generation_prompt,
            kwargs=self.kwargs,
        )

    def parse(
        self, token_ids: Sequence[int], schemas: Sequence[dict], *, turn: int
    ) -> AssistantTurn:
        """A completion as content, reasoning and calls ``call_{turn}_{index}``; never raises.

        `schemas` are for call formats whose arguments carry no types of their own.
        """
        text = self.decode([token for token in token_ids if token not in self._stripped])
        return parse_response(text, self._response, turn=turn, in_reasoning=self._in_reasoning)

    def suffix(
        self,
        turn: AssistantTurn,
        replies: Sequence[Message],
        *,
        completion_ids: Sequence[int],
        finish: Finish,
        generation_prompt: bool,
    ) -> list[tuple[Origin, list[int]]]:
        """Context ids after the actual end of the completion, by origin.

        They hold the end of the turn if the completion lacks it, the replies as the template
        writes them, and the next generation prompt. The cost grows with the replies only.
        """
        suffix = self._suffix(turn, replies, generation_prompt)
        spans = fill(suffix.blocks, [self._reply_text(reply) for reply in replies], self.encoder)
        missing = self._missing_end(suffix, completion_ids, finish)
        if missing and spans and spans[0][0] is Origin.template:
            spans[0][1][:0] = missing
        elif missing:
            spans.insert(0, (Origin.template, list(missing)))
        return spans

    def end_ids(
        self, turn: AssistantTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> tuple[int, ...]:
        """What the template ends this turn by; empty where it writes no control token there."""
        return self._suffix(turn, replies, generation_prompt).end_ids

    def wrapper_length(
        self,
        turn: AssistantTurn,
        replies: Sequence[Message],
        *,
        completion_ids: Sequence[int],
        finish: Finish,
        generation_prompt: bool,
    ) -> int:
        """Tokens of `suffix` with empty replies."""
        suffix = self._suffix(turn, replies, generation_prompt)
        return suffix.glue_length + len(self._missing_end(suffix, completion_ids, finish))

    def clip(self, text: str, max_tokens: int) -> str:
        """`text`, or its head and a visible marker, in at most `max_tokens` plain tokens."""
        return clip(self.encoder, text, max_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which control tokens are ordinary text."""
        return self.encoder.encode_plain(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self.encoder.decode(token_ids)

    def _missing_end(
        self, suffix: Suffix, completion_ids: Sequence[int], finish: Finish
    ) -> tuple[int, ...]:
        """The end of the turn, unless sampling stopped at the token that the template ends by."""
        end = suffix.end_ids
        ended = finish is Finish.stop and bool(end) and completion_ids[-1] == end[-1]
        return () if ended else end

    def _suffix(
        self, turn: AssistantTurn, replies: Sequence[Message], generation_prompt: bool
    ) -> Suffix:
        """The suffix of this turn's shape: all of it that may change what surrounds the replies."""
        shape = (
            generation_prompt,
            bool(turn.content),
            bool(turn.reasoning),
            tuple((call.name, call.id) for call in turn.calls),
            tuple(tuple((k, repr(v)) for k, v in r.items() if k != "content") for r in replies),
        )
        if shape not in self._suffixes:
            if len(self._suffixes) >= CACHED_SHAPES:
                self._suffixes.clear()
            self._suffixes[shape] = self._build(turn, replies, generation_prompt)
        return self._suffixes[shape]

    def _build(
        self, turn: AssistantTurn, replies: Sequence[Message], generation_prompt: bool
    ) -> Suffix:
        mark = self.encoder.mark
        calls = tuple(replace(call, name=mark(call.name), id=mark(call.id)) for call in turn.calls)
        stand_ins = [
            {**mark({**reply, "content": None}), "content": placeholder(index)}
            for index, reply in enumerate(replies)
        ]
        ending, text = text_after(
            self._render_marked,
            replace(turn, calls=calls),
            stand_ins,
            generation_prompt=generation_prompt,
        )
        return build(ending, text, self.encoder, replies=len(replies))

    def _render_marked(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self.render(messages, generation_prompt=generation_prompt)

    def _turn_ends(self) -> list[int]:
        """Ids of the control tokens that follow a turn, before replies of either role."""
        ids = []
        for role in ("tool", "user"):
            with suppress(ChatError):  # a template without tools ends turns all the same
                end, _ = split_end(*self._reply_text.after_turn(role, "r"), self.encoder)
                ids += self.encoder.encode(end)[-1:]
        return ids


def _refuse_media(message: Message) -> None:
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ChatError(
                f"a message of the role {message.get('role')} holds a part of type {kind!r}: only "
                "text is supported; remove it from the data"
            )
