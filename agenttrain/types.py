"""The nouns of agenttrain: Task, Span, Trajectory, Rollout and their parts.

Every module may import this one, which imports none of the package. A Task is attempted in a group
of Rollouts. A Rollout is one or more Trajectories. A Trajectory is a list of Spans: runs of token
ids of one origin, of which only the sampled ones are trained. A trajectory of two turns::

    prompt    <|im_start|>user … <|im_start|>assistant\\n     mask 0  (rendered once)
    sampled   <tool_call>…</tool_call><|im_end|>              mask 1  (its own ids and logprobs)
    template  \\n<|im_start|>user\\n<tool_response>\\n          mask 0  (glue)
    tool      3                                               mask 0  (a tool's text)
    template  \\n</tool_response><|im_end|>\\n<|im_start|>…     mask 0
    sampled   3<|im_end|>                                     mask 1
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, Any]
"""One chat message: `role`, `content`, and, if they apply, `reasoning_content`, `tool_calls`,
`tool_call_id`, `name`."""

MAIN = "main"
"""Role of the trajectory that attempts the task itself."""


class Origin(StrEnum):
    """Source of a span's tokens."""

    prompt = "prompt"
    """The rendered prompt, or what a compacted context shows again of an earlier trajectory."""
    sampled = "sampled"
    """Sampled by the policy: the only tokens that are trained."""
    template = "template"
    """Text that the chat template adds between turns."""
    tool = "tool"
    """Text from outside that follows the prompt: tool results and later user turns."""


class Finish(StrEnum):
    """Why the engine stopped sampling a completion."""

    stop = "stop"
    """The last token is one of the stop tokens."""
    length = "length"
    """All tokens of the request's budget were sampled."""
    abort = "abort"
    """The request was aborted; the tokens sampled so far are valid."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    completed = "completed"
    """The model answered without calling a tool, and the user has nothing more to say."""
    stop_tool = "stop_tool"
    """The model called a stop tool."""
    environment_done = "environment_done"
    """The environment declared the episode over."""
    environment_truncated = "environment_truncated"
    """A limit of the environment's own cut the episode off."""
    max_turns = "max_turns"
    """The turn limit was reached with calls pending."""
    max_tokens = "max_tokens"
    """A completion, or the rollout, reached its token limit."""
    context_full = "context_full"
    """The engine's context has no room for another token."""
    max_tool_calls = "max_tool_calls"
    """More tool calls than allowed."""
    max_invalid_calls = "max_invalid_calls"
    """More malformed, unknown or badly typed calls than allowed."""
    repeated_call = "repeated_call"
    """The same call, with the same arguments, too often in a row."""
    timeout = "timeout"
    """The rollout's wall-clock limit passed."""
    aborted = "aborted"
    """The engine aborted the request."""
    invalid_summary = "invalid_summary"
    """A summary of the context has a call in it, or no text."""
    max_delegation_depth = "max_delegation_depth"
    """A sub-agent delegated deeper than allowed."""
    max_delegated_tokens = "max_delegated_tokens"
    """The sub-agents reached their token limit."""
    max_requests = "max_requests"
    """An outside agent sent more requests than allowed."""
    agent_failed = "agent_failed"
    """An outside agent crashed or ran out of time, and `agent.on_failure=zero` scores that 0."""
    error = "error"
    """It failed; `Rollout.error` has the reason."""


class AgenttrainError(Exception):
    """Base of the errors that agenttrain raises on purpose."""


class ConfigError(AgenttrainError, ValueError):
    """A configuration that cannot run; the message gives key, value and remedy."""


class LedgerError(AgenttrainError):
    """The tokens, mask, logprobs and messages of a trajectory disagree.

    The message names the rollout, the trajectory, the turn and the token position, with both
    decodings where two texts differ.
    """


class ToolFailure(AgenttrainError):
    """Raised by a tool for an error that the model should read: ``Error: <message>``."""


