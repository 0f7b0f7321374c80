"""One rollout of an outside agent: its requests become turns of trajectories.

A request that continues an issued turn extends that turn's trajectory by the template's suffix. Any
other request opens a trajectory, which shares with an earlier one the ids in which they agree.
Sampled tokens keep their ids, as in the run's own loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agenttrain.agents.config import AgentConfig, OnSampling, Served, find_served
from agenttrain.agents.plans import Plan, RequestPlanner, Suffix
from agenttrain.agents.restarts import Restart
from agenttrain.agents.transcript import AgentTurn, Transcript, call_error
from agenttrain.chat.chat import Chat
from agenttrain.chat.grammar import ANY_FORM
from agenttrain.chat.stop_texts import StopScan, cut_message
from agenttrain.chat.wire.fields import MAX_QUOTED, quote
from agenttrain.chat.wire.http import call_in_thread_if_large, request_error
from agenttrain.chat.wire.issued_turns import Match, in_call_order, tools_digest
from agenttrain.chat.wire.normal import Answer, AnswerHead, Question, issue
from agenttrain.chat.wire.openai import RequestError, SamplingFields, validate
from agenttrain.engines.base import Engine, EngineDead, EngineError
from agenttrain.engines.config import Sampling
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.types import (
    MAIN,
    AssistantTurn,
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    StopReason,
    ToolResult,
    Trajectory,
    UntrainedConversation,
)
from agenttrain.utils.seeds import derive_seed

SIDE = "agent"
"""Role of the trajectories of conversations other than the main one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """The policy as the rollouts of outside agents use it: made by `Agents` for each rollout."""

    engine: Engine
    chat: Chat
    limits: RolloutConfig
    """The section `rollout` of the run's settings."""
    lockstep: bool = False
    """The engine repeats a run bit for bit (`Lockstep`): requests that a rollout sends at once are
    answered one after the other."""
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
    """The messages that end a conversation, after its last turn. `/finish` sends them."""

    turn: AgentTurn
    replies: list[Message]
    suffix: Suffix
    """Token ids of the replies, as the template renders them after the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedRequest:
    """The result of `_plan`: a request, the turn that it continues, and the ids to sample from."""

    transcript: Transcript
    """The transcript that gets the turn: the policy's, or that of frozen models."""
    messages: list[Message]
    """Messages of the request. Replies of tools are in the order of the calls that they answer."""
    tools: bytes
    """Digest of its tools."""
    match: Match[AgentTurn]
    """The issued turn that it continues, if any, and the messages after it."""
    plan: Plan
    """The ids to sample from, and the trajectory that gets them."""


