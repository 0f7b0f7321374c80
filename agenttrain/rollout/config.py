"""Settings of rollouts and of evaluation, the tasks of a round, and the request for a rollout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.engines.config import Sampling
from agenttrain.types import Rollout, Task
from agenttrain.utils.data_fields import Data, DataWhere
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems


class OnBreak(StrEnum):
    """Consequence of a broken ledger invariant."""

    error = "error"
    """Stop the run."""
    drop = "drop"
    """Drop the rollout's group, count it (`rollout/dropped`) and continue."""


class OnMalformedCall(StrEnum):
    """Consequence of a call that cannot be parsed."""

    reply = "reply"
    """The model reads what was wrong."""
    stop = "stop"
    """The rollout ends (`max_invalid_calls`)."""
    ignore = "ignore"
    """The call counts as not written."""


class OnParallelCalls(StrEnum):
    """Consequence of several calls in a turn where the chat template renders only one."""

    error_reply = "error_reply"
    """The first is run; the reply to it says so of the others."""
    stop = "stop"
    """The rollout ends (`max_tool_calls`)."""


class OnToolFailure(StrEnum):
    """Consequence of a fault of a tool's infrastructure, once it has been retried in vain."""

    drop = "drop"
    """The rollout ends as `error`, is not scored and counted (`rollout/dropped`)."""
    error = "error"
    """Stop the run."""


class RolloutPlace(StrEnum):
    """Process in which rollouts are made: tools, environments, rewards and their event loop."""

    auto = "auto"
    """own with engine=vllm_server, whose GPUs are not the trainer's, and with asynchronous
    training, which samples while the trainer updates; else same."""
    own = "own"
    """One process of its own for the whole run, beside the trainer's. The engine, or the client of
    its servers, is in it too."""
    same = "same"
    """Each training process makes its share."""


NO_COMPACTION = "none"
COMPACTIONS = {
    "summary": "agenttrain.rollout.compaction.Summary",
    "drop_tool_results": "agenttrain.rollout.compaction.DropToolResults",
}
"""Values of `rollout.compaction`; another one is the dotted path of a class."""


def _is_bundled_compaction(name: object) -> bool:
    return name in (NO_COMPACTION, *COMPACTIONS)


