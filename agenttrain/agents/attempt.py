"""One rollout of an outside agent: its requests become turns of trajectories.

A request that continues an issued turn extends that turn's trajectory by the template's suffix. Any
other request opens a trajectory, which shares with an earlier one the ids in which they agree.
Sampled tokens keep their ids, as in the run's own loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agenttrain.agents.config import AgentConfig, OnSampling, Served, Trained, find_served
from agenttrain.agents.plans import Plan, RequestPlanner, Suffix
from agenttrain.agents.restarts import Restart, find_restart
from agenttrain.agents.transcript import AgentTurn, Transcript, call_error
from agenttrain.chat.chat import Chat
from agenttrain.chat.wire.fields import MAX_QUOTED, quote
from agenttrain.chat.wire.http import read, request_error
from agenttrain.chat.wire.issued_turns import Match, in_call_order, tools_digest
from agenttrain.chat.wire.normal import Answer, Question, issue
from agenttrain.chat.wire.openai import RequestError
from agenttrain.engines.base import Engine, EngineDead, EngineError
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.types import (
    MAIN,
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    StopReason,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.seeds import derive_seed

SIDE = "agent"
"""Role of the trajectories of conversations that begin unlike the first one."""
BUSY = "one_request_at_a_time"
"""Code of the error that a request gets while another one is in flight, in lockstep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """The policy as the rollouts use it."""

    engine: Engine
    chat: Chat
    limits: RolloutConfig
    lockstep: bool = False
    """The engine waits for each rollout at a fixed step, so that a rollout has one request at a
    time."""
    check: Callable[[Question], Awaitable[RequestError | None]]
    """Returns the error if the template cannot show a request's tools, or no grammar can enforce
    its output format, else None."""
    parsed: Callable[..., None] | None = None
    """Called with each parsed turn, as `ParsedTurns.record`."""
    on_restart: Callable[[Restart, str, str], None] = lambda kind, rollout_id, difference: None
    """Called with each restart: its kind, the rollout's id and the first difference."""
    on_request: Callable[[str, Question], None] = lambda session, question: None
    """Called with the engine's session and the request before each turn is sampled."""


class EndReason(NamedTuple):
    """Why a rollout ends."""

    stop_reason: StopReason
    message: str


class _Ending(NamedTuple):
    """The messages that end a conversation, behind its last turn."""

    turn: AgentTurn
    replies: list[Message]
    suffix: Suffix
    """Ids of the replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A request with the turn that it continues, and the ids to sample from."""

    transcript: Transcript
    messages: list[Message]
    """Its messages in the order of the calls."""
    tools: bytes
    """Digest of its tools."""
    match: Match[AgentTurn]
    plan: Plan


