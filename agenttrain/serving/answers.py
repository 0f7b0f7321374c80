"""Answers to chat requests: sampled by an engine, all at once or as a stream of events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.stop_texts import StopScan, cut_message
from agenttrain.chat.wire.dialects import StreamWriter
from agenttrain.chat.wire.http import KEEP_ALIVE, KEPT_ALIVE_S
from agenttrain.chat.wire.normal import Answer, AnswerHead, Question, issue
from agenttrain.chat.wire.openai import RequestError
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
    """A request that is being answered, from `ChatServer.begin` to its answer."""

    question: Question
    prompt: Prompt
    sampling: Sampling
    head: AnswerHead
    """Id, model and time of the answer, which every part of a stream repeats."""
    sampled: list[int] = field(default_factory=list)
    """Tokens so far, where the engine reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """An answer's tokens and the turn parsed from them, up to the first stop text."""

    token_ids: tuple[int, ...]
    finish: Finish
    """abort: it ends at a stop text, or the engine aborted it. No request can continue it."""
    turn: AssistantTurn


@dataclass(slots=True, kw_only=True)
class ChatServer:
    """Answers over an engine, token-exact from turn to turn of a conversation.

    `begin` reads a request, in any thread, into an `Answering`: its prompt and sampling parameters.
    Then the event loop calls `answer` or `stream` once. Both sample the tokens (`_sample`, which
    gives a `SampledAnswer`), and record the answer for requests that continue it (`_record`).

    Example: ``await server.answer(server.begin(Question(messages=[…], schemas=[])))``
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

    async def answer(self, answering: Answering) -> Answer:
        """Return the answer to a request that `begin` has read.

        Raises RequestError. Cancelling it aborts the sampling.
        """
        return await self._record(answering, await self._sample(answering))

    async def stream(self, answering: Answering, writer: StreamWriter) -> AsyncGenerator[str]:
        """Yield the answer's events, and comments that keep the connection alive.

        The content is streamed as it is sampled if the engine reports tokens and the request has
        neither tools nor stop texts. With them, only the complete text shows which part of it is a
        call, or at which stop text the answer ends.
        """
        question, reports_tokens = answering.question, isinstance(self.engine, Streaming)
        is_live = reports_tokens and not question.schemas and not question.stops
        sent_text = {"content": "", "reasoning_content": ""}
        sampling = asyncio.create_task(self._sample(answering))
        try:
            for event in writer.begin():
                yield event
            silent_since = time.monotonic()
            tokens_read = 0  # tokens whose text was parsed
            while not sampling.done():
                await asyncio.wait((sampling,), timeout=PARSE_S if is_live else KEPT_ALIVE_S)
                if is_live and len(answering.sampled) > tokens_read and not sampling.done():
                    tokens_read = len(answering.sampled)
                    text = self.chat.text_of(answering.sampled)
                    delta = _new_text(self._parse(answering, text), sent_text)
                    if delta:
                        silent_since = time.monotonic()
                        for event in writer.add(delta):
                            yield event
                if time.monotonic() - silent_since >= KEPT_ALIVE_S:
                    silent_since = time.monotonic()
                    yield KEEP_ALIVE
            sampled = sampling.result()
        finally:
            sampling.cancel()
        for event in writer.end(await self._record(answering, sampled)):
            yield event

    def begin(self, question: Question) -> Answering:
        """Return a request with its prompt and sampling parameters. Raises RequestError."""
        if question.model not in (None, self.model):
            raise RequestError(
                f"model={question.model}: is not served here; the model is {self.model}",
                param="model",
                code="model_not_found",
                status=404,
            )
        try:
            prompt = self.conversations.prompt(question.messages, question.schemas)
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
        options: dict[str, Any] = {
            name: question.sampling[name]
            for name in ("temperature", "top_p", "top_k", "min_p")
            if name in question.sampling
        }
        if "top_k" in options:
            options["top_k"] = max(options["top_k"], 0)  # some clients write -1 for all tokens
        seed = question.sampling.get("seed")
        sampling = replace(
            self.defaults,
            **options,
            max_tokens=min(question.max_tokens or remaining_tokens, remaining_tokens),
            stop_token_ids=self.chat.stop_token_ids,
            seed=secrets.randbits(62) if seed is None else seed % 2**62,  # clients may send -1
        )
        return Answering(
            question=question, prompt=prompt, sampling=sampling, head=AnswerHead(model=self.model)
        )

    async def _sample(self, answering: Answering) -> SampledAnswer:
        """Sample and parse an answer, up to the first stop text. Raises RequestError.

        engine=transformers ends the sampling itself at the stop text. Other engines sample on, and
        the answer is cut there.
        """
        session, stops = answering.prompt.session, answering.question.stops
        scan = StopScan(self.chat.text_of, stops)
        # The engine may call `ends` with each token; True ends the sampling.
        sampling = replace(answering.sampling, ends=scan.push if stops else None)
        if isinstance(self.engine, Streaming):
            self.engine.watch(session, answering.sampled.append)
        try:
            completion = await self.engine.generate(
                answering.prompt.token_ids, sampling, session=session
            )
        except BaseException as error:
            await self.engine.release(session)
            if isinstance(error, EngineError):
                raise RequestError(str(error), status=500) from error
            raise
        token_ids, finish = completion.token_ids, completion.finish
        if not stops:
            turn = self._parse(answering, self.chat.text_of(token_ids))
            return SampledAnswer(token_ids=token_ids, finish=finish, turn=turn)
        for token_id in token_ids[scan.count :]:  # those that the engine has not scanned
            scan.push(token_id)
        scan.finish()  # no more tokens: read the bytes of an unfinished character
        # `scan.end` is the number of tokens up to the stop text, None without one. A cut answer is
        # marked as aborted, so that `_record` does not keep it for requests that continue it: its
        # tokens include the stop text, which the client never got.
        return SampledAnswer(
            token_ids=token_ids[: scan.end],
            finish=finish if scan.end is None else Finish.abort,
            turn=self._parse(answering, scan.text),
        )

    def _parse(self, answering: Answering, text: str) -> AssistantTurn:
        """Read the text of an answer, complete or not."""
        messages = answering.prompt.messages
        turns = sum(message["role"] == "assistant" for message in messages)
        after = str(messages[-1]["role"])
        schemas = answering.question.schemas
        return self.chat.parse_text(text, schemas, turn=turns, after=after)

    async def _record(self, answering: Answering, sampled: SampledAnswer) -> Answer:
        """Record an answer for requests that continue it, and return it as the client gets it."""
        prompt, question = answering.prompt, answering.question
        # Without text arguments, a malformed call is a part of the answer's text: clients of
        # `serve` parse the arguments of a call, and would fail at a text that is no JSON.
        message, call_ids = issue(sampled.turn, text_arguments=False, handle=answering.head.id)
        # `_sample` has cut the sampled text. `issue` joins parts of it, which may make a stop text.
        cut_message(message, question.stops)
        # An engine keeps the tokens of a session (its KV cache) for the request that continues it.
        # `record` keeps this answer's session, and returns those of older answers that it forgets.
        unused_sessions = [prompt.session]
        if sampled.finish is not Finish.abort:  # no request can continue an aborted answer
            unused_sessions = self.conversations.record(
                prompt, sampled.token_ids, sampled.finish, sampled.turn, message, call_ids
            )
        for session in unused_sessions:
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
            token_ids=(prompt.token_ids, sampled.token_ids) if question.return_token_ids else None,
            namespaces=question.namespaces,
        )


def _new_text(turn: AssistantTurn, sent_text: dict[str, str]) -> dict[str, str]:
    """Return the new text of an unfinished answer, by key, and add it to `sent_text`.

    Text that later tokens may change is held back. If the text that was sent has changed after
    all, nothing more is returned for its key.
    """
    delta = {}
    for key, text in (("reasoning_content", turn.reasoning or ""), ("content", turn.content)):
        text = text.rstrip("\ufffd")  # the first bytes of a character
        if (mark := text.rfind("<", max(len(text) - LONGEST_MARK, 0))) >= 0:
            text = text[:mark]  # perhaps the beginning of a mark such as <think>
        if text.startswith(sent_text[key]) and len(text) > len(sent_text[key]):
            delta[key] = text[len(sent_text[key]) :]
            sent_text[key] = text
    return delta
