"""One rollout of an outside agent: its requests become turns of trajectories.

A request that continues an issued turn extends that turn's trajectory by the template's suffix. Any
other opens a trajectory, which shares with an earlier one the ids in which they agree. What the
policy sampled keeps its ids, as in the run's own loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agenttrain.agents.config import AgentConfig, OnSampling, Served, Trained, served
from agenttrain.agents.conversations import (
    IssuedTurn,
    Match,
    Restart,
    in_call_order,
    text_ids,
    tools_digest,
)
from agenttrain.agents.transcript import Transcript, call_error
from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.wire.normal import Answer, Question, issued_calls, issued_message
from agenttrain.chat.wire.openai import RequestError
from agenttrain.engines.base import Engine, EngineDead, EngineError
from agenttrain.engines.config import Sampling
from agenttrain.rollout.config import RolloutConfig
from agenttrain.types import (
    MAIN,
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.arrays import common_prefix
from agenttrain.utils.seeds import derive_seed

SIDE = "agent"
"""Role of the trajectories of conversations that begin unlike the first one."""
BUSY = "one_request_at_a_time"
"""Code of the error that a request gets while another one is in flight, in lockstep."""
Suffix = list[tuple[Origin, list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout to make."""

    task: Task
    sampling: Sampling
    """Sampling of every turn; `seed` is the rollout's."""
    rollout_id: str
    group_id: str = ""
    sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """The policy as the rollouts use it."""

    engine: Engine
    chat: Chat
    limits: RolloutConfig
    lockstep: bool = False
    """The engine waits for each rollout at a fixed step, so that a rollout has one request at a
    time."""
    check_tools: Callable[[Sequence[dict[str, Any]]], Awaitable[str | None]]
    """Returns why the template cannot show these tools; None: it can."""
    parsed: Callable[..., None] | None = None
    """Takes each parsed turn, as `ParsedTurns.record`."""
    restarted: Callable[[Restart, str, str], None] = lambda kind, rollout_id, difference: None
    """Takes each restart: its kind, the rollout and the first difference."""
    asked: Callable[[str, Question], None] = lambda session, question: None
    """Takes each request that is about to be sampled, with the engine's session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Ids to continue for a request, and how they become part of a trajectory."""

    ids: list[int]
    messages: list[Message]
    """Those of the trajectory once the ids are in it; with `extends` only those to add."""
    suffix: Suffix
    """The part of `ids` that the trajectory lacks, by origin."""
    session: str
    parent: tuple[int, int] | None = None
    """Place of the trajectory from which a new one branches."""
    extends: Trajectory | None = None
    """Trajectory that goes on; None: a new one begins."""
    seed: int = 0
    answers: IssuedTurn | None = None
    """The turn whose calls the request answers."""


