"""One rollout: sample, parse, run tools, append their replies, until there is a reason to stop.

Sampled ids go into the trajectory as they are; they are never decoded and tokenised again. Bad
model output, failing tools and failing requests end a rollout with a stop reason; `run_rollout`
lists what ends the run instead.

`run_rollout` is the entrance, `_Loop.run` the loop over turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from agenttrain.chat.encoding import ChatError
from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.environments.environment import Episode
from agenttrain.environments.user import Dialogue
from agenttrain.rewards.function import MAX_REWARD, RewardError, copy_task, copy_value
from agenttrain.rollout.call_limits import over_limits, repeats_a_call
from agenttrain.rollout.compaction import (
    SUMMARY,
    Compaction,
    PastTurn,
    make_compaction,
    request_message,
    summary_room,
)
from agenttrain.rollout.config import (
    OnMalformedCall,
    OnParallelCalls,
    OnToolFailure,
    RolloutRequest,
)
from agenttrain.rollout.delegation import Agent, CallOrder, SubAgentRequest, SubAgents
from agenttrain.rollout.episode import end_episode, score_episode, start_episode
from agenttrain.rollout.image_replies import refuse_unreadable_images
from agenttrain.rollout.monitoring import Throttle
from agenttrain.rollout.replies import (
    Suffix,
    append_suffix,
    fit_replies,
    reply_message,
    suffix_after,
)
from agenttrain.rollout.request import RolloutContext, append_prompt
from agenttrain.rollout.row_tools import RowTools, turn_sampling
from agenttrain.types import (
    MAIN,
    AssistantTurn,
    Completion,
    Delegated,
    Delegation,
    Finish,
    Message,
    Origin,
    Rollout,
    RolloutMachine,
    StopReason,
    Task,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    ToolUnavailable,
    Trajectory,
    TurnReward,
)
from agenttrain.utils.arrays import common_prefix
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.seeds import derive_seed


async def run_rollout(request: RolloutRequest, context: RolloutContext) -> Rollout:
    """Run one rollout to its end.

    Example::

        context = RolloutContext(
            engine=ScriptedEngine(["It is 7."], encode=tokenizer.encode),
            chat=load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig()),
            toolbox=Toolbox({}),
        )
        task = Task(task_id="sum", messages=({"role": "user", "content": "What is 3 + 4?"},))
        rollout = await run_rollout(RolloutRequest(task=task), context)
        assert rollout.trajectories[0].messages[-1]["content"] == "It is 7."

    Raises PromptTooLong before anything is sampled; ValueError for a task whose tools or
    environment do not exist; RewardError when the environment's reward fails; EngineDead;
    StuckTools; and ToolUnavailable if `limits.on_tool_failure` is `error`.
    """
    rollout = request.new_rollout()
    limits, environments = context.limits, context.environments
    started = time.perf_counter()
    episode: Episode | None = None
    sub_agents: SubAgents | None = None
    machines = context.machines
    try:
        machine = None
        if machines is not None:
            machine = await machines.start(request.rollout_id, request.task)
        episode = await start_episode(
            rollout,
            environments,
            seed=request.sampling.seed,
            group_seed=request.group_seed,
            machine=machine,
        )
        tools = RowTools(request.task, context.toolbox, environments, episode)
        try:
            append_prompt(rollout, context.engine, context.chat, tools, request.prompt_ids)
        except ChatError as error:
            if episode is None:  # the row's messages, which are checked at the start of the run
                raise
            name = episode.kind.name
            raise ToolUnavailable(
                f"environment {name!r}: its reset gave messages that cannot be shown: {error}"
            ) from error
        sub_agents = SubAgents(rollout, limits)
        agent = Agent(session=request.rollout_id)
        loop = _Loop(rollout, request, context, tools, episode, sub_agents, agent)
        scope = asyncio.timeout(_limit_s(request.task, context))
        try:
            async with scope:
                rollout.stop_reason = await loop.run()
        except TimeoutError as error:
            if not scope.expired():  # the engine's own timeout, not the rollout's limit
                raise EngineError(f"TimeoutError: {error}") from error
            rollout.stop_reason = StopReason.timeout
        if machines is not None and rollout.stop_reason is not StopReason.error:
            await machines.grade(rollout)  # runs the tests of a Harbor task
        await score_episode(rollout, episode)
    except EngineDead:  # an EngineError too, but no later rollout could succeed
        raise
    except (EngineError, ToolUnavailable) as error:
        if isinstance(error, ToolUnavailable) and limits.on_tool_failure is OnToolFailure.error:
            raise
        rollout.stop_reason, rollout.error = StopReason.error, hide_secrets(str(error))
    finally:
        rollout.seconds = time.perf_counter() - started
        # The engine first: other rollouts may wait for this one's slot, and tools can be slow to
        # release.
        try:
            if sub_agents is not None:
                await sub_agents.aclose()
            await context.engine.release(request.rollout_id)
        finally:
            try:
                await context.toolbox.release(request.rollout_id)
            finally:
                try:
                    await end_episode(rollout, episode)
                finally:
                    if machines is not None:
                        await machines.release(request.rollout_id)
    return rollout


def _limit_s(task: Task, context: RolloutContext) -> float | None:
    """Return the wall seconds of a rollout: the run's limit, or the task's own if it is lower."""
    task_limit = None if context.machines is None else context.machines.limit_s(task)
    limits = [limit for limit in (context.limits.timeout_s, task_limit) if limit is not None]
    return min(limits, default=None)


class _Loop:
    """The turns of one agent, in its first trajectory and those that a compaction begins.

    `run` does it all: `_sample` a turn, then `_reply_to` it, until there is a reason to stop. When
    the context has grown too long, `_compact` begins another trajectory. A sub-agent has a loop of
    its own, made in `_run_sub_agent` while the calls of a turn are executed.

    `max_completion_tokens` counts an agent's sampled and tool tokens over all of its trajectories,
    each once: `_counted_before` plus the current trajectory's, all but `_uncounted`.
    """

    def __init__(
        self,
        rollout: Rollout,
        request: RolloutRequest,
        context: RolloutContext,
        tools: RowTools,
        episode: Episode | None,
        sub_agents: SubAgents,
        agent: Agent,
    ) -> None:
        """Continue the rollout's last trajectory, which was begun for `agent`."""
        # The arguments, and what the turns use of the context.
        self.rollout, self.request, self.tools, self.episode = rollout, request, tools, episode
        self.context, self.sub_agents, self.agent = context, sub_agents, agent
        self.engine, self.chat, self.limits = context.engine, context.chat, context.limits
        self.throttle = context.throttle or Throttle()
        self.parsed_turns = context.parsed_turns
        self.user, self.on_messages = context.user, context.on_messages
        self.trajectory = rollout.trajectories[-1]
        """The current trajectory: a compaction begins another."""
        self.first_trajectory = self.trajectory
        """The agent's first, with the task's prompt, which every compacted context repeats."""
        # Counts that the limits are compared with.
        self._turns = 0
        """Completions of this agent."""
        self._uncounted = self.trajectory.prompt_length
        """Tokens of the current trajectory that `max_completion_tokens` does not count: the prompt,
        and what a compaction repeats."""
        self._counted_before = 0
        """Tokens of this agent's earlier trajectories that `max_completion_tokens` counts."""
        self._calls_made: list[ToolCall] = []
        """Calls of all turns, for `max_repeated_calls`."""
        # Compaction, if the run has any.
        self._compaction = make_compaction(context.limits)
        self._past_turns: list[PastTurn] = []
        """The turns of the current context, if it may be compacted."""
        self._summary_room = 0
        """Tokens of the engine's context that are reserved for a summary and its request; 0: the
        compaction, if there is one, writes no summary."""
        if self._compaction is not None:
            self._summary_room = summary_room(self._compaction, context.limits, context.chat)
        # The other sides of the conversation: user and tools.
        self._dialogue = Dialogue(context.simulated_user, request.sampling.seed)
        self._task: Task | None = None
        """The rollout's copy of its task, which its tools may change."""

    async def run(self) -> StopReason:
        """Sample turns and answer them until there is a reason to stop; return the reason."""
        reason: StopReason | None = None
        while reason is None:
            if self._must_compact():
                reason = await self._compact()
                continue
            budget = min(self.limits.max_turn_tokens, self._remaining_tokens())
            if budget <= 0:
                return self._limit_reached()
            turn, completion = await self._sample(budget)
            reason = _reason_if_cut_off(completion) or await self._reply_to(turn, completion)
        return reason

    async def _sample(self, budget: int) -> tuple[AssistantTurn, Completion]:
        """Sample a turn of at most `budget` tokens; append it to the trajectory and parse it."""
        trajectory = self.trajectory
        # The environment's state in which the policy decides: before the turn.
        state = None if self.episode is None else await self.episode.state()
        sent = trajectory.token_ids
        completion = await self._generate(sent, budget)
        trajectory.append_sampled(completion, sent)
        self._turns += 1
        if state is not None:
            # Credit per turn compares the turns of equal states. A summary or a sub-agent's turn is
            # another decision than the main agent's in that state: its role sets it apart.
            prefix = "" if trajectory.role == MAIN else f"{trajectory.role} "
            trajectory.states.append(prefix + state)
        return self._parse(completion), completion

    async def _generate(self, sent: Sequence[int], budget: int) -> Completion:
        """Return the engine's completion, of at most `budget` tokens, of the ids `sent`."""
        trajectory, agent = self.trajectory, self.agent
        seed = self.request.sampling.seed
        # The first trajectory has the rollout's seed. Others, such as sub-agents', must not repeat
        # its samples.
        if trajectory.index > 0:
            seed = derive_seed(seed, "trajectory", trajectory.index)
        sampling = turn_sampling(
            replace(self.request.sampling, seed=seed),
            trajectory,
            self.chat,
            self.tools,
            self.limits,
            budget=budget,
        )
        completion = await self.engine.generate(
            sent, sampling, session=agent.session, parent=agent.parent, images=trajectory.images
        )
        await self.throttle.wait()  # where many rollouts resume together, a few at a time
        if not completion.token_ids:
            raise EngineError(
                f"rollout {self.rollout.rollout_id}: the engine returned no token ({completion})"
            )
        return completion

    def _parse(self, completion: Completion) -> AssistantTurn:
        """Parse the completion that was just appended; append its message and return the turn."""
        trajectory, ids = self.trajectory, completion.token_ids
        index = trajectory.turns - 1
        # `turn_name` begins the ids of the turn's calls: "call_3_0". The role before the turn
        # ("user", "tool") decides how the template has opened it.
        name, after = trajectory.turn_name(index), trajectory.messages[-1]["role"]
        turn = self.chat.parse(ids, self.tools.schemas, turn=name, after=after)
        message = turn.message()
        if self.parsed_turns is not None:  # spares `verify` to parse the turn again
            self.parsed_turns.record(trajectory, ids, message, turn=index, after=after)
        self._add(message)
        return turn

    async def _compact(self) -> StopReason | None:
        """Begin a new trajectory with a shorter context.

        Returns a reason to stop if the new context cannot be made or is still too long, else None.
        Sampled tokens keep their ids. The new context is::

            prompt of the task | summary | "Go on …" | kept turn, replies | kept turn, replies | …

        Summary and "Go on …" are there only if the compaction asks for a summary. A user's message
        that is not answered yet takes the place of "Go on …" and the kept turns.
        """
        compaction, limit = self._compaction, self.limits.compact_at
        old = self.trajectory  # its context is replaced by a shorter one
        assert compaction is not None and limit is not None, "a compaction needs compact_at"
        first = self.first_trajectory
        # The new context, which begins with the task's prompt.
        ids = [*first.token_ids[: first.prompt_length]]
        messages = [*first.messages[: first.prompt_messages]]
        self._add_to_count(old)
        if compaction.request is not None:
            if len(ids) >= limit:  # no summary can make it short enough
                return StopReason.context_full
            sampled = await self._sample_summary(compaction)
            if isinstance(sampled, StopReason):
                return sampled
            summary, completion = sampled
            self._add_to_count(self.trajectory)  # the summary's, which is the current one here
            message_after: Message = {"role": "user", "content": compaction.resume}
            last_message = self._past_turns[-1].replies[-1]
            if last_message["role"] == "user":  # not answered yet
                self._past_turns, message_after = [], last_message
            suffix = suffix_after(self.chat, summary, completion, [message_after])
            ids += completion.token_ids
            for _origin, span_ids in suffix:
                ids += span_ids
            messages += [summary.message(), message_after]
        self._past_turns = [*compaction.keep(self._past_turns, limit - len(ids), self.chat)]
        for past in self._past_turns:
            ids += past.ids(self.chat)
            messages += [past.turn.message(), *past.replies]
        if len(ids) > limit:
            return StopReason.context_full
        self._begin_compacted(old, ids, messages)
        return None

    def _add_to_count(self, trajectory: Trajectory) -> None:
        """Count the current trajectory's tokens as those of an earlier one: another one begins."""
        self._counted_before += trajectory.length - self._uncounted

    def _begin_compacted(self, old: Trajectory, ids: list[int], messages: list[Message]) -> None:
        """Begin the trajectory of a compacted context, a branch of `old`; make it the current one.

        It branches where its ids begin to differ from those of `old`: shared ids count once.
        """
        shared = common_prefix(np.array(old.token_ids), np.array(ids))
        self.trajectory = self.rollout.branch(
            old.index, shared, role=self.agent.role, delegation=self.agent.delegation
        )
        self.trajectory.append_context(ids[shared:], Origin.prompt)
        self.trajectory.messages += messages
        self.trajectory.prompt_messages = len(messages)
        self._uncounted = len(ids)  # all of them are the prompt, or were counted before

    async def _sample_summary(
        self, compaction: Compaction
    ) -> tuple[AssistantTurn, Completion] | StopReason:
        """Sample a summary of the current trajectory in a branch, which becomes the current one.

        Returns the reason to stop if there is no summary. A user's message that is not answered yet
        is left out: it follows the summary.
        """
        self._begin_summary(request_message(compaction))
        budget = min(self.limits.summary_tokens, self._remaining_tokens())
        if budget <= 0:
            return self._limit_reached()
        summary, completion = await self._sample(budget)
        if reason := _reason_if_cut_off(completion):
            return reason
        if self._calls_to_answer(summary) or not summary.content.strip():
            return StopReason.invalid_summary
        return summary, completion

    def _begin_summary(self, request: Message) -> None:
        """Begin the branch in which a summary is sampled; make it the current trajectory.

        It has the current trajectory up to its last completion, the replies to that, unless they
        are a user's message, and then the `request` for a summary.
        """
        old, last_turn = self.trajectory, self._past_turns[-1]
        unanswered = last_turn.replies[-1]["role"] == "user"
        replies = [] if unanswered else [*last_turn.replies]
        # `old` ends with these replies. The branch begins before them and gets them anew, because
        # `suffix_after` renders all messages that follow a completion at once.
        suffix = suffix_after(self.chat, last_turn.turn, last_turn.completion, [*replies, request])
        replies_length = sum(len(span_ids) for _, span_ids in last_turn.suffix or ())
        completion_end = old.length - replies_length
        self.trajectory = self.rollout.branch(
            old.index, completion_end, role=SUMMARY, delegation=self.agent.delegation
        )
        messages_before_replies = old.messages[: len(old.messages) - len(last_turn.replies)]
        self.trajectory.messages += [*messages_before_replies, *replies]
        # 1: the request, which `_add` appends.
        self.trajectory.prompt_messages = len(self.trajectory.messages) + 1
        for origin, span_ids in suffix:
            self.trajectory.append_context(span_ids, origin)
        self._add(request)
        # `max_completion_tokens` counts only the summary: the tokens before it were counted in
        # `old`, or are the request.
        self._uncounted = self.trajectory.length

    def _must_compact(self) -> bool:
        """Return True if the context has turns, is longer than `compact_at` and may be compacted.

        A summary is a turn itself, so `max_turns` has to allow it and one turn after it.
        """
        if not self._past_turns:  # none are recorded without a compaction
            return False
        if self.trajectory.length <= (self.limits.compact_at or 0):
            return False
        writes_summary = self._summary_room > 0  # else no tokens are reserved for one
        return self._may_summarise() if writes_summary else True

    def _may_summarise(self) -> bool:
        """Return True if the compaction has summaries and `max_turns` allows one and a turn."""
        return self._summary_room > 0 and self._turns + 1 < self.limits.max_turns

    def _add(self, *messages: Message) -> None:
        self.trajectory.messages.extend(messages)
        if self.on_messages is not None and not self.agent.depth:
            self.on_messages(self.rollout, messages)

    def _reward_turn(self, value: float, giver: str) -> None:
        """Add a reward to the last turn."""
        if not abs(value) <= MAX_REWARD:  # NaN is not
            raise RewardError(
                f"{giver} on rollout {self.rollout.rollout_id!r}, turn {self.trajectory.turns - 1}:"
                f" returned TurnReward({value}); its value is a number of at most {MAX_REWARD:g}",
                culprits=[self.rollout.rollout_id],
            )
        turn, rewards = self.trajectory.turns - 1, self.trajectory.turn_rewards
        rewards[turn] = rewards.get(turn, 0.0) + value

    def _remaining_tokens(self) -> int:
        """Return the number of tokens, sampled or not, that all token limits still allow."""
        spent = self._counted_before + self.trajectory.length - self._uncounted
        remaining = min(self.limits.max_completion_tokens - spent, self._remaining_context())
        if self.agent.depth:
            return int(min(remaining, self.sub_agents.tokens_left()))
        return remaining

    def _remaining_context(self) -> int:
        """Return the free tokens of the engine's context, less those reserved for a summary."""
        may_follow = self.trajectory.role != SUMMARY and self._may_summarise()
        reserved = self._summary_room if may_follow else 0
        return self.engine.max_context - reserved - self.trajectory.length

    def _limit_reached(self) -> StopReason:
        """Return the stop reason of the token limit that leaves the fewest tokens.

        On a tie the sub-agents' limit comes first, then the context's, then the rollout's.
        """
        fewest = self._remaining_tokens()  # of all limits
        if self.agent.depth and self.sub_agents.tokens_left() <= fewest:
            return StopReason.max_delegated_tokens
        full = self._remaining_context() <= fewest
        return StopReason.context_full if full else StopReason.max_tokens

    async def _reply_to(self, turn: AssistantTurn, completion: Completion) -> StopReason | None:
        """Run a turn's calls and append their replies; without calls, append the user's next turn.

        Returns the reason to stop, or None if the model is to sample another turn.
        """
        calls = self._calls_to_answer(turn)
        if not calls:
            return await self._append_user_turn(turn, completion)
        # `tools.stop_tools` are the task's own: another stop tool of the run is an unknown tool.
        stops = any(call.name in self.tools.stop_tools for call in calls)
        # A stop tool ends the rollout before any other limit, so its turn always runs.
        if not stops and (reason := self._reason_not_to_run(turn, calls, completion)):
            return reason
        results = await self._execute(calls, stops=stops)
        await self.throttle.wait()  # where many rollouts resume together, a few at a time
        self._take_rewards(results)
        # A sub-agent's limit comes first (`sub_agents.stop`, None if it has reached none), then the
        # stop tool, then the limits on calls.
        reason = self.sub_agents.stop
        if reason is None:
            reason = StopReason.stop_tool if stops else self._reason_after_calls(results)
        max_suffix_tokens = self._remaining_tokens()
        if reason is None:  # a turn follows: one sampled token has to fit after the replies
            max_suffix_tokens -= 1
        replies, suffix = fit_replies(
            self.chat,
            turn,
            [reply_message(result) for result in results],
            completion=completion,
            max_suffix_tokens=max_suffix_tokens,
            max_result_tokens=[
                self.tools.limits(result.call.name).max_result_tokens
                or self.limits.max_result_tokens
                for result in results
            ],
            generation_prompt=reason is None,
        )
        self._append(turn, completion, replies, suffix)
        return reason

    def _take_rewards(self, results: Sequence[ToolResult]) -> None:
        """Add the rewards of a turn's results to the turn.

        Raises ToolUnavailable instead if a tool is broken: the model must not learn from its
        answer.
        """
        for result in results:
            if result.error is ToolError.unavailable:
                raise ToolUnavailable(f"tool {result.call.name}: {result.content}")
        for result in results:
            if result.reward is not None:
                self._reward_turn(result.reward, f"tool {result.call.name}")

    def _append(
        self,
        turn: AssistantTurn,
        completion: Completion,
        replies: Sequence[Message],
        suffix: Suffix,
    ) -> None:
        """Append the replies to a turn: their ids in `suffix`, and the messages."""
        append_suffix(self.trajectory, suffix, replies, self.chat)
        self._add(*replies)
        if self._compaction is not None:
            self._past_turns.append(
                PastTurn(turn=turn, completion=completion, replies=tuple(replies), suffix=suffix)
            )

    def _calls_to_answer(self, turn: AssistantTurn) -> list[ToolCall]:
        """Return the calls of a turn, without those that the limits ignore."""
        ignored = self.limits.on_malformed_call is OnMalformedCall.ignore
        return [call for call in turn.calls if not (ignored and call.malformed)]

    async def _append_user_turn(
        self, turn: AssistantTurn, completion: Completion
    ) -> StopReason | None:
        """Append the user's next message after an answer of the model.

        Returns the reason to stop: `completed` if the user says nothing more, a limit, or that of
        the environment. None: the model is to sample another turn.
        """
        if self.agent.depth:  # a sub-agent has no user
            return StopReason.completed
        self._dialogue.hear(turn.content)
        out_of_turns = self._turns >= self.limits.max_turns
        # `self.user` asks a person, who is not asked for a message that cannot be answered. Other
        # users are asked: whether they say something decides between `max_turns` and `completed`.
        if self.user is not None and out_of_turns:
            return StopReason.max_turns
        text = await self._user_text()  # may ask the environment, which may end its episode
        episode_end = None if self.episode is None else self.episode.stop_reason
        if text is None:
            return episode_end or StopReason.completed
        if episode_end is not None:  # its last words, which no turn will answer
            self._append_question(turn, completion, text, generation_prompt=False)
            return episode_end
        if out_of_turns:
            return StopReason.max_turns
        fitted = self._append_question(turn, completion, text, generation_prompt=True)
        return None if fitted else self._limit_reached()

    def _append_question(
        self, turn: AssistantTurn, completion: Completion, text: str, *, generation_prompt: bool
    ) -> bool:
        """Append the user's message `text` if it fits; return True if it did.

        A tool's text may be clipped to fit, a question may not: it would be another question. If a
        turn follows, after a generation prompt, one token of it has to fit too.
        """
        question: Message = {"role": "user", "content": text}
        suffix = suffix_after(
            self.chat, turn, completion, [question], generation_prompt=generation_prompt
        )
        needed_tokens = sum(len(ids) for _, ids in suffix) + int(generation_prompt)
        fits = needed_tokens <= self._remaining_tokens()
        if fits:
            self._append(turn, completion, [question], suffix)
            self._dialogue.say(text)
        return fits

    async def _user_text(self) -> str | None:
        """Return the text of the user's next message; None if the user says nothing more.

        It comes from the context's `user` if there is one. Otherwise the task's scripted user turns
        come first, then the environment's messages, then those of the simulated user.
        """
        answer = self.trajectory.messages[-1]
        if self.user is not None:
            return await self.user(answer)
        if self._dialogue.user_messages < len(self.rollout.task.user_turns):
            return await self._scripted_text()
        if self.episode is not None:
            reply = await self.episode.user(answer)
            if isinstance(reply, TurnReward):
                self._reward_turn(reply.value, f"environment {self.episode.kind.name}: its user")
                reply = reply.content
            # Without a reply of the environment the simulated user speaks, if there is one, unless
            # the environment has ended the episode.
            if reply is not None or self.episode.stop_reason is not None:
                return reply
        return await self._dialogue.reply(self.rollout.task)

    async def _scripted_text(self) -> str | None:
        """Return the task's next scripted user turn.

        The turns of a Harbor task with steps are the instructions of its later steps. The tests of
        a step decide whether the next one comes; None: it does not.
        """
        machines, rollout_id = self.context.machines, self.rollout.rollout_id
        is_due = True
        if machines is not None and machines.current_step(rollout_id) is not None:
            is_due = await machines.next_step(rollout_id)
        return self.rollout.task.user_turns[self._dialogue.user_messages] if is_due else None

    def _reason_not_to_run(
        self, turn: AssistantTurn, calls: list[ToolCall], completion: Completion
    ) -> StopReason | None:
        """Return the reason to stop before any call of this turn runs; None: they may run.

        Also records the calls, which `max_repeated_calls` compares with those of earlier turns.
        """
        malformed = any(call.malformed for call in calls)
        if malformed and self.limits.on_malformed_call is OnMalformedCall.stop:
            return StopReason.max_invalid_calls
        too_many = self.chat.one_call_per_turn and len(calls) > 1
        if too_many and self.limits.on_parallel_calls is OnParallelCalls.stop:
            return StopReason.max_tool_calls
        if self._turns >= self.limits.max_turns:
            return StopReason.max_turns
        self._calls_made += calls
        max_repeats = self.limits.max_repeated_calls
        if max_repeats is not None and repeats_a_call(self._calls_made, max_repeats):
            return StopReason.repeated_call
        # No tool runs whose reply cannot be shown: the template's text around the replies, and one
        # sampled token after them, must fit.
        wrapper = self.chat.wrapper_length(
            turn,
            [reply_message(ToolResult(call=call, content="")) for call in calls],
            completion_ids=completion.token_ids,
            finish=completion.finish,
        )
        return self._limit_reached() if wrapper + 1 > self._remaining_tokens() else None

    async def _execute(self, calls: list[ToolCall], *, stops: bool) -> list[ToolResult]:
        """Run the calls of a turn; return one result per call, in call order.

        Calls over a limit do not run and get an error result. `stops`: one of the calls is to a
        stop tool, which ends the rollout. Then no limit on the number of calls holds, except those
        of the other tools.
        """
        surplus: list[ToolCall] = []
        if not stops and self.chat.one_call_per_turn:
            calls, surplus = calls[:1], calls[1:]
        # For each call the reason why a limit forbids it, or None.
        refusals = over_limits(
            calls,
            self.rollout.tool_results,
            max_calls=None if stops else self.limits.max_tool_calls,
            tool_limit=lambda name: (
                None if name in self.tools.stop_tools else self.tools.limits(name).max_calls
            ),
        )
        allowed = [call for call, refusal in zip(calls, refusals, strict=True) if refusal is None]
        executed = {result.call.id: result for result in await self._run_calls(allowed)}
        results = []
        for call, refusal in zip(calls, refusals, strict=True):
            if refusal is None:
                results.append(executed[call.id])
            else:
                text = f"Error: {refusal}"
                results.append(ToolResult(call=call, content=text, error=ToolError.limit))
        results += [
            ToolResult(
                call=call,
                content=f"Error: only one call per turn; {call.name or 'this one'} was not run",
                error=ToolError.parallel,
            )
            for call in surplus
        ]
        if any(result.parts for result in results):  # a result with images
            results = refuse_unreadable_images(results, self.chat)
        self.rollout.tool_results.extend(results)
        return results

    async def _run_calls(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Run the calls of the last turn; return one result per call, in call order.

        Raises the failure of a sub-agent that one of the tools has run.
        """
        # The calls run concurrently, but sub-agents of theirs one at a time, in call order.
        order = CallOrder([call.id for call in calls])

        def context_of(call: ToolCall) -> ToolContext:
            """Return the context that a call's tool gets, with the rollout's copy of its task."""
            if self._task is None:
                self._task = copy_task(self.rollout.task)
            return ToolContext(
                rollout_id=self.rollout.rollout_id,
                task=self._task,
                turn=self._turns - 1,  # the agent's last one, counted from 0
                call_id=call.id,
                tool=call.name,
                run_policy=partial(self._delegate, order),
                machine=self._machine(),
            )

        results = await self.tools.execute(calls, context_of, order.answered)
        if self.sub_agents.used:
            await self.sub_agents.check(results, order)
        return results

    def _machine(self) -> RolloutMachine | None:
        """Return the rollout's machine, if it has one."""
        machines = self.context.machines
        return None if machines is None else machines.machine_of(self.rollout.rollout_id)

    async def _delegate(
        self, order: CallOrder, caller: ToolContext, messages: Sequence[Message], **options: Any
    ) -> Delegated:
        """Implement `ToolContext.delegate` for a call of the last turn.

        `options` are the other arguments of `delegate`. Calls delegate one at a time, in `order`.
        """
        self.sub_agents.check_may_delegate(caller.tool)
        async with order.turn(caller.call_id):
            copies: list[Message] = copy_value([*messages])  # the tool may change its own later
            sub_request = SubAgentRequest(caller=caller, messages=copies, **options)
            return await self.sub_agents.run(self._run_sub_agent(sub_request))

    async def _run_sub_agent(self, sub_request: SubAgentRequest) -> Delegated:
        """Run the policy on a sub-agent's messages, in a trajectory of its own.

        `sub_request` is what the tool asks for. `self.request` is the rollout's: its seed and its
        sampling hold for the sub-agent too.
        """
        depth = self.agent.depth + 1
        self.sub_agents.check_depth(depth)
        context = replace(self.context, limits=sub_request.tighten(self.context.limits))
        tools = sub_request.make_tools(context, self.episode)
        prompt = self.chat.prompt_ids(sub_request.messages, tools.schemas)
        if len(prompt) >= self.engine.max_context:
            return Delegated(
                content="",
                stop_reason=StopReason.context_full,
                messages=tuple(sub_request.messages),
            )
        calling_turn = self.trajectory.turns - 1  # the last one, whose calls are run
        delegation = Delegation(
            caller=(self.trajectory.index, calling_turn),
            call_id=sub_request.caller.call_id,
            schemas=tuple(tools.schemas),
            max_turns=context.limits.max_turns,
            max_tokens=context.limits.max_completion_tokens,
        )
        images = self.chat.place(prompt, sub_request.messages)  # with their positions in `prompt`
        trajectory = self.sub_agents.begin(sub_request, prompt, delegation, images)
        agent = Agent(
            session=f"{self.rollout.rollout_id}/{trajectory.index}",
            parent=self.agent.session,
            role=sub_request.role,
            depth=depth,
            delegation=delegation,
        )
        # It continues the rollout's last trajectory, which `begin` has just added.
        loop = _Loop(
            self.rollout, self.request, context, tools, self.episode, self.sub_agents, agent
        )
        try:
            reason = await loop.run()
        finally:
            await self.engine.release(agent.session)
        # These end the whole rollout. Any other end of the sub-agent is a result for the tool.
        if reason in (StopReason.max_delegated_tokens, StopReason.aborted):
            raise self.sub_agents.stop_rollout(reason)
        messages = copy_value(loop.trajectory.messages)
        answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        return Delegated(content=answer, stop_reason=reason, messages=tuple(messages))

    def _reason_after_calls(self, results: list[ToolResult]) -> StopReason | None:
        """Return the reason to stop after a turn's calls were answered, or None.

        The end of the environment comes first, then the limit on calls, then that on invalid calls.
        """
        episode_end = None if self.episode is None else self.episode.stop_reason
        if episode_end is not None or any(result.done for result in results):
            return episode_end or StopReason.environment_done
        max_calls, all_results = self.limits.max_tool_calls, self.rollout.tool_results
        # A tool's own limit refuses calls by the same error, and does not end the rollout: the
        # count decides too.
        any_refused = any(result.error is ToolError.limit for result in results)
        if any_refused and max_calls is not None and len(all_results) > max_calls:
            return StopReason.max_tool_calls
        errors = [result.error for result in all_results if result.error]
        invalid = sum(error.invalid_call for error in errors)
        limit = self.limits.max_invalid_calls
        return StopReason.max_invalid_calls if limit is not None and invalid > limit else None


def _reason_if_cut_off(completion: Completion) -> StopReason | None:
    """Return the reason to stop if the engine cut off the completion, else None."""
    if completion.finish is Finish.length:
        return StopReason.max_tokens
    return StopReason.aborted if completion.finish is Finish.abort else None