@dataclass(config=SETTINGS)
class RolloutConfig:
    """Limits and behaviour of a rollout."""

    max_turns: Whole = Field(default=8, ge=1)
    """Sampled completions."""
    max_turn_tokens: Whole = Field(default=512, ge=1)
    """Sampled tokens of one turn."""
    max_completion_tokens: Whole = Field(default=2048, ge=1)
    """Sampled and tool tokens after the prompt."""
    max_result_tokens: Whole = Field(default=512, ge=1)
    """Tokens of one tool result; a longer one is clipped with a visible marker."""
    max_tool_calls: Whole | None = Field(default=None, ge=1)
    """Calls of a rollout; None: no limit."""
    max_invalid_calls: Whole | None = Field(default=None, ge=1)
    """Malformed, unknown or badly typed calls of a rollout; None: no limit."""
    max_repeated_calls: Whole | None = Field(default=None, ge=1)
    """Times in a row the same call with the same arguments may be made; None: no limit."""
    max_delegation_depth: Whole = Field(default=1, ge=0)
    """Sub-agents that may wait for one another; 0: tools may not delegate."""
    max_delegated_tokens: Whole | None = Field(default=None, ge=1)
    """Tokens of all sub-agents of a rollout, their prompts included; None: no limit."""
    timeout_s: Number | None = Field(default=None, gt=0)
    """Wall-clock seconds of one rollout; None: no limit."""
    max_stuck_calls: Whole = Field(default=32, ge=0)
    """Calls of blocking tools that still run past their time limit; more stop the run."""
    max_loop_lag_s: Number = Field(default=1.0, gt=0)
    """Seconds the event loop may stand still before a warning names the tool that holds it."""
    concurrency: Whole = Field(default=512, ge=1)
    """Rollouts in flight; no effect with engine=transformers and rollout.deterministic."""
    process: Data[RolloutPlace] = RolloutPlace.auto
    """Process that makes rollouts: same: the trainer's; own: another one, which shares no
    interpreter lock with it; auto: own with engine=vllm_server, and with
    async_training.max_staleness above 0."""
    deterministic: Data[bool | None] = None
    """The same batch at every decode step, so that a run repeats; None: where the engine can
    (transformers), unless rollouts are made ahead of the update."""
    temperature: Number = Field(default=1.0, gt=0)
    """Temperature of sampling, while training."""
    structured_calls: Data[bool] = False
    """A call that the model opens can only become one that fits its tool's schema: a grammar rules
    the other tokens out. Needs engine=vllm, and for training algorithm.correction. An outside agent
    may then demand calls and JSON."""
    compaction: Annotated[str, DataWhere(_is_bundled_compaction)] = NO_COMPACTION
    """What takes the place of a context of more than compact_at tokens: none; summary: the task,
    the policy's own summary, which is sampled and trained, and the last turns; drop_tool_results:
    all turns with a marker for older replies; or a class of yours: my_pkg.MyCompaction."""
    compact_at: Whole | None = Field(default=None, ge=1)
    """Tokens of context, prompt included, past which it is replaced before the next turn."""
    summary_tokens: Whole = Field(default=256, ge=1)
    """Sampled tokens of a summary."""
    keep_turns: Whole = Field(default=1, ge=0)
    """Last turns that a compaction leaves as they are."""
    on_break: Data[OnBreak] = OnBreak.error
    """Consequence of a broken invariant of the token ledger."""
    on_tool_failure: Data[OnToolFailure] = OnToolFailure.drop
    """Consequence of a fault of a tool's infrastructure, after its retries."""
    on_malformed_call: Data[OnMalformedCall] = OnMalformedCall.reply
    """Consequence of a call that cannot be parsed."""
    on_parallel_calls: Data[OnParallelCalls] = OnParallelCalls.error_reply
    """Consequence of several calls in a turn, only where the chat template renders one call per
    turn (`agenttrain templates` says so)."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        """Check the keys of compaction against each other."""
        compaction, problems = self.compaction, []
        if compaction != NO_COMPACTION and self.compact_at is None:
            problems.append(
                f"rollout.compaction={compaction}: set rollout.compact_at=…, the tokens of context "
                "past which it acts"
            )
        if compaction == NO_COMPACTION and self.compact_at is not None:
            problems.append(
                f"rollout.compact_at={self.compact_at}: has no effect with "
                f"rollout.compaction=none; set rollout.compaction={' or '.join(COMPACTIONS)}, or "
                "leave it out"
            )
        if compaction not in (NO_COMPACTION, *COMPACTIONS) and "." not in compaction:
            problems.append(
                f"rollout.compaction={compaction}: is unknown"
                f"{did_you_mean(compaction, (NO_COMPACTION, *COMPACTIONS))}; expected "
                f"{', '.join((NO_COMPACTION, *COMPACTIONS))}, or the dotted path of a class"
            )
        raise_problems(problems)
        return self


@dataclass(config=SETTINGS)
class EvalConfig:
    """Evaluation on the test rows."""

    every: Whole | None = Field(default=None, ge=1)
    """Steps between evaluations while training; None: before and after only."""
    questions: Whole = Field(default=200, ge=0)
    """Rows of one evaluation; 0: no evaluation."""
    samples: Whole = Field(default=1, ge=1)
    """Sampled rollouts per row (k of pass@k)."""
    greedy: Data[bool] = True
    """Also evaluate at temperature 0."""
    group_by: Data[str | None] = None
    """Column by whose values the reward is broken down, e.g. `family`."""
    tools: Data[list[str] | None] = None
    """Those of the run's tools that evaluated rollouts have, e.g. [search]; None: all."""
    max_turns: Whole | None = Field(default=None, ge=1)
    """None: as rollout.max_turns."""
    max_turn_tokens: Whole | None = Field(default=None, ge=1)
    """None: as rollout.max_turn_tokens."""
    max_completion_tokens: Whole | None = Field(default=None, ge=1)
    """None: as rollout.max_completion_tokens."""
    temperature: Number = Field(default=1.0, ge=0)
    """0: greedy."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """Share of the probability that is sampled from."""
    top_k: Whole = Field(default=0, ge=0)
    """Tokens that are sampled from; 0: all."""
    min_p: Number = Field(default=0.0, ge=0, le=1)
    """Least probability, as a share of the likeliest token's."""

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        """Check that samples can differ, and that evaluated rollouts keep a tool."""
        problems = []
        if self.temperature == 0 and self.samples > 1:
            problems.append(
                f"eval.samples={self.samples}: at eval.temperature=0 all samples are the same; "
                "set eval.samples=1 or raise the temperature"
            )
        if self.tools == []:
            problems.append("eval.tools=[]: evaluated rollouts need a tool; null: all of the run's")
        raise_problems(problems)
        return self

    def sampling(self, seed: int = 0) -> Sampling:
        """Return the settings of completions for evaluation, `play` and `serve`.

        Greedy evaluation has others. The rollout loop sets the tokens of each turn.
        """
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            # The experts of a mixture-of-experts model are recorded only for training.
            routes=False,
        )


def tasks_of_round(missing: int, oversample: float) -> int:
    """Return the number of tasks that are sampled for `missing` groups.

    Example: 10 missing groups and oversample 1.1 take 11 tasks.
    """
    # 10 * 1.1 is a little above 11 in floats.
    return math.ceil(round(missing * oversample, 6))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Request for one rollout: its task, its ids and its seeds."""

    task: Task
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    """Sampling of every turn. `seed` is the rollout's; the loop derives each turn's from it and
    sets `max_tokens`."""
    rollout_id: str = "rollout"
    """Unique among the rollouts in flight: engines and tools file a rollout's state under it."""
    group_id: str = ""
    """Id that all rollouts of the task in this step share."""
    place: int = 0
    """Position of its task among those of the step."""
    sample: int = 0
    """Position in the group, 0 … G-1."""
    group_seed: int = 0
    """Seed for the environment, the same in all rollouts of a group."""
    prompt_ids: Sequence[int] | None = None
    """The rendered prompt, if the rollouts of the group share it; None: the loop renders it."""

    def new_rollout(self) -> Rollout:
        """Return the rollout before its first turn."""
        return Rollout(
            task=self.task,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            sample=self.sample,
        )