class EndpointRollout:
    """The requests of one outside agent, and the rollout that they make."""

    def __init__(self, attempt: Attempt, policy: ServedPolicy, settings: AgentConfig) -> None:
        self.attempt, self.policy, self.settings = attempt, policy, settings
        self.rollout = Rollout(
            task=attempt.task,
            rollout_id=attempt.rollout_id,
            group_id=attempt.group_id,
            sample=attempt.sample,
        )
        self.trained = Transcript(self.rollout, attempt.rollout_id)
        shadow = Rollout(task=attempt.task, rollout_id=f"{attempt.rollout_id}/untrained")
        self.untrained = Transcript(shadow, shadow.rollout_id)
        self.counts: Counter[str] = Counter()
        self.reward: float | None = None
        """The reward that the agent gave."""
        self.ended: tuple[StopReason, str] | None = None
        """Why no request is answered any more."""
        self.refused: tuple[StopReason, str] | None = None
        """The error of the last request, if no turn came after it."""
        self.failure: EngineDead | None = None
        self.over = asyncio.Event()
        """Set once no request is answered any more."""
        self._in_engine: set[str] = set()
        """Sessions with a request in flight."""
        self._answered: set[IssuedTurn] = set()
        """Turns the results of whose calls are recorded."""

    async def answer(self, question: Question, *, text_arguments: bool = True) -> Answer:
        """Sample the answer to a request. Raises RequestError.

        `text_arguments`: the API's arguments of calls are a text, which may be malformed.
        """
        self.counts["agent/requests"] += 1
        try:
            schemas = question.schemas
            problem = await self.policy.check_tools(schemas) if schemas else None
            # Nothing is awaited from here on until the engine has the request.
            self._check_open()
            transcript = self._admit(question, problem)
            return await self._sample(transcript, question, text_arguments)
        except RequestError as error:
            self.refuse(error)
            raise
        except RecursionError as error:
            raise RequestError("the request is nested too deeply") from error

    def refuse(self, error: RequestError) -> None:
        """Note an error: unless a turn comes after it, it is why the rollout ended."""
        if self.ended is None and error.status < 500 and error.code != BUSY:
            full = error.code == "context_length_exceeded"
            reason = StopReason.context_full if full else StopReason.error
            self.refused = reason, str(error)

    def count_tokens(self, question: Question) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestError."""
        return len(self._render(in_call_order(question.messages), question.schemas))

    def finish(self, messages: Sequence[Message] = ()) -> None:
        """End the rollout; a conversation's replies to its last turn's calls become part of it.

        Raises RequestError for messages that do not continue the newest turn.
        """
        if messages:
            ordered = in_call_order(messages)
            transcript = self.trained
            match = _match(transcript, ordered)
            turn = match.turn
            if turn is None or not self._is_tail(transcript, turn):
                raise RequestError(
                    "messages: they do not continue the last turn of a trajectory; send the "
                    "conversation with the replies to its last calls, or leave them out",
                    param="messages",
                )
            replies = self._replies(turn, match.added)
            trajectory = self.rollout.trajectories[turn.trajectory]
            suffix = self._suffix(turn, replies, generation_prompt=False) if replies else []
            if trajectory.length + sum(len(ids) for _, ids in suffix) <= (
                self.policy.engine.max_context
            ):
                self._record_results(turn, replies)
                for origin, ids in suffix:
                    trajectory.append_context(ids, origin)
                trajectory.messages += replies
        self.end(StopReason.completed, "the agent has finished")

    def end(self, reason: StopReason, message: str) -> None:
        """Refuse further requests; the first reason stays."""
        if self.ended is None:
            self.ended = reason, message
        self.over.set()

    async def close(self) -> Rollout:
        """Release the sessions, and return the rollout with its counts and results of calls."""
        for transcript in (self.untrained, self.trained):
            for session in reversed(transcript.sessions):
                if session != self.attempt.rollout_id:
                    await self.policy.engine.release(session)
        await self.policy.engine.release(self.attempt.rollout_id)
        for turn in self.trained.conversations.turns:
            self._record_results(turn, ())
        self.rollout.counts = dict(self.counts)
        return self.rollout

    def _check_open(self) -> None:
        limits, rollout = self.policy.limits, self.rollout
        if self.ended is None and self.counts["agent/requests"] > self.settings.max_requests:
            text = f"agent.max_requests={self.settings.max_requests} requests were sent"
            self.end(StopReason.max_requests, text)
        if self.ended is None and rollout.turns + len(self._in_engine) >= limits.max_turns:
            text = f"rollout.max_turns={limits.max_turns} turns were sampled"
            self.end(StopReason.max_turns, text)
        if self.ended is not None:
            reason, message = self.ended
            raise RequestError(f"the rollout has ended: {message}", code=str(reason), status=403)

    def _admit(self, question: Question, problem: str | None) -> Transcript:
        """Check a request's parameters; return the transcript that it belongs to.

        `problem` is that of its tools.
        """
        kind = served(self.settings.models, question.model)
        if not isinstance(kind, Served):
            raise RequestError(kind, param="model", code="model_not_found", status=404)
        if kind is Served.refuse:
            raise RequestError(
                f"model={question.model}: agent.models refuses it; ask for another model",
                param="model",
                code="model_not_found",
                status=404,
            )
        if question.stops:
            raise RequestError(
                "stop: is not supported, because a completion is never cut after it was sampled; "
                "leave it out",
                param="stop",
                code="unsupported_value",
            )
        self._check_sampling(question.sampling)
        if problem is not None:
            raise RequestError(f"tools: {problem}", param="tools")
        if self.policy.lockstep and self._in_engine:
            raise RequestError(
                "the rollout has a request in flight, and with rollout.deterministic each has one "
                "at a time; wait for its answer, or set rollout.deterministic=false",
                code=BUSY,
                status=400,
            )
        return self.untrained if kind is Served.frozen else self.trained

    def _check_sampling(self, given: Mapping[str, Any]) -> None:
        ours = self.attempt.sampling
        neutral: dict[str, tuple[object, ...]] = {
            "temperature": (ours.temperature, self.policy.limits.temperature),
            "top_p": (ours.top_p, 1),
            "top_k": (ours.top_k, 0, -1),
            "min_p": (ours.min_p, 0),
        }
        biasing = {k: v for k, v in given.items() if v not in neutral.get(k, ())}
        if not biasing:
            return
        if self.settings.on_sampling is OnSampling.override:
            self.counts["agent/overridden"] += 1
            return
        name, value = next(iter(biasing.items()))
        raise RequestError(
            f"{name}={value}: the run samples from its policy at temperature "
            f"{ours.temperature:g}, and other samples would bias what it learns; leave it out, or "
            "set agent.on_sampling=override, which ignores it",
            param=name,
            code="unsupported_value",
        )

    async def _sample(
        self, transcript: Transcript, question: Question, text_arguments: bool
    ) -> Answer:
        """Continue or open a trajectory by a turn."""
        messages, tools = in_call_order(question.messages), tools_digest(question.schemas)
        match = transcript.conversations.match(messages, tools)
        if transcript is self.trained and self.settings.train is Trained.main:
            side = match.turn is None and match.restart is None
            if side and not transcript.conversations.begins_alike(messages):
                transcript = self.untrained
                match = transcript.conversations.match(messages, tools)
        plan, restart, difference = self._plan(transcript, question, messages, match)
        budget = self._budget(transcript, plan, question.max_tokens)
        if match.ambiguous:
            self.counts["agent/ambiguous"] += 1
        if restart is not None:
            self.counts[f"agent/restarts/{restart}"] += 1
            self.policy.restarted(restart, self.attempt.rollout_id, difference)
        self.policy.asked(plan.session, question)
        completion = await self._generate(transcript, plan, budget)
        trajectory = self._append(transcript, plan, completion, question, messages)
        index = trajectory.turns - 1
        name, after = trajectory.turn_name(index), trajectory.messages[-1]["role"]
        turn = self.policy.chat.parse(
            completion.token_ids, question.schemas, turn=name, after=after
        )
        message = turn.message()
        if self.policy.parsed is not None:
            self.policy.parsed(trajectory, completion.token_ids, message, turn=index, after=after)
        trajectory.messages.append(message)
        shown = issued_calls(turn, text_arguments=text_arguments)
        ids = [f"call_{secrets.token_hex(12)}" for _ in shown]
        issued = issued_message(turn, ids, secrets.token_hex(16), text_arguments=text_arguments)
        given = iter(ids)
        transcript.conversations.add(
            IssuedTurn(
                trajectory=trajectory.index,
                index=index,
                end=trajectory.length,
                message_count=len(trajectory.messages),
                turn=turn,
                completion=completion,
                call_ids=tuple(next(given) if call in shown else "" for call in turn.calls),
                conversation=(*messages, issued),
                tools=tools,
            )
        )
        self.refused = None
        if completion.finish is Finish.abort:
            self.end(StopReason.aborted, "the engine aborted the request")
            raise RequestError("the engine aborted the request", status=500)
        return Answer(
            message=issued,
            finish=completion.finish,
            prompt_tokens=len(plan.ids),
            sampled_tokens=len(completion.token_ids),
            model=question.model or "policy",
        )

    def _plan(
        self,
        transcript: Transcript,
        question: Question,
        messages: list[Message],
        match: Match,
    ) -> tuple[_Plan, Restart | None, str]:
        """Return the ids to continue, and the restart if the request does not go on."""
        rollout, turn = transcript.rollout, match.turn
        if turn is not None:
            with suppress(ChatError):  # a role that the template refuses behind an answer
                return self._continuing(transcript, turn, match)
        restart, difference = match.restart, match.difference
        if turn is not None:
            restart, difference = (
                Restart.edited,
                "the template refuses them behind a turn",
            )
        ids = self._render(messages, question.schemas)
        shared, parent = 0, 0
        rendered = np.array(ids)
        for trajectory in rollout.trajectories:
            length = common_prefix(np.array(trajectory.token_ids), rendered)
            if length > shared:
                shared, parent = length, trajectory.index
        return (
            _Plan(
                ids=ids,
                messages=[_rendered(message) for message in messages],
                suffix=[(Origin.prompt, ids[shared:])],
                session=self._session(transcript),
                parent=(parent, shared) if shared else None,
                seed=self._seed(transcript, ids),
            ),
            restart,
            difference,
        )

    def _continuing(
        self, transcript: Transcript, turn: IssuedTurn, match: Match
    ) -> tuple[_Plan, Restart | None, str]:
        """Return a plan behind an issued turn; raises ChatError if the template refuses it."""
        trajectory = transcript.rollout.trajectories[turn.trajectory]
        replies = self._replies(turn, match.added)
        suffix = self._suffix(turn, replies, generation_prompt=True)
        added = [token_id for _, ids in suffix for token_id in ids]
        ids = [*trajectory.token_ids[: turn.end], *added]
        if self._is_tail(transcript, turn):
            plan = _Plan(
                ids=ids,
                messages=replies,
                suffix=suffix,
                session=transcript.sessions[trajectory.index],
                extends=trajectory,
                answers=turn,
            )
            return plan, None, ""
        plan = _Plan(
            ids=ids,
            messages=[*trajectory.messages[: turn.message_count], *replies],
            suffix=suffix,
            session=self._session(transcript),
            parent=(trajectory.index, turn.end),
            seed=self._seed(transcript, ids),
            answers=turn,
        )
        return plan, Restart.dropped, "a turn was sampled from these messages already"

    def _is_tail(self, transcript: Transcript, turn: IssuedTurn) -> bool:
        """Return True if nothing follows the turn in its trajectory, and nothing is about to."""
        trajectory = transcript.rollout.trajectories[turn.trajectory]
        return trajectory.length == turn.end and trajectory.index not in transcript.growing

    def _render(self, messages: Sequence[Message], schemas: Sequence[dict]) -> list[int]:
        try:
            return self.policy.chat.prompt_ids([_rendered(m) for m in messages], schemas)
        except ChatError as error:
            raise RequestError(f"messages: {error}", param="messages") from error

    def _replies(self, turn: IssuedTurn, added: Sequence[Message]) -> list[Message]:
        """Return the messages behind a turn, the replies under the calls' own ids.

        The client never saw a malformed call that was part of the text, and the template shows a
        reply to each.
        """
        given = {m["tool_call_id"]: m["content"] for m in added if m["role"] == "tool"}
        replies: list[Message] = []
        for call_id, call in zip(turn.call_ids, turn.turn.calls, strict=True):
            content = given.get(call_id, f"Error: malformed call: {call.malformed}")
            replies.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            )
        return [*replies, *(_rendered(m) for m in added if m["role"] != "tool")]

    def _suffix(
        self, turn: IssuedTurn, replies: Sequence[Message], *, generation_prompt: bool
    ) -> Suffix:
        return self.policy.chat.suffix(
            turn.turn,
            replies,
            completion_ids=turn.completion.token_ids,
            finish=turn.completion.finish,
            generation_prompt=generation_prompt,
        )

    def _session(self, transcript: Transcript) -> str:
        """Return the engine's session of a new trajectory; the rollout's own for the first."""
        transcript.begun += 1
        if transcript.begun == 1 and transcript is self.trained:
            return self.attempt.rollout_id
        return f"{transcript.prefix}/{transcript.begun - 1}"

    def _seed(self, transcript: Transcript, ids: Sequence[int]) -> int:
        """Return the seed of a new trajectory: the loop's for the first one.

        For others it depends on the ids with which they begin and on how often that happened, and
        not on the order in which requests arrive.
        """
        seed = self.attempt.sampling.seed
        if transcript.begun == 1 and transcript is self.trained:
            return seed
        digest = text_ids(ids)
        transcript.openings[digest] += 1
        return derive_seed(seed, transcript.prefix, digest, transcript.openings[digest])

    def _budget(self, transcript: Transcript, plan: _Plan, asked: int | None) -> int:
        """Return the tokens that may be sampled. Raises RequestError if there are none."""
        limits, engine = self.policy.limits, self.policy.engine
        context = engine.max_context - len(plan.ids)
        if context < 1:
            raise RequestError(
                f"messages: {len(plan.ids)} tokens fill the context of {engine.max_context}; "
                "shorten them, or raise engine.max_context",
                param="messages",
                code="context_length_exceeded",
            )
        left = context
        if transcript is self.trained:
            spent = sum(
                len(span.token_ids)
                for trajectory in self.rollout.trajectories
                for span in trajectory.spans
                if span.origin is not Origin.prompt
            )
            spent += sum(len(ids) for origin, ids in plan.suffix if origin is not Origin.prompt)
            left = limits.max_completion_tokens - spent
            if left < 1:
                self.end(
                    StopReason.max_tokens,
                    f"rollout.max_completion_tokens={limits.max_completion_tokens} are spent",
                )
                self._check_open()
        return min(limits.max_turn_tokens, left, context, asked or context)

    async def _generate(self, transcript: Transcript, plan: _Plan, budget: int) -> Completion:
        attempt, chat = self.attempt, self.policy.chat
        seed, turns = plan.seed, 0
        if plan.extends is not None:
            seed = transcript.seeds[plan.extends.index]
            turns = plan.extends.turns
            transcript.growing.add(plan.extends.index)
        sampling = replace(
            attempt.sampling,
            max_tokens=budget,
            seed=derive_seed(seed, turns),
            stop_token_ids=attempt.sampling.stop_token_ids or chat.stop_token_ids,
        )
        guest = None if plan.session == attempt.rollout_id else attempt.rollout_id
        self._in_engine.add(plan.session)
        try:
            completion = await self.policy.engine.generate(
                plan.ids, sampling, session=plan.session, parent=guest
            )
            if not completion.token_ids:
                raise EngineError(f"rollout {attempt.rollout_id}: the engine returned no token")
            return completion
        except EngineError as error:
            if isinstance(error, EngineDead):
                self.failure = error
            self.end(StopReason.error, str(error))
            raise RequestError(str(error), status=500) from error
        finally:
            self._in_engine.discard(plan.session)
            if plan.extends is not None:
                transcript.growing.discard(plan.extends.index)

    def _append(
        self,
        transcript: Transcript,
        plan: _Plan,
        completion: Completion,
        question: Question,
        messages: Sequence[Message],
    ) -> Trajectory:
        """Append what was sent and sampled; begin a trajectory if the plan opens one."""
        rollout, trajectory = transcript.rollout, plan.extends
        if trajectory is None:
            first = rollout.trajectories[0]
            alike = transcript.conversations.begins_alike(messages)
            role = MAIN if alike else SIDE
            if not first.spans:
                trajectory = first
            elif plan.parent is not None:
                trajectory = rollout.branch(*plan.parent, role=role)
            else:
                trajectory = rollout.begin(role=role, delegation=None)
            trajectory.schemas = tuple(question.schemas)
            trajectory.prompt_messages = len(plan.messages)
            transcript.sessions.append(plan.session)
            transcript.seeds.append(plan.seed)
        if plan.answers is not None and transcript is self.trained:
            self._record_results(plan.answers, plan.messages)
        for origin, ids in plan.suffix:
            trajectory.append_context(ids, origin)
        trajectory.messages += plan.messages
        trajectory.append_sampled(completion, plan.ids)
        return trajectory

    def _record_results(self, turn: IssuedTurn, replies: Sequence[Message]) -> None:
        """Record what became of a turn's calls, the first time that `replies` has those to them."""
        if turn in self._answered:
            return
        self._answered.add(turn)
        schemas = self.rollout.trajectories[turn.trajectory].schemas or ()
        known = {
            schema["function"]["name"]: schema["function"].get("parameters") or {}
            for schema in schemas
        }
        contents = {m["tool_call_id"]: m["content"] for m in replies if m["role"] == "tool"}
        for call in turn.turn.calls:
            self.rollout.tool_results.append(
                ToolResult(
                    call=call,
                    content=contents.get(call.id, ""),
                    error=call_error(call, known),
                )
            )


def _rendered(message: Message) -> Message:
    """Return a message without the keys that templates do not know."""
    return {key: value for key, value in message.items() if key != "handle"}


def _match(transcript: Transcript, messages: Sequence[Message]) -> Match:
    """Match a conversation under the tools of the turn that it continues."""
    for tools in {turn.tools for turn in transcript.conversations.turns}:
        match = transcript.conversations.match(messages, tools)
        if match.turn is not None:
            return match
    return Match()
