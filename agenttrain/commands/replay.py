"""`agenttrain replay <run>`: run the tool loop again over recorded completions and tool results.

The same prompt, parser, limits and template glue must give the same ids, mask, messages and stop
reason; where they do not, a template, a tool's schema or the loop has changed since.

Doubles take the place of the run's components: `RecordedEngine` returns the recorded tokens,
`RecordedToolbox` answers calls with their recorded results and runs no tool, and `RecordedKind` is
an environment that repeats its recorded messages and holds no state.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.commands.recorded import EVALUATED, Record, recorded_tasks, step_records
from agenttrain.commands.recorded_calls import MAIN_AGENT, CallKey, RecordedCalls
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.environments.config import UserSettings
from agenttrain.environments.environment import EnvironmentKind, Episode, Instance, Reward, Start
from agenttrain.environments.environments import Environments
from agenttrain.environments.user import SimulatedUser
from agenttrain.evaluation import limits_of, restricted
from agenttrain.rollout.config import OnToolFailure, RolloutRequest
from agenttrain.rollout.declared import read_declared
from agenttrain.rollout.demonstration import BadDemonstration
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.recorded import difference as rendering_difference
from agenttrain.rollout.recorded import read_again
from agenttrain.rollout.request import RolloutContext
from agenttrain.runs.setup import Components, context_of
from agenttrain.settings.mixture import refuse_sources
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.pictures import recorded_messages
from agenttrain.tracking.rollouts import (
    added_messages,
    completions,
    prompt_messages,
    rollout_record,
)
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import (
    Completion,
    ConfigError,
    LedgerError,
    Message,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolCall,
    ToolContext,
    ToolFailure,
    ToolResult,
    ToolUnavailable,
)
from agenttrain.utils.json_lines import dumps
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import LARGEST
from agenttrain.utils.seeds import seeds_of

if TYPE_CHECKING:
    from torch import Tensor


UNREPEATABLE = (
    StopReason.timeout,
    StopReason.error,
    StopReason.max_delegation_depth,
    StopReason.max_delegated_tokens,
)
"""Stop reasons with causes that no file records: the clock, a fault, or a sub-agent that did not
begin. Only the tokens before the stop are compared."""
AGENT: ContextVar[int] = ContextVar("AGENT", default=MAIN_AGENT)
"""The agent whose calls are answered, by the number of its first trajectory. Calls of one turn are
answered in tasks of their own, each of which may run a sub-agent."""
BEFORE, AFTER = 8, 24
"""Tokens shown on either side of a difference."""


def replay_rollouts(
    config: RunConfig, folder: Path, *, step: int, rollout_id: str | None, live: bool
) -> int:
    """Replay one rollout of a step, or all of them, and print the outcome of each.

    `live` runs the tools again instead of answering with their recorded results. Otherwise no tool
    is imported or started, provided tools.json holds their schemas. Returns exit code 0 if all
    rollouts are identical, else 1. Raises ConfigError for a rollout that was not recorded.
    """
    command = f"replay {folder}"
    refuse_sources(command, config)
    records = _chosen_records(folder, step, rollout_id, command)
    components = Components(config, tools=None if live else read_declared(folder))
    _ = components.chat  # built first: its error is reported before one of the data
    if read_summary(folder).get("verb") == "sft":
        differences = _demonstration_differences(components, records)
    elif config.agent.outside:
        differences = _outside_agent_differences(components, records)
    else:
        differences = _loop_differences(config, components, records, step, command, live=live)
    return _print_all(records, differences, step)


def _chosen_records(
    folder: Path, step: int, rollout_id: str | None, command: str
) -> list[dict[str, Any]]:
    """Return the records of a step, or the one of a rollout; raises ConfigError without it."""
    records = step_records(folder, step, command)
    if rollout_id is None:
        return records
    recorded_ids = [record["rollout_id"] for record in records]
    if rollout_id not in recorded_ids:
        raise ConfigError(
            f"{command} --step {step} --rollout {rollout_id}: no such rollout"
            f"{did_you_mean(rollout_id, recorded_ids)}; there are {recorded_ids[0]} to "
            f"{recorded_ids[-1]}"
        )
    return [record for record in records if record["rollout_id"] == rollout_id]


def _loop_differences(
    config: RunConfig,
    components: Components,
    records: Sequence[dict[str, Any]],
    step: int,
    command: str,
    *,
    live: bool,
) -> list[str | None]:
    """Run the tool loop again for each record; return what differs, or None.

    Raises ConfigError if the data has no row with a record's id and prompt.
    """
    tasks = recorded_tasks(config, components.tasks, records, step)  # by rollout id
    missing = [record["task_id"] for record in records if record["rollout_id"] not in tasks]
    if missing:
        raise ConfigError(
            f"{command} step={step}: task {missing[0]} with its recorded prompt is not in the data "
            "now; a replay needs the rows that the run had"
        )
    if step == EVALUATED:  # the number under which `agenttrain eval` records its rollouts
        # Evaluations may have fewer tools (eval.tools), and limits of their own.
        environments = components.environments
        for evaluated_id, task in tasks.items():
            methods = environments.toolbox_of(environments.kind_of(task))
            declared = (*components.toolbox.names, *methods.names)
            tasks[evaluated_id] = restricted(task, config.eval.tools, declared)
        config = replace(config, rollout=limits_of(config.rollout, config.eval))
    return asyncio.run(_replay_all(config, components, records, tasks, live=live))


def _outside_agent_differences(
    components: Components, records: Sequence[Record]
) -> list[str | None]:
    """Return for each rollout of an outside agent what differs, or None.

    The agent is not run again. Its record is read as a rollout without scores. Its messages are
    rendered and its turns parsed again, with the tools that it sent: `rendering_difference`
    compares both with the record.
    """
    chat = components.chat
    differences: list[str | None] = []
    for record in records:
        # An outside agent writes its prompt itself: the record has it, the task has no messages.
        task = Task(task_id=record["task_id"], messages=(), columns=record["columns"])
        try:
            rollout = read_again(record, task, record["rollout_id"])
        except LedgerError as error:
            differences.append(str(error))
            continue
        if not rollout.turns:  # nothing was rendered or parsed
            differences.append(None)
            continue
        # The conversation begins with the first trajectory's messages and tools.
        first = rollout.trajectories[0]
        schemas = [dict(schema) for schema in first.schemas or ()]
        differences.append(rendering_difference(rollout, first.messages, chat, schemas))
    return differences


def _demonstration_differences(
    components: Components, records: Sequence[Record]
) -> list[str | None]:
    """Rebuild the demonstrations of a supervised step from their rows.

    Returns for each record what differs from it, or None.
    """
    source, demonstrate = components.tasks.train, components.demonstrator
    differences: list[str | None] = []
    for record in records:
        # The id is the row's place and the task's id: `7/demonstrations/7`.
        place, _, name = record["rollout_id"].partition("/")
        (task,) = source.tasks(int(place), 1)
        if task.task_id != name:
            text = f"rollout {record['rollout_id']}: DIFFERS: its row is {task.task_id} now"
            differences.append(text)
            continue
        try:
            rollout = demonstrate(task, record["rollout_id"])
        except BadDemonstration as error:
            differences.append(f"rollout {record['rollout_id']}: DIFFERS: {error}")
        else:
            differences.append(difference(record, rollout, components.chat.decode))
    return differences


def _print_all(records: Sequence[Record], differences: Sequence[str | None], step: int) -> int:
    """Print the outcome of each rollout. Return exit code 0 if all are identical, else 1."""
    for record, difference in zip(records, differences, strict=True):
        if difference is not None:
            print(difference)
            continue
        tokens = sum(len(trajectory["token_ids"]) for trajectory in record["trajectories"])
        stop = record["stop_reason"]
        note = f" up to its end by {stop}" if stop in UNREPEATABLE else ""
        print(
            f"rollout {record['rollout_id']}: identical{note}: {tokens} ids, mask, messages, stop "
            f"reason {stop} ({len(completions(record))} turns, {len(record['tool_calls'])} calls)"
        )
    identical = sum(difference is None for difference in differences)
    if len(records) > 1:
        print(f"{identical} of {len(records)} rollouts of step {step} replay to identical ids")
    return int(identical < len(records))


async def _replay_all(
    config: RunConfig,
    components: Components,
    records: Sequence[Record],
    tasks: Mapping[str, Task],
    *,
    live: bool,
) -> list[str | None]:
    """Replay the records one after the other; return for each what differs, or None."""
    try:
        return [
            difference(
                record,
                await replay(record, tasks[record["rollout_id"]], config, components, live=live),
                components.chat.decode,
            )
            for record in records
        ]
    finally:
        await components.aclose()


async def replay(
    record: Record, task: Task, config: RunConfig, components: Components, *, live: bool
) -> Rollout:
    """Return the rollout that the tool loop builds from a record's completions and tool results.

    With `live` the tools run, and an environment is reset with its recorded seeds.
    """
    engine = RecordedEngine(completions(record), max_context=context_of(config) or sys.maxsize)
    tools, environments = components.toolbox, components.environments
    user = components.user if live else recorded_user(record, task, config, environments)
    if not live:
        # A recorded environment that ended the episode did so in the last turn: then the engine has
        # no completion left.
        tools, environments = recorded_tools(
            record, task, tools, environments, in_last_turn=lambda: engine.exhausted
        )
    seed, group_seed = seeds_of(record["rollout_id"], config.seed)
    request = RolloutRequest(
        task=task,
        sampling=Sampling(seed=seed),
        rollout_id=record["rollout_id"],
        group_id=record["group_id"],
        group_seed=group_seed,
    )
    context = RolloutContext(
        engine=engine,
        chat=components.chat,
        toolbox=tools,
        # No record says when time ran out: there is no timeout. A fault of a tool that runs `live`
        # ends only its rollout (drop), so that the others are still replayed.
        limits=replace(config.rollout, timeout_s=None, on_tool_failure=OnToolFailure.drop),
        environments=environments,
        simulated_user=user,
    )
    return await run_rollout(request, context)


def difference(
    record: Record, rollout: Rollout, decode: Callable[[Sequence[int]], str]
) -> str | None:
    """Return a text about the first difference between a record and its replayed `rollout`.

    Return None if they are the same. Trajectories are compared by parent, token ids, sampled ranges
    and messages, then the rollouts by their stop reasons.
    """
    # Through JSON, as the record was: tuples become lists.
    replayed_record = json.loads(dumps(rollout_record(rollout)))
    where = f"rollout {record['rollout_id']}: DIFFERS"
    recorded, replayed = record["trajectories"], replayed_record["trajectories"]
    for before, after in zip(recorded, replayed, strict=False):
        if before["parent"] != after["parent"]:
            return f"{where}: parent {before['parent']} was recorded, {after['parent']} replayed"
        if before["token_ids"] != after["token_ids"]:
            return where + _token_difference(before, after, decode, replayed_record.get("error"))
        if _sampled_ranges(before) != _sampled_ranges(after):
            return f"{where}: the ids are the same, the mask is not"
        # Reading the record put the images back into its messages: compare their hashes instead.
        old, new = recorded_messages(before["messages"]), after["messages"]
        for index, (old_message, new_message) in enumerate(zip(old, new, strict=False)):
            if old_message != new_message:
                return (
                    f"{where} in message {index}\n  recorded  {old_message}\n"
                    f"  replayed  {new_message}"
                )
        if len(old) != len(new):
            return f"{where}: {len(old)} messages were recorded, {len(new)} replayed"
    if len(recorded) != len(replayed):
        return f"{where}: {len(recorded)} trajectories were recorded, {len(replayed)} replayed"
    old_stop, new_stop = record["stop_reason"], replayed_record["stop_reason"]
    # UNREPEATABLE reasons, such as a timeout, do not follow from the record.
    if old_stop != new_stop and old_stop not in UNREPEATABLE:
        return f"{where}: stop reason {old_stop} was recorded, {new_stop} replayed"
    return None


def _token_difference(
    recorded: Record, replayed: Record, decode: Callable[[Sequence[int]], str], error: str | None
) -> str:
    """Describe the first position at which two trajectories have different ids.

    `error` is the one that ended the replayed rollout, if any.
    """
    old, new = recorded["token_ids"], replayed["token_ids"]
    pairs = enumerate(zip(old, new, strict=False))
    # If one of them is the beginning of the other, they differ where the shorter one ends.
    position = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    span = next((span for span in recorded["spans"] if position < span["end"]), None)
    place = "after its end" if span is None else f"turn {span['turn']}, {span['origin']}"

    def describe(token_ids: Sequence[int]) -> str:
        """Return the id at the first difference, and the text before and after it."""
        before = decode(token_ids[max(position - BEFORE, 0) : position])
        after = decode(token_ids[position : position + AFTER])
        number = token_ids[position] if position < len(token_ids) else "none"
        return f"id {number}: {before!r} then {after!r}"

    error = "" if error is None else f"\n  {error}"
    return (
        f" at position {position} of {len(old)} ({place}){error}\n"
        f"  recorded  {describe(old)}\n"
        f"  replayed  {describe(new)}"
    )


def _sampled_ranges(trajectory: Record) -> list[tuple[int, int]]:
    """Return the [start, end) ranges of sampled tokens; adjacent spans are one range."""
    ranges: list[tuple[int, int]] = []
    for span in trajectory["spans"]:
        if span["origin"] != Origin.sampled:
            continue
        if ranges and ranges[-1][1] == span["start"]:
            ranges[-1] = (ranges[-1][0], span["end"])
        else:
            ranges.append((span["start"], span["end"]))
    return ranges


def recorded_tools(
    record: Record,
    task: Task,
    toolbox: Toolbox,
    environments: Environments,
    *,
    in_last_turn: Callable[[], bool],
) -> tuple[Toolbox, Environments]:
    """Return a toolbox and environments that repeat what a record holds, and run nothing.

    `in_last_turn` returns True once the replayed rollout has reached its last recorded turn.
    """
    kind = environments.kind_of(task)  # the row's environment (its class and settings), or None
    boxes = [toolbox, *([] if kind is None else [environments.toolbox_of(kind)])]
    tools = RecordedToolbox(boxes, record)
    if kind is None:
        return tools, Environments()
    prompt = prompt_messages(record["trajectories"][0])
    ended = record["stop_reason"] in (StopReason.environment_done, StopReason.environment_truncated)
    replies = RecordedReplies(
        # The prompt is the task's messages, then those of `reset`.
        messages=tuple(prompt[len(task.messages) :]),
        # The user's messages are those that the task scripts, which the tool loop sends itself,
        # then those of the environment.
        user=_user_texts(record)[len(task.user_turns) :],
        reward=record.get("environment_reward"),
        # A callable: whether the episode is over changes while the rollout is replayed.
        done=lambda: ended and in_last_turn(),
        truncated=record["stop_reason"] == StopReason.environment_truncated,
    )
    return tools, RecordedEnvironments(RecordedKind(kind, replies))


def recorded_user(
    record: Record, task: Task, config: RunConfig, environments: Environments
) -> SimulatedUser | None:
    """Return a simulated user that repeats its recorded messages.

    None if the run has no simulated user, or the environment repeats the user's messages.
    """
    if not config.user or environments.kind_of(task) is not None:
        return None
    # The tool loop itself sends the user's messages that the task scripts.
    texts = iter(_user_texts(record)[len(task.user_turns) :])
    # The record says when the user stops, not a limit.
    no_limit = UserSettings(max_turns=LARGEST - 1)  # settings have to be below LARGEST
    return SimulatedUser(lambda task, spoken, seed: next(texts, None), no_limit)


def _user_texts(record: Record) -> list[str]:
    """Return the texts of the user's messages after the prompt."""
    return [message["content"] for message in added_messages(record) if message["role"] == "user"]