class EndpointRollout:
    """The requests of one outside agent, and the rollout that they make."""

    def __init__(
        self, request: RolloutRequest, policy: ServedPolicy, settings: AgentConfig
    ) -> None:
        self.request, self.policy, self.settings = request, policy, settings
        self.rollout = request.new_rollout()
        self.trained = Transcript(self.rollout, request.rollout_id, trained=True)
        # Turns that are not trained are no part of the rollout.
        shadow = Rollout(task=request.task, rollout_id=f"{request.rollout_id}/untrained")
        self.untrained = Transcript(shadow, shadow.rollout_id)
        self._planner = RequestPlanner(policy.chat, request.rollout_id, request.sampling.seed)
        self._changing = asyncio.Lock()
        """Held while a request is planned, and while its turn is recorded."""
        self.counts: Counter[str] = Counter()
        self.reward: float | None = None
        """The reward that the agent gave."""
        self.ended: EndReason | None = None
        """Why no request is answered any more. None: requests are answered."""
        self.refused: EndReason | None = None
        """The error of the last request, if no turn came after it."""
        self.failure: EngineDead | None = None
        """The run ends with it."""
        self.over = asyncio.Event()
        """Set once no request is answered any more."""
        self._closed = False
        self._in_engine: set[str] = set()
        """Sessions with a request in flight."""
        self._answered: set[AgentTurn] = set()
        """Turns whose calls have their results recorded."""

    @property
    def max_context(self) -> int:
        """Most tokens of one trajectory."""
        return self.policy.engine.max_context

    async def answer(self, question: Question, *, text_arguments: bool = True) -> Answer:
        """Sample the answer to a request. Raises RequestError.

        With `text_arguments` the arguments of tool calls are JSON text, as OpenAI sends them.
        """
        self.counts["agent/requests"] += 1
        try:
            problem = await self.policy.check(question)
            self._check_open()
            transcript = self._admit(question, problem)
            return await self._sample(transcript, question, text_arguments)
        except RequestError as error:
            self.refuse(error)
            raise
        except RecursionError as error:
            problem = request_error(error)
            self.refuse(problem)
            raise problem from error

    def refuse(self, error: RequestError) -> None:
        """Record an error. If no turn comes after it, the rollout has ended because of it."""
        # Errors of the server and BUSY say nothing of the request: the agent may send it again.
        if self.ended is None and error.status < 500 and error.code != BUSY:
            is_full = error.code == "context_length_exceeded"
            reason = StopReason.context_full if is_full else StopReason.error
            self.refused = EndReason(reason, str(error))

    def count_tokens(self, question: Question) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestError."""
        return len(self._planner.render(in_call_order(question.messages), question.schemas))

    async def finish(self, messages: Sequence[Message] = (), *, size: int = 0) -> None:
        """Append the messages behind the last turn, if any fit, and end the rollout.

        `messages` is the whole conversation, `size` its bytes. Raises RequestError.
        """
        if messages:
            if self._changing.locked():
                raise RequestError(
                    "messages: a request of this rollout is being read; wait for its answer",
                    param="messages",
                )
            async with self._changing:
                ending = await read(size, self._read_ending, messages)
                if self._closed:  # while a large conversation was read
                    raise RequestError("the rollout has ended", status=403)
                trajectory = self.rollout.trajectories[ending.turn.trajectory]
                length = trajectory.length + sum(len(ids) for _, ids in ending.suffix)
                if length <= self.max_context:
                    self._record_results(ending.turn, ending.replies)
                    for origin, ids in ending.suffix:
                        trajectory.append_context(ids, origin)
                    trajectory.messages += ending.replies
        self.end(StopReason.completed, "the agent has finished")

    def _read_ending(self, messages: Sequence[Message]) -> _Ending:
        """Find the last turn of a trajectory, and the messages behind it. Raises RequestError."""
        transcript = self.trained
        match = _match_any_tools(transcript, in_call_order(messages))
        turn = match.turn
        if turn is None or not transcript.is_tail(turn):
            raise RequestError(
                "messages: they do not continue the last turn of a trajectory; send the "
                "conversation with the replies to its last calls, or leave them out",
                param="messages",
            )
        replies = turn.replies(match.new_messages)
        suffix = turn.suffix(self.policy.chat, replies, generation_prompt=False) if replies else []
        return _Ending(turn, replies, suffix)

    def end(self, reason: StopReason, message: str) -> None:
        """Refuse further requests. The first reason stays."""
        if self.ended is None:
            self.ended = EndReason(reason, message)
        self.over.set()

    async def close(self) -> Rollout:
        """Release the engine's sessions. Return the rollout, complete with counts and results."""
        self._closed = True
        for transcript in (self.untrained, self.trained):
            for session in reversed(transcript.sessions):
                if session != self.request.rollout_id:
                    await self.policy.engine.release(session)
        await self.policy.engine.release(self.request.rollout_id)
        for turn in self.trained.issued.turns:
            self._record_results(turn, ())  # calls that no request has answered
        self.rollout.counts = dict(self.counts)
        return self.rollout

    def _check_open(self) -> None:
        """Raise RequestError if the rollout has ended, or ends now because a limit is reached."""
        limits, rollout = self.policy.limits, self.rollout
        if self.ended is None and self.counts["agent/requests"] > self.settings.max_requests:
            text = f"agent.max_requests={self.settings.max_requests} requests were sent"
            self.end(StopReason.max_requests, text)
        if self.ended is None and rollout.turns + len(self._in_engine) >= limits.max_turns:
            text = f"rollout.max_turns={limits.max_turns} turns were sampled"
            self.end(StopReason.max_turns, text)
        if (end := self.ended) is not None:
            text = f"the rollout has ended: {end.message}"
            raise RequestError(text, code=str(end.stop_reason), status=403)

    def _admit(self, question: Question, problem: RequestError | None) -> Transcript:
        """Return a request's transcript. Raises RequestError, e.g. the `problem` of its check."""
        served = find_served(self.settings.models, question.model)
        if not isinstance(served, Served):  # an error message
            raise RequestError(served, param="model", code="model_not_found", status=404)
        if served is Served.refuse:
            raise RequestError(
                f"model={question.model}: agent.models refuses it; ask for another model",
                param="model",
                code="model_not_found",
                status=404,
            )
        self._check_sampling(question)
        if problem is not None:
            raise problem
        if self.policy.lockstep and (self._in_engine or self._changing.locked()):
            raise RequestError(
                "the rollout has a request in flight, and with rollout.deterministic each has one "
                "at a time; wait for its answer, or set rollout.deterministic=false",
                code=BUSY,
                status=400,
            )
        return self.untrained if served is Served.frozen else self.trained

    def _check_sampling(self, question: Question) -> None:
        """Refuse fields that would change samples by a RequestError, or count the request."""
        ours = self.request.sampling
        # Values that change nothing.
        neutral: dict[str, tuple[object, ...]] = {
            "temperature": (ours.temperature, self.policy.limits.temperature),
            "top_p": (ours.top_p, 1),
            "top_k": (ours.top_k, 0, -1),
            "min_p": (ours.min_p, 0),
        }
        changing = {k: v for k, v in question.sampling.items() if v not in neutral.get(k, ())}
        if not changing:
            return
        if self.settings.on_sampling is OnSampling.override:
            self.counts["agent/overridden"] += 1
            return
        name, value = next(iter(changing.items()))
        if name in ("stop", "stop_sequences"):
            reason = "a completion is never cut after it was sampled"
        elif name in neutral or name == "seed":
            reason = (
                f"the run samples from its policy at temperature {ours.temperature:g}, and other "
                "samples would bias what it learns"
            )
        else:
            reason = "prompts and samples are the run's, which this could change"
        raise RequestError(
            f"{name[:MAX_QUOTED]}={quote(value)}: {reason}; leave it out, or set "
            "agent.on_sampling=override, which ignores and counts it",
            param=name,
            code="unsupported_value",
        )

    async def _sample(
        self, transcript: Transcript, question: Question, text_arguments: bool
    ) -> Answer:
        """Sample a turn, at the end of a trajectory or of a new one, and return it as an answer."""
        async with self._changing:
            # Nothing is awaited from here on until the engine has the request, unless it is large:
            # then the rollout may have ended meanwhile.
            self._check_open()
            planned = await read(question.size, self._plan, transcript, question)
            self._check_open()
            transcript, plan = planned.transcript, planned.plan
            budget = self._budget(transcript, plan, question.max_tokens)
            if planned.match.ambiguous:
                self.counts["agent/ambiguous"] += 1
            if plan.restart is not None:
                self.counts[f"agent/restarts/{plan.restart}"] += 1
                self.policy.on_restart(plan.restart, self.request.rollout_id, plan.difference)
            self.policy.on_request(plan.session, question)
            self._in_engine.add(plan.session)
            if plan.extends is not None:
                transcript.growing.add(plan.extends.index)
        try:
            completion = await self._generate(transcript, plan, budget, question)
            async with self._changing:
                return self._record(planned, question, completion, text_arguments)
        finally:
            self._in_engine.discard(plan.session)
            if plan.extends is not None:
                transcript.growing.discard(plan.extends.index)

    def _plan(self, transcript: Transcript, question: Question) -> _Planned:
        """Find the turn that a request continues, if any, and plan the ids to sample from."""
        messages, tools = in_call_order(question.messages), tools_digest(question.schemas)
        match = transcript.issued.match(messages, tools)
        if transcript.trained and self.settings.train is Trained.main:
            # agent.train=main: a conversation that begins unlike the first one is not trained.
            is_new = match.turn is None and not transcript.begins_alike(messages)
            if is_new and find_restart(messages, transcript.issued.turns, match)[0] is None:
                transcript = self.untrained
                match = transcript.issued.match(messages, tools)
        plan = self._planner.plan(transcript, messages, question.schemas, match)
        return _Planned(
            transcript=transcript, messages=messages, tools=tools, match=match, plan=plan
        )

    def _record(
        self, planned: _Planned, question: Question, completion: Completion, text_arguments: bool
    ) -> Answer:
        """Append a sampled turn to its trajectory, and return it as the client gets it."""
        trajectory = self._append(planned, question, completion)
        index = trajectory.turns - 1
        name, role = trajectory.turn_name(index), trajectory.messages[-1]["role"]
        turn = self.policy.chat.parse(completion.token_ids, question.schemas, turn=name, after=role)
        message = turn.message()
        if self.policy.parsed is not None:
            self.policy.parsed(trajectory, completion.token_ids, message, turn=index, after=role)
        trajectory.messages.append(message)
        client_message, call_ids = issue(turn, text_arguments=text_arguments)
        planned.transcript.issued.add(
            AgentTurn(
                trajectory=trajectory.index,
                end=trajectory.length,
                message_count=len(trajectory.messages),
                turn=turn,
                completion_ids=completion.token_ids,
                finish=completion.finish,
                call_ids=call_ids,
                conversation=(*planned.messages, client_message),
                tools=planned.tools,
                request_digest=planned.match.digest,
            )
        )
        self.refused = None
        if completion.finish is Finish.abort:
            self.end(StopReason.aborted, "the engine aborted the request")
            raise RequestError("the engine aborted the request", status=500)
        return Answer(
            message=client_message,
            finish=completion.finish,
            prompt_tokens=len(planned.plan.ids),
            sampled_tokens=len(completion.token_ids),
            model=question.model or "policy",
        )

    def _budget(self, transcript: Transcript, plan: Plan, max_tokens: int | None) -> int:
        """Return the tokens that may be sampled. Raises RequestError if there are none."""
        limits, engine = self.policy.limits, self.policy.engine
        context_tokens = engine.max_context - len(plan.ids)
        if context_tokens < 1:
            raise RequestError(
                f"messages: {len(plan.ids)} tokens fill the context of {engine.max_context}; "
                "shorten them, or raise engine.max_context",
                param="messages",
                code="context_length_exceeded",
            )
        remaining_tokens = context_tokens
        if transcript.trained:
            # All trajectories of a rollout share its budget. Replies count too, prompts do not.
            spent = sum(
                len(span.token_ids)
                for trajectory in self.rollout.trajectories
                for span in trajectory.spans
                if span.origin is not Origin.prompt
            )
            spent += sum(len(ids) for origin, ids in plan.suffix if origin is not Origin.prompt)
            remaining_tokens = limits.max_completion_tokens - spent
            if remaining_tokens < 1:
                self.end(
                    StopReason.max_tokens,
                    f"rollout.max_completion_tokens={limits.max_completion_tokens} are spent",
                )
                self._check_open()
        asked_tokens = max_tokens or context_tokens
        return min(limits.max_turn_tokens, remaining_tokens, context_tokens, asked_tokens)

    async def _generate(
        self, transcript: Transcript, plan: Plan, budget: int, question: Question
    ) -> Completion:
        """Sample a turn. Raises RequestError, and ends the rollout, if the engine fails."""
        request, chat, grammar = self.request, self.policy.chat, None
        if self.policy.limits.structured_calls:
            role = plan.messages[-1]["role"]
            grammar = chat.grammar(question.schemas, after=role, form=question.form)
        seed, turns = plan.seed, 0
        if plan.extends is not None:
            seed = transcript.seeds[plan.extends.index]
            turns = plan.extends.turns
        sampling = replace(
            request.sampling,
            max_tokens=budget,
            seed=derive_seed(seed, turns),
            stop_token_ids=request.sampling.stop_token_ids or chat.stop_token_ids,
            grammar=grammar,
        )
        parent = None if plan.session == request.rollout_id else request.rollout_id
        try:
            completion = await self.policy.engine.generate(
                plan.ids, sampling, session=plan.session, parent=parent
            )
            if not completion.token_ids:
                raise EngineError(f"rollout {request.rollout_id}: the engine returned no token")
            return completion
        except EngineError as error:
            if isinstance(error, EngineDead):
                self.failure = error
            self.end(StopReason.error, str(error))
            raise RequestError(str(error), status=500) from error

    def _append(self, planned: _Planned, question: Question, completion: Completion) -> Trajectory:
        """Append the sent and the sampled ids. Begin a trajectory if the plan extends none."""
        transcript, plan = planned.transcript, planned.plan
        rollout, trajectory = transcript.rollout, plan.extends
        if trajectory is None:
            is_main = transcript.begins_alike(planned.messages)
            role = MAIN if is_main else SIDE
            if not rollout.trajectories[0].spans:  # a rollout begins with an empty trajectory
                trajectory = rollout.trajectories[0]
            elif plan.parent is not None:
                trajectory = rollout.branch(*plan.parent, role=role)
            else:
                trajectory = rollout.begin(role=role, delegation=None)
            trajectory.schemas = tuple(question.schemas)
            trajectory.prompt_messages = len(plan.messages)
            transcript.sessions.append(plan.session)
            transcript.seeds.append(plan.seed)
        if plan.answers is not None and transcript.trained:
            self._record_results(plan.answers, plan.messages)
        for origin, ids in plan.suffix:
            trajectory.append_context(ids, origin)
        trajectory.messages += plan.messages
        trajectory.append_sampled(completion, plan.ids)
        return trajectory

    def _record_results(self, turn: AgentTurn, replies: Sequence[Message]) -> None:
        """Record the results of a turn's calls, once: when a request first answers them."""
        if turn in self._answered:
            return
        self._answered.add(turn)
        schemas = self.rollout.trajectories[turn.trajectory].schemas or ()
        parameters = {
            schema["function"]["name"]: schema["function"].get("parameters") or {}
            for schema in schemas
        }
        contents = {m["tool_call_id"]: m["content"] for m in replies if m["role"] == "tool"}
        for call in turn.turn.calls:
            self.rollout.tool_results.append(
                ToolResult(
                    call=call,
                    content=contents.get(call.id, ""),
                    error=call_error(call, parameters),
                )
            )


def _match_any_tools(transcript: Transcript, messages: Sequence[Message]) -> Match[AgentTurn]:
    """Return the turn that a conversation continues, whatever its tools: they were not sent."""
    for tools in {turn.tools for turn in transcript.issued.turns}:
        match = transcript.issued.match(messages, tools)
        if match.turn is not None:
            return match
    return Match()
