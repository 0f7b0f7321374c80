"""The nouns of agenttrain: Task, Span, Trajectory, Rollout and what they are made of.

Everything else imports from here and this file imports nothing of ours. A trajectory of two turns::

    prompt    <|im_start|>user … <|im_start|>assistant\\n     mask 0  (rendered once)
    sampled   <tool_call>…</tool_call><|im_end|>              mask 1  (its own ids and logprobs)
    template  \\n<|im_start|>user\\n<tool_response>\\n          mask 0  (glue)
    tool      3                                               mask 0  (a tool's text)
    template  \\n</tool_response><|im_end|>\\n<|im_start|>…     mask 0
    sampled   3<|im_end|>                                     mask 1
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message: role, content, and where they apply reasoning_content, tool_calls,
tool_call_id, name."""

MAIN = "main"
"""Role of the trajectory that attempts the task itself."""


class Origin(StrEnum):
    """Where a span's tokens come from."""

    prompt = "prompt"
    """The rendered prompt."""
    sampled = "sampled"
    """Sampled by the policy: the only tokens that are trained."""
    template = "template"
    """Glue that the chat template adds between turns."""
    tool = "tool"
    """Text from outside after the prompt: tool results, and later user turns."""


class Finish(StrEnum):
    """Why the engine stopped sampling a completion."""

    stop = "stop"
    """The last token is one of the stop tokens."""
    length = "length"
    """The budget asked for was used up."""
    abort = "abort"
    """The request was aborted; the tokens so far are valid."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    completed = "completed"
    """The model answered without calling a tool, and the user has nothing more to say."""
    stop_tool = "stop_tool"
    """The model called a stop tool."""
    environment_done = "environment_done"
    """The environment declared the episode over."""
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
    """The same call with the same arguments too often in a row."""
    timeout = "timeout"
    """The rollout's wall-clock limit passed."""
    aborted = "aborted"
    """The engine aborted the request."""
    error = "error"
    """The rollout failed; `Rollout.error` says how."""


class AgenttrainError(Exception):
    """Base of the errors that agenttrain raises on purpose."""


class ConfigError(AgenttrainError, ValueError):
    """A configuration that cannot run; its text says key, value and remedy."""


class LedgerError(AgenttrainError):
    """The tokens, mask, logprobs and messages of a trajectory disagree.

    The message names the rollout, the trajectory, the turn and the token position, with both
    decodings where two texts differ.
    """


class PromptTooLong(AgenttrainError):
    """A prompt leaves no room for one sampled token (counted as ``data/overlong``)."""


class ToolFailure(AgenttrainError):
    """Raise it in a tool: the model reads ``Error: <message>`` and the call counts as failed."""


class ToolUnavailable(AgenttrainError):
    """A broken tool (its server, its sandbox failed), which is not the model's fault.

    A tool raises it instead of answering: the rollout ends as `error` and is never scored.
    """