class EndpointRollout:
    """The requests of one outside agent, and the rollout that they make.

    The event loop of the rollouts uses it: `answer` for each request, `finish` if the agent ends
    the rollout itself, `end` if the run does, and `close` at last.

    An agent may hold several conversations, e.g. one of a sub-agent. The turns of a conversation
    are one trajectory, a list of token ids that only grows, until a request changes its history:
    then another trajectory begins. Each trajectory has a session, its cache in the engine.
    """

    def __init__(
        self, request: RolloutRequest, policy: ServedPolicy, settings: AgentConfig
    ) -> None:
        self.request, self.policy, self.settings = request, policy, settings
        self.rollout = request.new_rollout()
        self.trained = Transcript(self.rollout, request.rollout_id, trained=True)
        """Turns of requests for the policy."""
        # Turns of requests for frozen models are no part of the rollout.
        shadow = Rollout(task=request.task, rollout_id=f"{request.rollout_id}/untrained")
        self.untrained = Transcript(shadow, shadow.rollout_id)
        self._planner = RequestPlanner(policy.chat, request.rollout_id, request.sampling.seed)
        self._transcript_lock = asyncio.Lock()
        """Held while a request is planned, and while its turn is recorded, but not while it is
        sampled: both change or read the transcripts."""
        self.counts: Counter[str] = Counter()
        """Counts of requests by the name of their metric, e.g. ``agent/requests``."""
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
        self._lockstep_lock = asyncio.Lock()
        """In lockstep, held while a request is answered: others wait in the order of arrival."""
        self._respelled: set[str] = set()
        """Ids of calls that came back otherwise than they were issued."""
        self._results: dict[AgentTurn, list[ToolResult]] = {}
        """Results of the calls of each turn, once a request has answered them."""
        self.is_cut = False
        """The last trained turn was cut by its budget. Known once the rollout is closed."""
        self._closed = False
        self._in_engine: set[str] = set()
        """The engine's sessions of trained turns that are being sampled."""

    @property
    def max_context(self) -> int:
        """Most tokens of one trajectory."""
        return self.policy.engine.max_context

    def find_issued(self, key: str) -> Message | None:
        """Return the answer that was issued with a handle or the id of a call, or None."""
        return self.trained.issued.find_message(key) or self.untrained.issued.find_message(key)

    async def answer(self, question: Question, *, text_arguments: bool = True) -> Answer:
        """Sample the answer to a request. Raises RequestError.

        With `text_arguments` the arguments of tool calls are JSON text, as OpenAI sends them.
        """
        self.counts["agent/requests"] += 1
        try:
            # With `lockstep` requests of a rollout do not overlap, so that a run repeats exactly.
            one_at_a_time = self._lockstep_lock if self.policy.lockstep else nullcontext()
            async with one_at_a_time:
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
        # Errors of the server say nothing of the request: the agent may send it again.
        if self.ended is None and error.status < 500:
            is_full = error.code == "context_length_exceeded"
            reason = StopReason.context_full if is_full else StopReason.error
            self.refused = EndReason(reason, str(error))

    def count_tokens(self, question: Question) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestError."""
        _, ids = self._planner.render(in_call_order(question.messages), question.schemas)
        return len(ids)

    async def finish(self, messages: Sequence[Message] = (), *, size: int = 0) -> None:
        """Append the messages after the last turn, if they fit, and end the rollout.

        `messages` is the whole conversation, `size` its bytes. Raises RequestError.
        """
        if messages:
            if self._transcript_lock.locked():
                raise RequestError(
                    "messages: a request of this rollout is being read; wait for its answer",
                    param="messages",
                )
            async with self._transcript_lock:
                ending = await call_in_thread_if_large(size, self._read_ending, messages)
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
        """Find the last turn of a trajectory, the messages after it, and their token ids.

        Raises RequestError if the messages do not continue such a turn.
        """
        transcript = self.trained
        match = _match_any_tools(transcript, in_call_order(messages))  # /finish sends no tools
        turn = match.turn
        if turn is None or not transcript.is_tail(turn):
            raise RequestError(
                "messages: they do not continue the last turn of a trajectory; send the "
                "conversation with the replies to its last calls, or leave them out",
                param="messages",
            )
        if not turn.replies(match.new_messages):
            return _Ending(turn, replies=[], suffix=[])
        replies, suffix = turn.continuation(
            self.policy.chat,
            match.new_messages,
            generation_prompt=False,  # no answer follows
        )
        return _Ending(turn, replies, suffix)

    def end(self, reason: StopReason, message: str) -> None:
        """Refuse further requests. The first reason stays."""
        if self.ended is None:
            self.ended = EndReason(reason, message)
        self.over.set()

    async def close(self) -> Rollout:
        """Release the engine's sessions. Return the rollout, complete with counts and results.

        Its trajectories are then those that are trained. `Rollout.untrained` has the messages of
        all other conversations: those that `agent.train` leaves out, and those with frozen models.
        """
        self._closed = True
        for transcript in (self.untrained, self.trained):
            for session in reversed(transcript.sessions):
                if session != self.request.rollout_id:
                    await self.policy.engine.release(session)
        # The rollout's first session comes last, because it is the parent of the others: an engine
        # with a fixed number of places decodes them in its place.
        await self.policy.engine.release(self.request.rollout_id)
        if self.trained.conversation_numbers:
            self._complete_trained()
        conversations_with_frozen = _untrained_conversations(
            self.untrained, set(self.untrained.conversation_numbers), frozen=True
        )
        self.rollout.untrained += tuple(conversations_with_frozen)
        if self._respelled:
            self.counts["agent/respelled_calls"] = len(self._respelled)
        self.rollout.counts = dict(self.counts)
        return self.rollout

    def _complete_trained(self) -> None:
        """Complete the policy's trajectories: their roles and tool results, and what is trained.

        Conversations that `agent.train` leaves out become entries of `rollout.untrained`.
        """
        transcript, rollout = self.trained, self.rollout
        main = transcript.main_conversation()
        for index, trajectory in enumerate(rollout.trajectories):
            trajectory.role = MAIN if transcript.conversation_numbers[index] == main else SIDE
        trained = transcript.trained_conversations(self.settings.train)
        trained_indices = set(transcript.indices_of(trained))
        turns = [turn for turn in transcript.issued.turns if turn.trajectory in trained_indices]
        self.is_cut = bool(turns) and turns[-1].finish is Finish.length
        rollout.tool_results = self._results_of(turns)
        self.counts["agent/conversations"] = len(trained)
        not_trained = set(transcript.conversation_numbers) - trained
        rollout.untrained = tuple(_untrained_conversations(transcript, not_trained, frozen=False))
        if not_trained:
            rollout.keep_trajectories(trained_indices)

    def _results_of(self, turns: Sequence[AgentTurn]) -> list[ToolResult]:
        """Return the results of the turns' calls, in the order in which requests answered them.

        Calls that no request has answered come last, with an empty content.
        """
        for turn in turns:
            self._record_results(turn, replies=())  # does nothing for a turn that was answered
        selected = set(turns)
        return [
            result
            for turn, results in self._results.items()
            if turn in selected
            for result in results
        ]

    def _check_open(self) -> None:
        """Raise RequestError if the rollout has ended, or ends now because a limit is reached."""
        limits, trajectories = self.policy.limits, self._trained_trajectories()
        turns = sum(trajectory.turns for trajectory in trajectories)
        if self.ended is None and self.counts["agent/requests"] > self.settings.max_requests:
            text = f"agent.max_requests={self.settings.max_requests} requests were sent"
            self.end(StopReason.max_requests, text)
        # Turns that are being sampled count too.
        if self.ended is None and turns + len(self._in_engine) >= limits.max_turns:
            text = f"rollout.max_turns={limits.max_turns} turns were sampled"
            self.end(StopReason.max_turns, text)
        if (end := self.ended) is not None:
            text = f"the rollout has ended: {end.message}"
            raise RequestError(text, code=str(end.stop_reason), status=403)

    def _trained_trajectories(self) -> list[Trajectory]:
        """Return the trajectories that are trained, as far as it is known."""
        trajectories = self.rollout.trajectories
        if len(trajectories) < 2:  # most agents have one, and each turn asks for them
            return trajectories
        trained = self.trained.trained_conversations(self.settings.train)
        return [trajectories[index] for index in self.trained.indices_of(trained)]

    def _admit(self, question: Question, problem: RequestError | None) -> Transcript:
        """Return the transcript for a request: of the policy's turns, or of frozen models' turns.

        Raises RequestError for its model or its sampling, or else `problem`, the error of its tools
        or form that `ServedPolicy.check` has returned, if any.
        """
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
        is_frozen = served is Served.frozen
        self._check_sampling(question, is_frozen)
        if problem is not None:
            raise problem
        # A demand for a call or JSON, which only a grammar could force.
        if question.form != ANY_FORM and not self.policy.limits.structured_calls:
            self.counts["agent/unforced_forms"] += 1
        return self.untrained if is_frozen else self.trained

    def _check_sampling(self, question: Question, is_frozen: bool) -> None:
        """Raise RequestError for a field that would change samples or prompts.

        With agent.on_sampling=override the request is counted instead, and its fields are ignored.
        A frozen model may have any temperature, top_p, top_k and min_p: it is not trained.
        """
        ours = self.request.sampling  # the temperature and filters of the rollout
        # Values that a request for the policy may have: the rollout's own, and those that turn a
        # filter off. In an eval, `ours` has the temperature of the eval. An agent that sends
        # `rollout.temperature`, as it does in training, is not refused there: it is ignored.
        accepted_values: dict[str, tuple[object, ...]] = {
            "temperature": (ours.temperature, self.policy.limits.temperature),
            "top_p": (ours.top_p, 1),
            "top_k": (ours.top_k, 0, -1),
            "min_p": (ours.min_p, 0),
        }
        if is_frozen:
            validate(SamplingFields, question.sampling)  # raises for values out of bounds
        changing = {
            name: value
            for name, value in question.sampling.items()
            if name not in accepted_values or (not is_frozen and value not in accepted_values[name])
        }
        if not changing:
            return
        if self.settings.on_sampling is OnSampling.override:
            self.counts["agent/overridden"] += 1
            return
        name, value = next(iter(changing.items()))
        if name in accepted_values or name == "seed":
            reason = (
                f"the run samples from its policy at temperature {ours.temperature:g}, and other "
                "samples would bias what it learns"
            )
        else:
            reason = "prompts and samples are the run's, which this could change"
        raise RequestError(
            f"{name[:MAX_QUOTED]}={quote(value)}: {reason}; leave it out, or set "
            "agent.on_sampling=override, which ignores and counts it, or name its "
            "model as frozen in agent.models",
            param=name,
            code="unsupported_value",
        )

    async def _sample(
        self, transcript: Transcript, question: Question, text_arguments: bool
    ) -> Answer:
        """Sample a turn, which extends a trajectory or begins one, and return it as an answer.

        Other requests may be planned or sampled while this one is sampled. They see it by two
        marks: `_in_engine` has its session, and `Transcript.growing` its trajectory.
        """
        async with self._transcript_lock:
            self._check_open()
            planned = await call_in_thread_if_large(question.size, self._plan, transcript, question)
            self._check_open()  # a large request was planned in a thread, and time has passed
            # No `await` from here until the marks are set: no other request may come in between.
            plan = planned.plan
            budget = self._budget(transcript, plan, question.max_tokens)
            self._report_request(planned, question)
            if transcript.trained:  # so that it counts towards rollout.max_turns
                self._in_engine.add(plan.session)
            if plan.extends is not None:  # so that an equal request branches off from it
                transcript.growing.add(plan.extends.index)
        try:
            completion, shown_text = await self._generate(transcript, plan, budget, question)
            async with self._transcript_lock:
                return self._record(planned, question, completion, shown_text, text_arguments)
        finally:
            self._in_engine.discard(plan.session)
            if plan.extends is not None:
                transcript.growing.discard(plan.extends.index)

    def _report_request(self, planned: _PlannedRequest, question: Question) -> None:
        """Count what is special about a request, and call the policy's hooks."""
        plan = planned.plan
        if planned.match.ambiguous:  # it continues several turns that are equal
            self.counts["agent/ambiguous"] += 1
        if question.left_out:
            self.counts["agent/hosted_tools"] += question.left_out
        if plan.restart is not None:  # it rewrites the conversation before it
            self.counts[f"agent/restarts/{plan.restart}"] += 1
            self.policy.on_restart(plan.restart, self.request.rollout_id, plan.difference)
        self.policy.on_request(plan.session, question)

    def _plan(self, transcript: Transcript, question: Question) -> _PlannedRequest:
        """Find the turn that a request continues, if any, and plan the ids to sample from.

        `transcript.issued` has the turns that the agent was sent so far.
        """
        # Clients may write a call anew, e.g. with a parameter's default. Such calls are replaced
        # by the issued ones, because a turn matches only if its calls are equal.
        messages, respelled_ids = transcript.issued.restore_calls(
            in_call_order(question.messages), question.schemas
        )
        self._respelled |= respelled_ids  # only counted
        tools = tools_digest(question.schemas_json)
        match = transcript.issued.match(messages, tools)
        plan = self._planner.plan(transcript, messages, question.schemas, match)
        return _PlannedRequest(
            transcript=transcript, messages=messages, tools=tools, match=match, plan=plan
        )

    def _record(
        self,
        planned: _PlannedRequest,
        question: Question,
        completion: Completion,
        shown_text: str | None,
        text_arguments: bool,
    ) -> Answer:
        """Append a sampled turn to its trajectory, and return it as the client gets it.

        `shown_text` is the text before the stop text that ended the turn, or None if none did.
        Raises RequestError, and ends the rollout, if the engine aborted the request.
        """
        trajectory = self._append(planned, question, completion)
        index = trajectory.turns - 1
        name, role = trajectory.turn_name(index), trajectory.messages[-1]["role"]
        turn = self.policy.chat.parse(completion.token_ids, question.schemas, turn=name, after=role)
        message = turn.message()
        if self.policy.parsed is not None:
            self.policy.parsed(trajectory, completion.token_ids, message, turn=index, after=role)
        trajectory.messages.append(message)
        head = AnswerHead(model=question.model or "policy")
        if shown_text is None:
            client_message, call_ids = issue(turn, text_arguments=text_arguments, handle=head.id)
        else:
            shown_turn = self.policy.chat.parse_text(
                shown_text, question.schemas, turn=name, after=role
            )
            client_message, call_ids = _issue_before_stop(
                shown_turn, call_count=len(turn.calls), stops=question.stops, handle=head.id
            )
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
                request_hash=planned.match.request_hash,
            )
        )
        self.refused = None  # the agent went on after an error
        # At a stop text we end the sampling ourselves, which the engine reports as `abort` too.
        if completion.finish is Finish.abort and shown_text is None:
            self.end(StopReason.aborted, "the engine aborted the request")
            raise RequestError("the engine aborted the request", status=500)
        return Answer(
            model=head.model,
            id=head.id,
            created=head.created,
            message=client_message,
            finish=completion.finish,
            prompt_tokens=len(planned.plan.ids),
            sampled_tokens=len(completion.token_ids),
            namespaces=question.namespaces,
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
        if transcript.trained:  # turns of a frozen model are no part of the rollout: no budget
            # All trajectories of a rollout share its budget. Replies count too, prompts do not.
            spent = sum(
                len(span.token_ids)
                for trajectory in self._trained_trajectories()
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
                self._check_open()  # raises, because the rollout has ended
        asked_tokens = max_tokens or context_tokens
        return min(limits.max_turn_tokens, remaining_tokens, context_tokens, asked_tokens)

    async def _generate(
        self, transcript: Transcript, plan: Plan, budget: int, question: Question
    ) -> tuple[Completion, str | None]:
        """Sample a turn of at most `budget` tokens, up to the token that completes a stop text.

        Return it and the text before the stop text, or None if there is none. Raises RequestError,
        and ends the rollout, if the engine fails.
        """
        rollout_id = self.request.rollout_id
        scan = StopScan(self.policy.chat.text_of, question.stops) if question.stops else None
        sampling = self._sampling(transcript, plan, budget, question, scan)
        # The first session has the rollout's name, and the others are its children. An engine that
        # decodes a fixed number of sessions together decodes a child in the place of its parent.
        parent = None if plan.session == rollout_id else rollout_id
        try:
            completion = await self.policy.engine.generate(
                plan.ids, sampling, session=plan.session, parent=parent
            )
            if not completion.token_ids:
                raise EngineError(f"rollout {rollout_id}: the engine returned no token")
        except EngineError as error:
            if isinstance(error, EngineDead):
                self.failure = error
            self.end(StopReason.error, str(error))
            raise RequestError(str(error), status=500) from error
        if scan is None:
            return completion, None
        # An engine that does not call `sampling.ends` has sampled past the stop text. `scan` then
        # reads here the tokens that it has not read.
        for token_id in completion.token_ids[scan.count :]:
            scan.push(token_id)
        scan.finish()
        stop_was_found = scan.end is not None
        return _cut_completion(completion, scan.end), scan.text if stop_was_found else None

    def _sampling(
        self,
        transcript: Transcript,
        plan: Plan,
        budget: int,
        question: Question,
        scan: StopScan | None,
    ) -> Sampling:
        """Return the rollout's sampling settings with what is special to this turn."""
        sampling, chat = self.request.sampling, self.policy.chat
        grammar: str | None = None
        if self.policy.limits.structured_calls:
            role = plan.messages[-1]["role"]
            grammar = chat.grammar(question.schemas, after=role, form=question.form)
        # Each trajectory has a seed, and each of its turns one that is derived from it.
        if plan.extends is None:
            trajectory_seed, turns_before = plan.seed, 0
        else:
            trajectory_seed = transcript.seeds[plan.extends.index]
            turns_before = plan.extends.turns
        client_fields: dict[str, Any] = {}
        if not transcript.trained:  # a request for a frozen model may have its own temperature, …
            fields = validate(SamplingFields, question.sampling)
            client_fields = fields.model_dump(exclude_none=True)
            if "top_k" in client_fields:  # some clients write -1 for all tokens
                client_fields["top_k"] = max(client_fields["top_k"], 0)
        return replace(
            sampling,
            **client_fields,
            # Some engines call it with each token, and stop once it returns True.
            ends=None if scan is None else scan.push,
            max_tokens=budget,
            seed=derive_seed(trajectory_seed, turns_before),
            stop_token_ids=sampling.stop_token_ids or chat.stop_token_ids,
            grammar=grammar,
        )

    def _append(
        self, planned: _PlannedRequest, question: Question, completion: Completion
    ) -> Trajectory:
        """Append the sent and the sampled ids to the plan's trajectory, or to a new one."""
        plan = planned.plan
        trajectory = plan.extends or self._begin_trajectory(planned, question)
        if plan.answered_turn is not None and planned.transcript.trained:
            self._record_results(plan.answered_turn, plan.messages)
        for origin, ids in plan.suffix:
            trajectory.append_context(ids, origin)
        trajectory.messages += plan.messages
        trajectory.append_sampled(completion, plan.ids)
        return trajectory

    def _begin_trajectory(self, planned: _PlannedRequest, question: Question) -> Trajectory:
        """Begin a trajectory: the rollout's empty first one, a branch of another, or a new one."""
        transcript, plan = planned.transcript, planned.plan
        rollout = transcript.rollout
        # Provisional: `_complete_trained` sets the roles once all conversations are known.
        role = SIDE if transcript.conversation_numbers else MAIN
        if not rollout.trajectories[0].spans:
            trajectory = rollout.trajectories[0]
        elif plan.parent is not None:
            parent_index, shared_length = plan.parent
            trajectory = rollout.branch(parent_index, shared_length, role=role)
        else:
            trajectory = rollout.begin(role=role, delegation=None)
        trajectory.schemas = tuple(question.schemas)
        trajectory.prompt_messages = len(plan.messages)
        # Looked up only now: if two requests with the same messages were sampled at once, the
        # second to be recorded finds the turn of the first, and gets its conversation.
        conversation = transcript.conversation_of(planned.messages, planned.match)
        # These lists have an entry for each trajectory, at its index.
        transcript.conversation_numbers.append(conversation)
        transcript.models.append(question.model)
        transcript.sessions.append(plan.session)
        transcript.seeds.append(plan.seed)
        return trajectory

    def _record_results(self, turn: AgentTurn, replies: Sequence[Message]) -> None:
        """Record the results of a turn's calls, once: when a request first answers them."""
        if turn in self._results:
            return
        results = self._results[turn] = []
        schemas = self.rollout.trajectories[turn.trajectory].schemas or ()
        parameters = {
            schema["function"]["name"]: schema["function"].get("parameters") or {}
            for schema in schemas
        }
        contents = {m["tool_call_id"]: m["content"] for m in replies if m["role"] == "tool"}
        for call in turn.turn.calls:
            results.append(
                ToolResult(
                    call=call,
                    content=contents.get(call.id, ""),
                    error=call_error(call, parameters),
                )
            )


def _issue_before_stop(
    shown_turn: AssistantTurn, *, call_count: int, stops: Sequence[str], handle: str
) -> tuple[Message, tuple[str, ...]]:
    """Return a turn that a stop text ended as the client gets it, and the ids of its calls.

    `shown_turn` is parsed from the text before the stop text. The turn itself, parsed from all
    tokens, has `call_count` calls. Those that the stop text hides are its last, and get the id "".
    """
    # A call that the stop text cuts in two is malformed in `shown_turn`, and must not be run.
    # Without `text_arguments` it becomes a part of the content.
    client_message, shown_ids = issue(shown_turn, text_arguments=False, handle=handle)
    # Parsing may have joined parts of the content, between which a stop text appears.
    cut_message(client_message, stops)
    return client_message, (*shown_ids, *[""] * (call_count - len(shown_ids)))


def _cut_completion(completion: Completion, end: int | None) -> Completion:
    """Return the first `end` tokens of a completion, as an engine that stops there gives them.

    Such a completion has finished by `abort` (`Sampling.ends`). This does not bias the sample: the
    first tokens do not depend on those that are cut off.
    """
    if end is None:
        return completion
    versions, remaining = [], end
    for version, count in completion.versions:
        if remaining > 0:
            versions.append((version, min(count, remaining)))
        remaining -= count
    return Completion(
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        finish=Finish.abort,
        versions=tuple(versions),
        routes=None if completion.routes is None else completion.routes.part(0, end),
    )


def _untrained_conversations(
    transcript: Transcript, conversations: set[int], *, frozen: bool
) -> list[UntrainedConversation]:
    """Return entries of `Rollout.untrained` for the conversations with these numbers.

    An entry has the messages of the conversation's longest trajectory.
    """
    entries = []
    for number in sorted(conversations):
        indices = transcript.indices_of({number})
        trajectories = [transcript.rollout.trajectories[index] for index in indices]
        entries.append(
            UntrainedConversation(
                model=transcript.models[indices[0]],
                frozen=frozen,
                turns=sum(trajectory.turns for trajectory in trajectories),
                sampled_length=sum(trajectory.sampled_length for trajectory in trajectories),
                messages=tuple(max(trajectories, key=lambda t: len(t.messages)).messages),
            )
        )
    return entries


def _match_any_tools(transcript: Transcript, messages: Sequence[Message]) -> Match[AgentTurn]:
    """Return the turn that a conversation continues, whatever its tools: they were not sent."""
    for tools in {turn.tools for turn in transcript.issued.turns}:
        match = transcript.issued.match(messages, tools)
        if match.turn is not None:
            return match
    return Match()