class RecordedToolbox(Toolbox):
    """Toolbox that runs no tool: it answers calls with the recorded results of one rollout.

    Schemas, limits and stop tools are those of the real toolboxes. A call that began a sub-agent
    begins it again, and the sub-agent's calls are answered in the same way.
    """

    def __init__(self, toolboxes: Sequence[Toolbox], record: Record) -> None:
        """Answer for all tools of `toolboxes` with the results of `record`, a rollout's record."""
        tool_boxes = [(name, toolbox) for toolbox in toolboxes for name in toolbox.names]
        super().__init__(
            {name: toolbox.tool(name) for name, toolbox in tool_boxes},
            limits={name: toolbox.limits(name) for name, toolbox in tool_boxes},
            stop_tools=sorted(name for name, toolbox in tool_boxes if name in toolbox.stop_tools),
        )
        self._trajectories: list[Record] = record["trajectories"]
        self._calls = RecordedCalls(record)

    async def execute(
        self, calls: Sequence[ToolCall], context_of: Callable[[ToolCall], ToolContext]
    ) -> list[ToolResult]:
        """Return the recorded results, and repeat the sub-agents that the calls began.

        Raises ToolUnavailable for a call without a recorded result.
        """
        results = []
        for call in calls:
            context = context_of(call)
            key = CallKey(AGENT.get(), context.turn, call.id)
            if (result := self._calls.results.get(key)) is None:
                raise ToolUnavailable(f"no result was recorded for the call {call.id} {call.name}")
            for number in self._calls.sub_agents.get(key, ()):
                await self._delegate(number, context)
            # `call` is the call as it was parsed now: a difference from the recorded one must show.
            results.append(replace(result, call=call))
        return results

    async def _delegate(self, number: int, context: ToolContext) -> None:
        """Repeat the sub-agent that began with the recorded trajectory `number`."""
        trajectory = self._trajectories[number]
        delegation = trajectory["delegation"]
        token = AGENT.set(number)  # the calls in the block are the sub-agent's
        try:
            with suppress(ToolFailure):  # a limit stopped the recorded sub-agent too
                await context.delegate(
                    prompt_messages(trajectory),
                    tools=[schema["function"]["name"] for schema in delegation["schemas"]],
                    role=trajectory["role"],
                    max_turns=delegation["max_turns"],
                    max_tokens=delegation["max_tokens"],
                )
        finally:
            AGENT.reset(token)

    async def release(self, rollout_id: str) -> None:
        """Do nothing: no tool ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplies:
    """Everything that the environment of one recorded rollout returned to the tool loop."""

    messages: tuple[Message, ...]
    """Messages of its `reset`."""
    user: Sequence[str]
    """Messages of its `user`, in order."""
    reward: float | None
    """Reward of the environment; None: it gave none."""
    done: Callable[[], bool]
    """Returns True once the episode is over."""
    truncated: bool
    """True if a limit of the environment's own ended the episode."""


