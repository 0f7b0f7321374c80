"""Answers to chat requests: sampled by an engine, all at once or as a stream of chunks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.stop_texts import StopScan, before_stop
from agenttrain.chat.wire.http import KEPT_ALIVE_S
from agenttrain.chat.wire.normal import Answer, AnswerHead, issue
from agenttrain.chat.wire.openai import (
    OPENING,
    ChatRequest,
    RequestError,
    chunk,
    completion_body,
    completion_chunks,
    read_messages,
)
from agenttrain.engines.base import Engine, EngineError, Streaming
from agenttrain.engines.config import Sampling
from agenttrain.serving.exchanges import Conversations, Prompt
from agenttrain.types import AssistantTurn, Finish

PARSE_S = 0.05
"""Seconds between two parses of an answer that is being streamed."""
LONGEST_MARK = 16
"""Most characters of a mark between reasoning and content, such as <think>."""


@dataclass(slots=True, kw_only=True)
class Answering:
    """A request that is being answered."""

    request: ChatRequest
    schemas: list[dict[str, Any]]
    prompt: Prompt
    sampling: Sampling
    head: AnswerHead
    sampled: list[int] = field(default_factory=list)
    """Tokens so far, where the engine reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An answer's tokens and the turn parsed from them, up to the first stop text."""

    token_ids: tuple[int, ...]
    finish: Finish
    """abort: it ends at a stop text, or the engine aborted it."""
    turn: AssistantTurn