class ToolUnavailable(AgenttrainError):
    """Raised by a tool that is broken (its server or sandbox failed), which is not the model's
    fault: the rollout ends as `error` and is never scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An upright picture of one frame in red, green and blue, as the bytes of a PNG or JPEG file.

    Example: ``read_image("cat.png")`` is ``Image(sha256="9f2b…", width=640, height=480)``.
    """

    data: bytes = field(repr=False)
    sha256: str
    """Hash of `data`, in hex."""
    width: int
    """Pixels."""
    height: int

    @property
    def suffix(self) -> str:
        """Ending of the name of a file with this content."""
        is_jpeg = self.data.startswith(b"\xff\xd8")
        return ".jpg" if is_jpeg else ".png"

    def __str__(self) -> str:
        return f"image of {self.width}x{self.height} pixels ({self.sha256[:8]})"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and the placeholders that stand for it among token ids."""

    image: Image
    start: int
    """Position of the first placeholder."""
    grid: tuple[int, int]
    """Rows and columns of the image's vectors."""

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.start + self.tokens


def shift_images(images: Iterable[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    """Return the images at positions that are larger by `by`."""
    return tuple(PlacedImage(placed.image, placed.start + by, placed.grid) for placed in images)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTool:
    """A tool that a dataset row brings: the model sees its schema, a tool of the run does the work.

    Example: ``RowTool(name="lookup_city", description="Find a city.", parameters={"type":
    "object", "properties": {"name": {"type": "string"}}}, executor="lookup")``
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    executor: str
    """Name of the tool of the run, or of its environment, that does the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row as the run uses it: prompt, columns for rewards and tools, its own tools.

    Example: ``Task(task_id="shop-17", messages=({"role": "user", "content": "…"},),
    columns={"answer": "Oslo", "database_seed": 3})``
    """

    task_id: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str | RowTool, ...] | None = None
    """Tools that the rollout has: a RowTool of the row, or the name of a tool of the run or of its
    environments. None: all tools of the run and its environments, and none of the row."""
    user_turns: tuple[str, ...] = ()
    """Later messages of the user, one after each answer without a tool call."""
    source: str = ""
    """Name of the source of a mixture (`data.sources`) whose row it is; empty in other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Experts that a model's layers chose at the positions from which tokens were sampled.

    The first token of a turn was sampled from the last position of its context. Example of a token
    in a model of two layers, of which only the second has experts: ``Routes(experts=bytes([0, 0, 0,
    0, 3, 0, 1, 0]), layers=2, top_k=2)`` are the experts 3 and 1.
    """

    experts: bytes = field(repr=False)
    """[T, layers, top_k] Numbers of experts, as little-endian integers of 16 bits; zeros in layers
    without experts."""
    layers: int
    """All layers of the model, those without experts included."""
    top_k: int
    """Experts that a layer chooses for a token."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the experts of one token."""
        return EXPERT_BYTES * self.layers * self.top_k

    @property
    def tokens(self) -> int:
        """Number of sampled tokens (T)."""
        return len(self.experts) // self.bytes_per_token

    def part(self, start: int, end: int | None) -> Routes:
        """Return the routes of tokens `start` to `end` - 1; None: to the last one."""
        size = self.bytes_per_token
        stop = None if end is None else end * size
        experts = self.experts[start * size : stop]
        return Routes(experts=experts, layers=self.layers, top_k=self.top_k)

    @classmethod
    def join(cls, parts: Sequence[Routes]) -> Routes:
        """Return the routes of the parts' tokens, one part after the other; at least one part."""
        experts = b"".join(part.experts for part in parts)
        return cls(experts=experts, layers=parts[0].layers, top_k=parts[0].top_k)


EXPERT_BYTES = 2
"""Bytes of the number of an expert in `Routes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled for one request.

    Example: ``Completion(token_ids=(41, 2), logprobs=(-0.1, -0.3), finish=Finish.stop,
    versions=((7, 2),))``: both tokens were sampled under policy version 7.
    """

    token_ids: tuple[int, ...]
    """[T], the stop token included."""
    logprobs: tuple[float, ...]
    """[T], natural log, under the distribution sampled from, after temperature and filters."""
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    """(policy_version, number of tokens) in order; the numbers add up to T."""
    routes: Routes | None = None
    """Experts by which the tokens were sampled; None: the engine does not record them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as parsed from a completion. A malformed call is a call too, with `malformed` set."""

    id: str
    """``call_1_0``: the first call of turn 1."""
    name: str
    """Empty for a malformed call without a name."""
    arguments: dict[str, Any]
    malformed: str | None = None
    """Description of the fault, which the model reads; None for a well-formed call."""
    text: str = ""
    """Text of the call as the model wrote it."""
    lenient: bool = False
    """True if it could be parsed only because `response_schema.lenient` is set."""

    @property
    def malformed_reply(self) -> str:
        """Result of a malformed call, as the model reads it in training and from servers."""
        return f"Error: malformed call: {self.malformed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """A parsed completion: content, reasoning, and calls in the order of the text."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]

    def message(self) -> Message:
        """Return the turn as a chat message, in which a malformed call keeps its raw text."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        for call in self.calls:
            function: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
            if call.malformed is not None:
                function["malformed"] = call.malformed
                function["text"] = call.text
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": call.id, "type": "function", "function": function})
        return message


class ToolError(StrEnum):
    """Reason for the error result of a tool call."""

    malformed = "malformed"
    """The call's text could not be parsed."""
    unknown_tool = "unknown_tool"
    """This task has no such tool."""
    invalid_arguments = "invalid_arguments"
    """The arguments do not fit the tool's schema."""
    exception = "exception"
    """The tool raised."""
    timeout = "timeout"
    """The tool took longer than its limit."""
    limit = "limit"
    """A limit on calls forbids this one."""
    parallel = "parallel"
    """The chat template renders one call per turn, and this was a later one."""
    unavailable = "unavailable"
    """The tool is broken, after all retries; the rollout ends as `error`."""

    @property
    def invalid_call(self) -> bool:
        """True if the call was wrong, so that no tool ran; `max_invalid_calls` counts these."""
        return self in (ToolError.malformed, ToolError.unknown_tool, ToolError.invalid_arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Reply to one call. There is always one per call, in call order."""

    call: ToolCall
    content: str
    """Text of the tool or the error, before clipping; the model reads it."""
    error: ToolError | None = None
    seconds: float = 0.0
    """Wall time of the call."""
    done: bool = False
    """True if the tool ended the episode by returning `Done`."""
    stop: bool = False
    """True for a call to a stop tool, by name: the rollout ends, even if the call failed."""
    reward: float | None = None
    """Value of the `TurnReward` that the tool returned; None: it returned another value."""
    executor: str | None = None
    """Tool of the run that did the work if the model called a tool of the row (`RowTool.executor`).
    None: the model called a tool of the run."""
    parts: tuple[str | Image, ...] = ()
    """Texts and images that the model reads in place of `content`; empty without an image."""


@dataclass(frozen=True, slots=True)
class Done:
    """Return value by which a tool ends the episode (`environment_done`) after its reply.

    Example: ``return Done("You reached the exit.")``
    """

    content: Any


@dataclass(frozen=True, slots=True)
class TurnReward:
    """Return value by which a tool, or an environment's `user`, rewards the turn beside its reply.

    The reward function `turn_rewards` hands the values on to `algorithm.credit`. Example:
    ``TurnReward(0.2, "It opens.")``
    """

    value: float
    content: Any
    """The reply; a tool's may be a `Done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Outcome of a command on a machine."""

    code: int
    """Exit code; 128 + n if signal n ended it."""
    output: bytes
    """Standard output and error in the order written, without the middle if it was too long."""
    size: int
    """Bytes of the whole output."""
    timed_out: bool = False
    """The command was ended because its time was over; `code` is 137 then."""

    @property
    def text(self) -> str:
        """The output as text; invalid UTF-8 becomes U+FFFD."""
        return self.output.decode("utf-8", "replace")


class RolloutMachine(Protocol):
    """A rollout's own computer: a container, or a cloud back end's.

    Every method raises ToolUnavailable if the machine cannot do what it promises: it has ended, or
    its client fails. Faults of the command are in its result.
    """

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        max_bytes: int = 1 << 20,
        on_output: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command to its end, or kill it with its descendants after `timeout_s`.

        `env` is added to the image's variables. `user` and `cwd` None: those of the machine.
        `on_output` gets the output as it comes.
        """

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a file, or the contents of a folder, to the path `target`, made if missing."""

    async def copy_out(self, source: str, target: Path) -> bool:
        """Copy a file or folder to `target`; return False if there is none."""

    async def stop(self) -> None:
        """End it with everything in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Information about the calling rollout, for a tool that asks for it."""

    rollout_id: str
    task: Task
    turn: int
    """Turn of the call, from 0."""
    call_id: str
    tool: str = ""
    """Name under which the model called the tool. A row's own tool has another name than the
    function that runs it."""
    run_policy: Callable[..., Awaitable[Delegated]] | None = field(
        default=None, repr=False, compare=False
    )
    """Coroutine function that runs a sub-agent for `delegate`; None outside a rollout."""
    machine: RolloutMachine | None = field(default=None, repr=False, compare=False)
    """Container of the rollout, where tools run commands; None with runtime=bwrap."""

    async def delegate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[str] = (),
        role: str = "agent",
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> Delegated:
        """Run the policy on `messages` in a context of its own; what it samples is trained too.

        `tools` are names of tools of the run and of the row. `role` names the sub-agent in files
        and in the viewer, e.g. "helper"; it is no role of a message. `max_turns` and `max_tokens`
        (sampled and tool tokens) default to `rollout.max_turns` and
        `rollout.max_completion_tokens`, and may not exceed them. Raises ToolFailure if a limit on
        sub-agents ends it, ToolUnavailable if it fails.

        Example: ``(await context.delegate([message])).content``
        """
        if self.run_policy is None:
            needs = "it needs a rollout, and an `async def` tool without isolation"
            raise ToolUnavailable(f"tool {self.tool}: has no policy to delegate to; {needs}")
        return await self.run_policy(
            self, messages, tools=tools, role=role, max_turns=max_turns, max_tokens=max_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegated:
    """Outcome of a sub-agent, for the tool that asked for it."""

    content: str
    """Text of the sub-agent's last message; empty if the policy did not write that message."""
    stop_reason: StopReason
    messages: tuple[Message, ...]
    """The sub-agent's conversation, with its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """A call's request for a sub-agent, with the schemas of its tools."""

    caller: tuple[int, int]
    """(index of the trajectory, turn) of the call."""
    call_id: str
    schemas: tuple[Mapping[str, Any], ...]
    """Schemas of the sub-agent's tools."""
    max_turns: int
    """Limits of the sub-agent: its sampled completions, and its sampled and tool tokens."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of token ids of one origin."""

    origin: Origin
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Same length as token_ids; sampled spans only."""
    turn: int = 0
    """Turn that sampled the tokens, or the last one before them; 0 for the prompt."""
    policy_version: int | None = None
    """Step whose weights sampled these tokens, 0 for the initial ones; sampled spans only."""
    finish: Finish | None = None
    """On the last sampled span of a turn only."""
    images: tuple[PlacedImage, ...] = ()
    """Images whose placeholders are among its ids, at positions within the span."""
    routes: Routes | None = None
    """Experts by which its tokens were sampled, if they were recorded; sampled spans only."""

    def __post_init__(self) -> None:
        sampled = self.origin is Origin.sampled
        if sampled != (self.logprobs is not None) or sampled != (self.policy_version is not None):
            raise LedgerError(f"{self.origin} span: only sampled spans carry logprobs and versions")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            counts = f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs"
            raise LedgerError(f"sampled span of turn {self.turn}: {counts}")
        if self.routes is not None and (not sampled or self.routes.tokens != len(self.token_ids)):
            counts = f"{len(self.token_ids)} tokens, routes of {self.routes.tokens}"
            raise LedgerError(f"{self.origin} span of turn {self.turn}: {counts}")


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One append-only sequence of token ids that the model saw, as spans, with their messages.

    Only `append_sampled` and `append_context` add ids; all else about them is derived from the
    spans. A branch (`Rollout.branch`) begins with ids of its parent as context, and has spans, mask
    and logprobs of its own ids only, so that each sampled token is in one trajectory.

    [T]: all ids. [O]: its own ids, which are those without the context. [S]: the sampled ones.
    """

    rollout_id: str
    index: int = 0
    """Position among the trajectories of the rollout."""
    role: str = MAIN
    """`main`: the attempt at the task itself."""
    parent: tuple[int, int] | None = None
    """(index, position): the first tokens of that trajectory are the context; None: no context."""
    delegation: Delegation | None = None
    """Request for the sub-agent whose trajectory this is; None: the task's own agent."""
    schemas: tuple[Mapping[str, Any], ...] | None = None
    """Schemas of an outside agent's tools; None: the task's, or the delegation's."""
    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    """Number of messages, from the first on, that are in the prompt."""
    number: int | None = None
    """Its `index` when its turns were sampled, which is part of the ids of their calls
    (`turn_name`). `Rollout.keep_trajectories` sets it when it changes the index. None: it is
    `index`."""
    turns: int = 0
    """Sampled completions so far."""
    trainer_logprobs: array[float] | None = None
    """[S] The trainer's logprobs before its first update with the tokens; None: not computed."""
    entropies: array[float] | None = None
    """[S] Entropy, in nats, of the trainer's distribution at each token; None: not computed."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Turn -> the sum of what tools and environment returned as `TurnReward` in it."""
    states: list[str] = field(default_factory=list)
    """Digest of the environment's `state()` before each turn; empty if it has none."""
    advantages: array[float] | None = None
    """[S] Advantage of each sampled token, set by the trainer; None without a reward."""
    _ids: array[int] = field(default_factory=lambda: array("q"))
    """All ids: those of the context, then those of the spans."""
    images: tuple[PlacedImage, ...] = ()
    """Images of all ids, those of the context included, in order."""

    def append_sampled(self, completion: Completion, sent: Sequence[int]) -> None:
        """Append one completion as a turn, a span for each policy version that sampled it.

        `sent` are the ids that the engine was asked to continue. Raises LedgerError unless they are
        exactly this trajectory's ids so far, its ledger, and the completion's policy versions cover
        all of its tokens.
        """
        where = f"{self.name} turn {self.turns}"
        if (sent if isinstance(sent, array) else array("q", sent)) != self._ids:
            # The first difference, or the end of the shorter one.
            pairs = enumerate(zip(sent, self._ids, strict=False))
            shorter_length = min(len(sent), len(self._ids))
            position = next((i for i, (a, b) in pairs if a != b), shorter_length)
            raise LedgerError(
                f"{where}: the engine was sent {len(sent)} ids that differ from the "
                f"{len(self._ids)} ids of the ledger at position {position}: "
                f"sent {list(sent[position:][:4])}, ledger {list(self._ids[position:][:4])}"
            )
        sampled, start = completion.token_ids, 0
        total = sum(count for _, count in completion.versions)
        if total != len(sampled) or not sampled:
            counts = f"{len(sampled)} sampled tokens, but their policy versions cover {total}"
            raise LedgerError(f"{where}: {counts}")
        for index, (version, count) in enumerate(completion.versions):
            is_last = index == len(completion.versions) - 1
            # The last span takes all that is left: `Span` raises for more logprobs than ids.
            end = None if is_last else start + count
            ids, logprobs = sampled[start:end], completion.logprobs[start:end]
            finish = completion.finish if is_last else None
            routes = None if completion.routes is None else completion.routes.part(start, end)
            self.spans.append(
                Span(Origin.sampled, ids, logprobs, self.turns, version, finish, routes=routes)
            )
            self._ids.extend(ids)
            start += count
        self.turns += 1

    def append_context(
        self, token_ids: Sequence[int], origin: Origin, images: tuple[PlacedImage, ...] = ()
    ) -> None:
        """Append ids that the policy did not sample (mask 0), with the images in them.

        Does nothing without ids. The context after a turn has the number of that turn.
        """
        if origin is Origin.sampled:
            raise LedgerError(f"{self.name}: context cannot be of origin `sampled`")
        if not token_ids:
            return
        turn = max(self.turns - 1, 0)  # of the prompt, before any turn: 0
        self.spans.append(Span(origin, tuple(token_ids), turn=turn, images=images))
        self.images += shift_images(images, len(self._ids)) if images else ()
        self._ids.extend(self.spans[-1].token_ids)

    @property
    def name(self) -> str:
        """Name of the trajectory in errors: ``rollout train-3-0-1 trajectory 0``."""
        return f"rollout {self.rollout_id} trajectory {self.index}"

    def turn_name(self, turn: int) -> str:
        """Return a turn's part of its calls' ids: ``call_3_0``, ``call_2.3_0`` in trajectory 2."""
        number = self.index if self.number is None else self.number
        return f"{number}.{turn}" if number else str(turn)

    @property
    def added_messages(self) -> list[Message]:
        """The messages after the prompt: the policy's, tool replies and later user turns."""
        return self.messages[self.prompt_messages :]

    @property
    def token_ids(self) -> array[int]:
        """[T] A copy of all ids, in order, those of the context included."""
        return self._ids[:]

    @property
    def context_length(self) -> int:
        """Number of the parent's tokens before this trajectory's own; 0 without a parent."""
        return 0 if self.parent is None else self.parent[1]

    def context(self, earlier: Sequence[Trajectory]) -> array[int]:
        """Return the ids before this trajectory's own: the first `position` ids of its parent.

        Empty without a parent. `earlier` are the trajectories that the rollout began before this
        one. Raises LedgerError for a parent or a position that they do not have.
        """
        if self.parent is None:
            return array("q")
        parent, position = self.parent
        if not 0 <= parent < len(earlier) or not 0 < position <= earlier[parent].length:
            lengths = [trajectory.length for trajectory in earlier]
            problem = f"the trajectories before it have {lengths} tokens"
            raise LedgerError(f"{self.name}: parent=({parent}, {position}), but {problem}")
        return earlier[parent].token_ids[:position]

    def _detach_from_parent(self) -> None:
        """Make the context, which are ids of the parent, the beginning of a prompt of its own."""
        prompt, spans = tuple(self._ids[: self.context_length]), self.spans
        if spans and spans[0].origin is Origin.prompt:  # one prompt span, not two
            prompt, spans = prompt + spans[0].token_ids, spans[1:]
        self.spans = [Span(Origin.prompt, prompt), *spans]
        self.parent = None

    @property
    def own_ids(self) -> array[int]:
        """[O] A copy of the ids of its own spans, which follow the context."""
        return self._ids[self.context_length :]

    @property
    def loss_mask(self) -> list[int]:
        """[O] 1 where the policy sampled the token, else 0."""
        return [int(span.origin is Origin.sampled) for span in self.spans for _ in span.token_ids]

    @property
    def rollout_logprobs(self) -> list[float]:
        """[O] The engine's logprobs on sampled tokens, 0.0 elsewhere."""
        return [p for span in self.spans for p in span.logprobs or (0.0,) * len(span.token_ids)]

    @property
    def prompt_length(self) -> int:
        """Number of own prompt tokens."""
        return sum(len(s.token_ids) for s in self.spans if s.origin is Origin.prompt)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens."""
        return sum(len(s.token_ids) for s in self.sampled_spans())

    @property
    def length(self) -> int:
        """Number of all tokens, those of the context included."""
        return len(self._ids)

    def sampled_spans(self) -> Iterator[Span]:
        """Yield the sampled spans in order."""
        return (span for span in self.spans if span.origin is Origin.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedConversation:
    """A conversation of an outside agent that is no part of its rollout.

    Example: the agent asks a model for a title of its chat. The policy as it is has answered it.
    """

    model: str | None
    """Name by which the agent asked for a model."""
    frozen: bool
    """True: the agent asked for a model that `agent.models` declares as `frozen`, whose answers are
    never trained. False: `agent.train` chose other conversations of the rollout to train."""
    turns: int
    sampled_length: int
    """Tokens sampled."""
    messages: tuple[Message, ...]


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One complete attempt at a Task: its trajectories, why it stopped, and its rewards.

    Token ids, spans and messages are in the trajectories. Lengths and turns of a rollout are sums
    over all of them.
    """

    task: Task
    rollout_id: str
    group_id: str = ""
    """Id that all rollouts of the task in this step share."""
    sample: int = 0
    """Position in the group, 0 … G-1."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """At least one; a rollout made without any gets an empty `main` one."""
    tool_results: list[ToolResult] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    """The failure if `stop_reason` is `error`, or why a reward gave no score."""
    grades: dict[str, float] = field(default_factory=dict)
    """Rewards of the task's own tests, by name; empty if it has none or they could not be run."""
    environment_reward: float | None = None
    """Value of the environment's `reward`, perhaps NaN; None if there is none."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Value of each reward function; None: it does not apply."""
    turn_scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Values by turn, through all trajectories, of each reward function that gave one for each."""
    reward: float | None = None
    """Weighted sum of `rewards`; None: no reward function applies, or one could not score."""
    seconds: float = 0.0
    """Wall time of the rollout."""
    counts: dict[str, int] = field(default_factory=dict)
    """Metric -> events in the rollout, e.g. ``agent/restarts/system``, of an outside agent."""
    untrained: tuple[UntrainedConversation, ...] = ()
    """Conversations of an outside agent that were answered and are not trained."""

    def __post_init__(self) -> None:
        self.trajectories = self.trajectories or [Trajectory(rollout_id=self.rollout_id)]

    @property
    def turns(self) -> int:
        """Sampled completions so far."""
        return sum(trajectory.turns for trajectory in self.trajectories)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens; length metrics and loss normalisers count these."""
        return sum(trajectory.sampled_length for trajectory in self.trajectories)

    @property
    def length(self) -> int:
        """Number of all tokens; those that a trajectory shares with its parent count once."""
        return sum(t.length - t.context_length for t in self.trajectories)

    def branch(
        self, parent: int, position: int, *, role: str = MAIN, delegation: Delegation | None = None
    ) -> Trajectory:
        """Add a trajectory whose context is the first `position` tokens of trajectory `parent`.

        Example: with the ids ``7 8 9 20 2``, ``branch(0, 3, role="summary")`` continues ``7 8 9``.
        """
        branched = self.begin(role=role, delegation=delegation)
        earlier = self.trajectories[:-1]  # the last is `branched`
        branched.parent = (parent, position)
        branched._ids = branched.context(earlier)
        parent_images = self.trajectories[parent].images
        branched.images = tuple(image for image in parent_images if image.end <= position)
        return branched

    def begin(self, *, role: str, delegation: Delegation | None) -> Trajectory:
        """Add an empty trajectory, which shares no tokens with the others, and return it."""
        trajectory = Trajectory(rollout_id=self.rollout_id, role=role, delegation=delegation)
        trajectory.index = len(self.trajectories)
        self.trajectories.append(trajectory)
        return trajectory

    def keep_trajectories(self, indices: Collection[int]) -> None:
        """Remove all trajectories but these, so that the others' tokens are not trained.

        Indices are counted anew. If a kept trajectory is a branch of a removed one, the ids that it
        shares with it, until then context, become part of its own prompt: `_ids` stays as it is.
        """
        kept = [trajectory for trajectory in self.trajectories if trajectory.index in indices]
        new_indices = {trajectory.index: index for index, trajectory in enumerate(kept)}
        for trajectory in kept:
            if trajectory.parent is None:
                continue
            parent_index, context_length = trajectory.parent
            if parent_index in new_indices:
                trajectory.parent = (new_indices[parent_index], context_length)
            else:
                trajectory._detach_from_parent()
        for index, trajectory in enumerate(kept):
            # The ids of its calls have the index that it had when they were made: keep that one.
            if trajectory.number is None and trajectory.index != index:
                trajectory.number = trajectory.index
            trajectory.index = index
        self.trajectories = kept

    @property
    def truncated(self) -> bool:
        """True if a token limit ended the rollout, judged by its stop reason."""
        limits = (StopReason.max_tokens, StopReason.context_full, StopReason.max_delegated_tokens)
        return self.stop_reason in limits