class RecordedKind(EnvironmentKind):
    """A declared environment whose code never runs; for one rollout."""

    def __init__(self, kind: EnvironmentKind, replies: RecordedReplies) -> None:
        super().__init__(kind.name, kind.cls, bound=kind.bound, settings=kind.settings)
        self._replies = replies

    async def start(self, start: Start) -> Episode:
        """Return the recorded episode."""
        return RecordedEpisode(self, self._replies, start.rollout_id)


class RecordedEpisode(Episode):
    """An episode whose instance is never made; `RecordedToolbox` answers for its methods."""

    def __init__(self, kind: RecordedKind, replies: RecordedReplies, rollout_id: str) -> None:
        super().__init__(kind, Instance(kind.name, kind.settings.timeout_s), rollout_id)
        self.messages = replies.messages
        self._replies = replies
        self.truncated = replies.truncated
        self._user: Iterator[str] = iter(replies.user)

    @property
    def done(self) -> bool:
        """Return whether the environment had declared the episode over."""
        return self._replies.done()

    @done.setter
    def done(self, value: bool) -> None:
        """Ignore the value: the record decides."""

    async def user(self, message: Message) -> str | None:
        """Return the user's next recorded message; None after the last."""
        return next(self._user, None)

    async def state(self) -> str | None:
        """Return None: no environment is started."""
        return None

    async def reward(self, rollout: Rollout, read: Callable[[Any], Reward]) -> Reward | None:
        """Return the recorded reward, which `read` turns into a reward as that of the method."""
        return read(self._replies.reward)

    async def finish(self, *, reusable: bool = True) -> None:
        """Do nothing: no environment was started."""