@dataclass(slots=True, kw_only=True)
class ChatServer:
    """Chat completions over an engine, token-exact from turn to turn of a conversation.

    Example: ``await server.answer(parse_request(b'{"messages": […]}'))`` is a `chat.completion`.
    """

    engine: Engine
    chat: Chat
    model: str
    """Name under which clients ask for the model."""
    defaults: Sampling = field(default_factory=Sampling)
    """The temperature, top_p, top_k and min_p of requests that name none."""
    conversations: Conversations = field(init=False)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.chat)

    async def answer(self, request: ChatRequest) -> dict[str, Any]:
        """Return the `chat.completion`. Raises RequestError. Cancelling it aborts the sampling."""
        return await self.complete(self.begin(request))

    async def complete(self, answering: Answering) -> dict[str, Any]:
        """Return the `chat.completion` of a request that `begin` has read, as `answer` does."""
        sampled = await self._sample(answering)
        return completion_body(await self._record(answering, sampled))

    async def stream(self, answering: Answering) -> AsyncGenerator[dict[str, Any] | None]:
        """Yield `chat.completion.chunk` objects, and None to keep the connection alive.

        The content is streamed as it is sampled if the engine reports tokens and the request has no
        tools. With tools, only the complete text shows which part of it is a call.
        """
        request = answering.request
        reports_tokens = isinstance(self.engine, Streaming)
        is_live = reports_tokens and not answering.schemas and not request.stops
        sent_text = {"content": "", "reasoning_content": ""}
        sampling = asyncio.create_task(self._sample(answering))
        try:
            yield chunk(answering.head, OPENING)
            silent_since, tokens_read = time.monotonic(), 0
            while not sampling.done():
                await asyncio.wait((sampling,), timeout=PARSE_S if is_live else KEPT_ALIVE_S)
                if is_live and len(answering.sampled) > tokens_read and not sampling.done():
                    tokens_read = len(answering.sampled)
                    text = self.chat.text_of(answering.sampled)
                    delta = _delta(self._parse(answering, text), sent_text)
                    if delta:
                        silent_since = time.monotonic()
                        yield chunk(answering.head, delta)
                if time.monotonic() - silent_since >= KEPT_ALIVE_S:
                    silent_since = time.monotonic()
                    yield None
            sampled = sampling.result()
        finally:
            sampling.cancel()
        answer = await self._record(answering, sampled)
        include_usage = bool((request.stream_options or {}).get("include_usage"))
        for event in completion_chunks(answer, include_usage=include_usage, sent=sent_text):
            yield event

    def begin(self, request: ChatRequest) -> Answering:
        """Return a request with its prompt and sampling parameters. Raises RequestError."""
        if request.model not in (None, self.model):
            raise RequestError(
                f"model={request.model}: is not served here; the model is {self.model}",
                param="model",
                code="model_not_found",
                status=404,
            )
        messages, schemas = read_messages(request, self.chat.roles), request.schemas
        try:
            prompt = self.conversations.prompt(messages, schemas)
        except ChatError as error:
            raise RequestError(f"messages: {error}", param="messages") from error
        remaining_tokens = self.engine.max_context - len(prompt.token_ids)
        if remaining_tokens < 1:
            raise RequestError(
                f"messages: {len(prompt.token_ids)} tokens fill the context of "
                f"{self.engine.max_context}; shorten them",
                param="messages",
                code="context_length_exceeded",
            )
        limit = request.max_completion_tokens or request.max_tokens or remaining_tokens
        options: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p")
            if (value := getattr(request, name)) is not None
        }
        if "top_k" in options:
            options["top_k"] = max(options["top_k"], 0)  # some clients write -1 for all tokens
        sampling = replace(
            self.defaults,
            **options,
            max_tokens=min(limit, remaining_tokens),
            stop_token_ids=self.chat.stop_token_ids,
            seed=secrets.randbits(62) if request.seed is None else abs(request.seed),
        )
        return Answering(
            request=request,
            schemas=schemas,
            prompt=prompt,
            sampling=sampling,
            head=AnswerHead(model=self.model),
        )

    async def _sample(self, answering: Answering) -> Sampled:
        """Sample and parse an answer, up to the first stop text. Raises RequestError.

        If the engine reports tokens, the sampling itself ends at the stop text.
        """
        session, stops = answering.prompt.session, answering.request.stops
        scan = StopScan(self.chat.text_of, stops)
        generating = asyncio.ensure_future(
            self.engine.generate(answering.prompt.token_ids, answering.sampling, session=session)
        )

        def listen(token_id: int) -> None:
            """Take a token from the engine, and cancel the sampling at a stop text."""
            answering.sampled.append(token_id)
            if stops and scan.push(token_id):
                generating.cancel()

        if isinstance(self.engine, Streaming):
            self.engine.watch(session, listen)
        try:
            completion = await generating
            token_ids, finish = completion.token_ids, completion.finish
        except BaseException as error:
            task = asyncio.current_task()
            is_cancelled_by_caller = task is not None and task.cancelling() > 0
            if scan.end is None or is_cancelled_by_caller:
                await self.engine.release(session)
                if isinstance(error, EngineError):
                    raise RequestError(str(error), status=500) from error
                raise
            token_ids, finish = tuple(answering.sampled), Finish.abort  # `listen` cancelled it
        if not stops:
            turn = self._parse(answering, self.chat.text_of(token_ids))
            return Sampled(token_ids=token_ids, finish=finish, turn=turn)
        for token_id in token_ids[scan.count :]:
            scan.push(token_id)
        scan.finish()
        # Text after a stop text is no part of the answer: nothing continues from there.
        return Sampled(
            token_ids=token_ids[: scan.end],
            finish=finish if scan.end is None else Finish.abort,
            turn=self._parse(answering, scan.text),
        )

    def _parse(self, answering: Answering, text: str) -> AssistantTurn:
        """Read the text of an answer, complete or not."""
        messages = answering.prompt.messages
        turns = sum(message["role"] == "assistant" for message in messages)
        after = str(messages[-1]["role"])
        return self.chat.parse_text(text, answering.schemas, turn=turns, after=after)

    async def _record(self, answering: Answering, sampled: Sampled) -> Answer:
        """Record an answer for requests that continue it, and return it as the client gets it."""
        prompt, request = answering.prompt, answering.request
        message, call_ids = issue(sampled.turn, text_arguments=False)
        for key in ("content", "reasoning_content"):
            if text := message.get(key):  # a stop text may only appear once the parts are joined
                message[key] = before_stop(text, request.stops)
        sessions = [prompt.session]
        if sampled.finish is not Finish.abort:  # nothing can continue an aborted answer
            sessions = self.conversations.record(
                prompt, sampled.token_ids, sampled.finish, sampled.turn, message, call_ids
            )
        for session in sessions:
            await self.engine.release(session)
        return Answer(
            model=answering.head.model,
            id=answering.head.id,
            created=answering.head.created,
            message=message,
            finish=sampled.finish,
            prompt_tokens=len(prompt.token_ids),
            sampled_tokens=len(sampled.token_ids),
            cached_tokens=prompt.reused,
            token_ids=(prompt.token_ids, sampled.token_ids) if request.return_token_ids else None,
        )


def _delta(turn: AssistantTurn, sent_text: dict[str, str]) -> dict[str, str]:
    """Return the new text of an unfinished answer, by key, and add it to `sent_text`."""
    delta = {}
    for key, text in (("reasoning_content", turn.reasoning or ""), ("content", turn.content)):
        text = text.rstrip("\ufffd")  # the first bytes of a character
        if (mark := text.rfind("<", max(len(text) - LONGEST_MARK, 0))) >= 0:
            text = text[:mark]  # perhaps the beginning of a mark such as <think>
        if text.startswith(sent_text[key]) and len(text) > len(sent_text[key]):
            delta[key] = text[len(sent_text[key]) :]
            sent_text[key] = text
    return delta