class NotFinite(AgenttrainError):
    """A number that training depends on is NaN or infinite; no weight was updated with it."""

    def __init__(self, message: str, *, stage: str, culprits: Sequence[str] = ()) -> None:
        """`stage` is `weights`, `logprobs` (the engine's) or `update`.

        `culprits` are ids of rollouts; for `weights` names of parameters.
        """
        super().__init__(message)
        self.stage = stage
        self.culprits = tuple(culprits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTool:
    """A tool that a row brings: the model sees this schema, a tool of the run does the work.

    Example: ``RowTool(name="lookup_city", description="Find a city.", parameters={"type":
    "object", "properties": {"name": {"type": "string"}}}, executor="lookup")``
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    executor: str
    """Name of the tool of the run that is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row: what the model is asked, and what rewards and tools may read.

    Example: ``Task(task_id="shop-17", messages=({"role": "user", "content": "…"},),
    columns={"answer": "Oslo", "database_seed": 3})``
    """

    task_id: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str | RowTool, ...] | None = None
    """The tools this task may use: names of the run's and its environment's, and its own; None:
    all of the run's and its environment's."""
    user_turns: tuple[str, ...] = ()
    """The user's next messages, one each time the model answers without calling a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled. The defaults sample from the policy itself."""

    max_tokens: int = 0
    """Most tokens that the engine may sample; the loop sets it for every turn."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with (and includes) the first of these."""
    seed: int = 0
    """Alone decides the sampling noise of this request, whatever shares its batch."""
    grammar: str | None = None
    """A structural tag, as JSON, that the completion follows: each token is sampled from those that
    it allows. An engine that samples honours it or refuses the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled for one request.

    Example: ``Completion(token_ids=(41, 2), logprobs=(-0.1, -0.3), finish=Finish.stop,
    versions=((7, 2),))`` has both tokens sampled under policy version 7.
    """

    token_ids: tuple[int, ...]
    """[T], the stop token included."""
    logprobs: tuple[float, ...]
    """[T], natural log, of the distribution sampled from (after temperature and filters)."""
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    """(policy_version, number of tokens) in order; the numbers add up to T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as parsed from a completion; malformed ones are calls too, with `malformed` set."""

    id: str
    name: str
    """Empty when a malformed call has none."""
    arguments: dict[str, Any]
    malformed: str | None = None
    """The fault of the call's text, which the model reads; None for a well-formed call."""
    text: str = ""
    """The text of the call as the model wrote it."""
    lenient: bool = False
    """It was read only because `response_schema.lenient` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """A parsed completion: content, reasoning, and calls in the order they were written."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]

    def message(self) -> Message:
        """The turn as a chat message; a malformed call stands in it with its raw text."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call_message(call) for call in self.calls]
        return message


def _call_message(call: ToolCall) -> dict[str, Any]:
    function: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
    if call.malformed is not None:
        function["malformed"] = call.malformed
        function["text"] = call.text
    return {"id": call.id, "type": "function", "function": function}


class ToolError(StrEnum):
    """Why a tool call has an error result."""

    malformed = "malformed"
    """The call's text could not be parsed."""
    unknown_tool = "unknown_tool"
    """No such tool in this task's toolbox."""
    invalid_arguments = "invalid_arguments"
    """The arguments do not fit the tool's schema."""
    exception = "exception"
    """The tool raised."""
    timeout = "timeout"
    """The tool took longer than its limit."""
    limit = "limit"
    """A limit on calls forbids this one."""
    parallel = "parallel"
    """The chat template renders one call per turn, and this was not the first."""
    unavailable = "unavailable"
    """The tool is broken, after all retries; ends the rollout as `error`."""

    @property
    def invalid_call(self) -> bool:
        """True if the call itself was wrong, so that no tool ran: counts in max_invalid_calls."""
        return self in (ToolError.malformed, ToolError.unknown_tool, ToolError.invalid_arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The reply to one call; always one per call, in call order."""

    call: ToolCall
    content: str
    """Text that the model reads: the tool's, or the error's."""
    error: ToolError | None = None
    seconds: float = 0.0
    """Wall time of the call."""
    done: bool = False
    """The tool declared the episode over (it returned `Done`)."""
    stop: bool = False
    """It was a call to a stop tool, by its name: the rollout ends, whatever `error` says."""
    executor: str | None = None
    """The tool of the run that a row's own tool was run by; None: the call names the tool."""


@dataclass(frozen=True, slots=True)
class Done:
    """Return value with which a tool ends the episode (`environment_done`) after this reply.

    Example: ``return Done("You reached the exit.")``
    """

    content: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Facts about the calling rollout that a tool may know."""

    rollout_id: str
    task: Task
    turn: int
    call_id: str
    tool: str = ""
    """The name that the model called: a row's own tool is run by one of another name."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of token ids of one origin.

    Example: ``Span(Origin.sampled, (41, 2), (-0.1, -0.3), turn=0, policy_version=7,
    finish=Finish.stop)``
    """

    origin: Origin
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Same length as token_ids; sampled spans only."""
    turn: int = 0
    policy_version: int | None = None
    """Number of weight updates the engine held; sampled spans only."""
    finish: Finish | None = None
    """On the last sampled span of a turn only."""

    def __post_init__(self) -> None:
        sampled = self.origin is Origin.sampled
        if sampled != (self.logprobs is not None) or sampled != (self.policy_version is not None):
            raise LedgerError(f"{self.origin} span: only sampled spans carry logprobs and versions")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise LedgerError(
                f"sampled span of turn {self.turn}: {len(self.token_ids)} tokens, "
                f"{len(self.logprobs)} logprobs"
            )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One append-only sequence of token ids that the model saw: its spans, and their messages.

    Grows only through `append_sampled` and `append_context`. ``token_ids``, ``loss_mask``,
    ``rollout_logprobs`` and ``prompt_length`` are derived from the spans, so they cannot disagree.
    Example::

        trajectory.append_context([7, 8, 9], Origin.prompt)
        sent = trajectory.token_ids
        trajectory.append_sampled(await engine.generate(sent, sampling, session="r-0"), sent)
    """

    rollout_id: str
    """Names the trajectory in errors, together with `index`."""
    index: int = 0
    """Position among the trajectories of the rollout."""
    role: str = MAIN
    """Purpose of the trajectory: `main` for the attempt at the task itself."""
    parent: tuple[int, int] | None = None
    """(index, position) of the trajectory that this one branches from; None: it has a prompt of its
    own."""
    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    """Number of messages, from the first, that the prompt renders."""
    turns: int = 0
    """Sampled completions so far."""
    trainer_logprobs: array[float] | None = None
    """[S] The trainer's logprobs of the sampled tokens, before its first update with them; None:
    the trajectory was not trained on, and nothing else asked for them."""
    entropies: array[float] | None = None
    """[S] In nats, of the trainer's distribution that each of these tokens stands for; likewise."""
    _ids: array[int] = field(default_factory=lambda: array("q"))

    def append_sampled(self, completion: Completion, sent: Sequence[int]) -> None:
        """Append one completion; `sent` is what the engine was given to continue.

        Raises LedgerError when `sent` is not exactly the concatenation of the spans so far, or when
        the completion's own parts disagree.
        """
        if (sent if isinstance(sent, array) else array("q", sent)) != self._ids:
            raise LedgerError(_sent_difference(self, sent))
        total = sum(count for _, count in completion.versions)
        if total != len(completion.token_ids) or not completion.token_ids:
            raise LedgerError(
                f"{self.name} turn {self.turns}: {len(completion.token_ids)} sampled tokens, but "
                f"their policy versions cover {total}"
            )
        start = 0
        for index, (version, count) in enumerate(completion.versions):
            last = index == len(completion.versions) - 1
            self._append(
                Span(
                    Origin.sampled,
                    completion.token_ids[start : start + count],
                    completion.logprobs[start : start + count if not last else None],
                    self.turns,
                    version,
                    completion.finish if last else None,
                )
            )
            start += count
        self.turns += 1

    def append_context(self, token_ids: Sequence[int], origin: Origin) -> None:
        """Append ids that the policy did not sample (mask 0); nothing for an empty sequence."""
        if origin is Origin.sampled:
            raise LedgerError(f"{self.name}: context cannot be of origin `sampled`")
        if token_ids:
            self._append(Span(origin, tuple(token_ids), turn=max(self.turns - 1, 0)))

    def _append(self, span: Span) -> None:
        self.spans.append(span)
        self._ids.extend(span.token_ids)

    @property
    def name(self) -> str:
        """The trajectory in an error's text, e.g. ``rollout train-3-0-1 trajectory 0``."""
        return f"rollout {self.rollout_id} trajectory {self.index}"

    @property
    def added_messages(self) -> list[Message]:
        """The messages after the prompt's: the policy's, tool replies and later user turns."""
        return self.messages[self.prompt_messages :]

    @property
    def token_ids(self) -> array[int]:
        """[T] A copy of all ids, in order."""
        return self._ids[:]

    @property
    def loss_mask(self) -> list[int]:
        """[T] 1 exactly where the policy sampled the token."""
        return [int(span.origin is Origin.sampled) for span in self.spans for _ in span.token_ids]

    @property
    def rollout_logprobs(self) -> list[float]:
        """[T] The engine's logprobs on sampled tokens, 0.0 elsewhere."""
        return [p for span in self.spans for p in span.logprobs or (0.0,) * len(span.token_ids)]

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return sum(len(s.token_ids) for s in self.spans if s.origin is Origin.prompt)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens."""
        return sum(len(s.token_ids) for s in self.sampled_spans())

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return len(self._ids)

    def sampled_spans(self) -> Iterator[Span]:
        """The sampled spans, in order."""
        return (span for span in self.spans if span.origin is Origin.sampled)


def _sent_difference(trajectory: Trajectory, sent: Sequence[int]) -> str:
    ledger = trajectory.token_ids
    position = next(
        (i for i, (a, b) in enumerate(zip(sent, ledger, strict=False)) if a != b),
        min(len(sent), len(ledger)),
    )
    return (
        f"{trajectory.name} turn {trajectory.turns}: the engine was sent {len(sent)} ids "
        f"that differ from the {len(ledger)} ids of the ledger at position {position}: "
        f"sent {list(sent[position:][:4])}, ledger {list(ledger[position:][:4])}"
    )


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One complete attempt at a Task: its trajectories, why it stopped, and its rewards.

    Token ids, spans and messages are those of the trajectories. Lengths and turns of a rollout
    count all its trajectories together.
    """

    task: Task
    rollout_id: str
    group_id: str = ""
    sample: int = 0
    """Position in the group, 0 … G-1."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """At least one: a rollout made without any gets an empty `main` one."""
    tool_results: list[ToolResult] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    """The failure, when stop_reason is `error`; or why a reward function could not score it."""
    environment_reward: float | None = None
    """Value of the environment's `reward`, perhaps NaN; None: not applicable, or it has none."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By reward function; None: not applicable."""
    reward: float | None = None
    """The rubric's weighted sum; None: no reward function applies."""
    advantage: float | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.trajectories:
            self.trajectories = [Trajectory(rollout_id=self.rollout_id)]

    @property
    def turns(self) -> int:
        """Sampled completions so far."""
        return sum(trajectory.turns for trajectory in self.trajectories)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens: what length metrics and loss normalisers count."""
        return sum(trajectory.sampled_length for trajectory in self.trajectories)

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return sum(trajectory.length for trajectory in self.trajectories)

    @property
    def truncated(self) -> bool:
        """True if a token limit cut the rollout, by stop reason and not by its last token."""
        return self.stop_reason in (StopReason.max_tokens, StopReason.context_full)