class RecordedEnvironments(Environments):
    """Declared environments for the replay of one rollout: the recorded one is that of every task.

    A replay gives the tool loop these in place of the run's, so that no environment's code runs.
    The replies of its methods, which are tools to the model, come from `RecordedToolbox`.
    """

    def __init__(self, kind: RecordedKind) -> None:
        super().__init__()
        self._kind = kind

    def kind_of(self, task: Task) -> EnvironmentKind:
        """Return the only kind."""
        return self._kind


class RecordedEngine:
    """Engine of one rollout: answers turn n with the n-th recorded completion.

    It ignores the ids that it is asked to continue; the caller compares both ledgers afterwards.
    """

    def __init__(self, completions: Sequence[Completion], *, max_context: int) -> None:
        """Take the completions, and the `max_context` of the engine that sampled them."""
        self.max_context = max_context
        self._left = list(completions)

    @property
    def exhausted(self) -> bool:
        """Return whether the last completion has been given out."""
        return not self._left

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Return the next completion, whatever the ids and images.

        Raises EngineError if none is left, or if it is longer than `sampling.max_tokens`.
        """
        if not self._left:
            raise EngineError(f"{session}: another completion is asked for; no more were recorded")
        completion = self._left.pop(0)
        if len(completion.token_ids) > sampling.max_tokens:
            raise EngineError(
                f"{session}: {len(completion.token_ids)} tokens were recorded where the budget is "
                f"{sampling.max_tokens} now"
            )
        return completion

    async def release(self, session: str) -> None:
        """Do nothing: there is no cache."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Ignore new weights: the completions are recorded ones."""

    async def aclose(self) -> None:
        """Do nothing: the engine holds nothing."""
