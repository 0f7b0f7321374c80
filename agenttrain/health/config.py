"""Settings of the guards, of `stop_when` and of the watchdog.

Guards act on signs of a run that goes wrong, `stop_when` ends one that has learned enough, and the
watchdog ends one with evidence after so many seconds without progress.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems


class OnTrip(StrEnum):
    """Action of a guard."""

    warn = "warn"
    """Warn, once until the figure is within its limit again."""
    stop = "stop"
    """Stop the run after the step, whose metrics and rollouts are on disk."""


@dataclass(config=SETTINGS)
class Guard:
    """A figure of metrics.jsonl and how far it may go."""

    limit: Number | None = Field(default=None, gt=0)
    """None: not watched."""
    action: Data[OnTrip] = OnTrip.warn
    """`warn`, or `stop` after the step."""


@dataclass(config=SETTINGS)
class Streak:
    """Steps in a row that may teach nothing."""

    limit: Whole | None = Field(default=20, ge=1)
    """Steps; None: not watched."""
    action: Data[OnTrip] = OnTrip.warn
    """`warn`, or `stop` after the step."""


@dataclass(config=SETTINGS)
class ToolFailures:
    """Calls of one tool that may fail, by an error of the tool's or for arguments it refuses."""

    limit: Number | None = Field(default=0.9, gt=0, le=1)
    """Share of the calls; None: not watched."""
    calls: Whole = Field(default=32, ge=1)
    """Calls that are judged together, at least; a tool with fewer in a step is judged later."""
    action: Data[OnTrip] = OnTrip.warn
    """`warn`, or `stop` after the step."""


@dataclass(config=SETTINGS)
class RewardHacking:
    """Signs that a reward rises for another reason than a better policy.

    They are: empty answers, one answer for many tasks, answers copied from a tool's text, a new
    stop reason, lengths out of their range, and a held-out reward that falls.
    """

    # The held-out reward is no share: for it `limit` only says if it is watched. It has to fall by
    # a multiple of its standard error (`ERRORS` in reward_hacking.py).
    limit: Number | None = Field(default=0.2, gt=0, le=1)
    """Rise of the share of rollouts with a sign, while the reward rises; None: not watched."""
    # Both means are over this many steps: with 3, the latest 3 steps are compared with the 3 steps
    # in a row in which the share was lowest.
    window: Whole = Field(default=3, ge=2)
    """Steps whose means are compared: the latest, and those in which the sign was rarest."""
    action: Data[OnTrip] = OnTrip.warn
    """`warn`, or `stop` after the step."""


@dataclass(config=SETTINGS)
class GuardsConfig:
    """Figures watched after every step. Values that are not finite always stop the run."""

    logprob_gap: Guard = field(default_factory=lambda: Guard(limit=1.0))
    """Most that `sampling/logprob_gap_max` may be: one token's distance between the engine's and
    the trainer's logprobs, before the step's first update. 1.0 is a probability off by e. With
    `async_training.max_staleness` it is `sampling/logprob_gap_fresh_max`: older tokens differ."""
    kl: Guard = field(default_factory=Guard)
    """Most that `kl` to the reference may be; needs algorithm.kl."""
    entropy: Guard = field(default_factory=Guard)
    """Least that `entropy` of the sampled tokens may be, in nats."""
    no_variance: Streak = field(default_factory=Streak)
    """Steps in a row in which no rollout had an advantage: all rewards of each group were equal."""
    tool_failures: ToolFailures = field(default_factory=ToolFailures)
    """Least share of failed calls at which a tool is named. Evaluations are watched too, and never
    stopped."""
    reward_hacking: RewardHacking = field(default_factory=RewardHacking)
    """Rollouts that earn the reward without the work. The alarm names three of them."""

    @model_validator(mode="after")
    def _check(self) -> GuardsConfig:
        """Refuse action=stop for a guard that has no limit."""
        raise_problems(
            f"guards.{name}.action=stop: needs a limit; set guards.{name}.limit=…"
            for name, guard in (
                ("kl", self.kl),
                ("entropy", self.entropy),
                ("reward_hacking", self.reward_hacking),
            )
            if guard.limit is None and guard.action is OnTrip.stop
        )
        return self


@dataclass(config=SETTINGS)
class StopWhenConfig:
    """End the run before its last step, once a metric's moving mean has passed a value.

    The run then evaluates and saves as after its last step. `summary.json` has the mean as
    `stopped_when`.
    """

    metric: Data[str] = "reward"
    """A name in metrics.jsonl. Steps in which nothing was measured do not count."""
    above: Number | None = None
    """End when the mean is above this; None: no such end."""
    below: Number | None = None
    """End when the mean is below this; None: no such end."""
    patience: Whole = Field(default=5, ge=1)
    """Steps of the mean: the latest ones."""

    @property
    def enabled(self) -> bool:
        """Return True if the run can end before its last step."""
        return self.above is not None or self.below is not None

    def passed(self, mean: float) -> bool:
        """Return True if `mean` is beyond the value."""
        return (self.above is not None and mean > self.above) or (
            self.below is not None and mean < self.below
        )

    def __str__(self) -> str:
        """Return the end as text, e.g. "mean reward of 5 steps above 0.93"."""
        bound = f"below {self.below:g}" if self.above is None else f"above {self.above:g}"
        return f"mean {self.metric} of {self.patience} steps {bound}"

    @model_validator(mode="after")
    def _check(self) -> StopWhenConfig:
        if self.above is not None and self.below is not None:
            problem = f"stop_when.below={self.below:g}: stop_when.above={self.above:g} is set too"
            raise_problems([f"{problem}; set one of them to null"])
        return self


@dataclass(config=SETTINGS)
class WatchdogConfig:
    """Seconds that a phase may pass without any progress; None: no limit.

    Progress is a completion requested or received, a rollout that ended, a forward pass of the
    policy, and the beginning of the phase. A process that waits for another one is not judged: the
    other one is, by its own watchdog. Time in which the whole process is stopped does not count.
    """

    load_s: Number | None = Field(default=3600.0, gt=0)
    """Data, tools, weights and the engine, up to the first phase."""
    rollout_s: Number | None = Field(default=3600.0, gt=0)
    """Rollouts and their rewards; of `agenttrain sft`: making rollouts of the rows."""
    train_s: Number | None = Field(default=3600.0, gt=0)
    """Advantages and updates."""
    sync_s: Number | None = Field(default=3600.0, gt=0)
    """The engine takes the new weights."""
    evaluation_s: Number | None = Field(default=3600.0, gt=0)
    """Evaluation on the test rows."""
    checkpoint_s: Number | None = Field(default=3600.0, gt=0)
    """Writing a checkpoint."""
    heartbeat_s: Number = Field(default=5.0, gt=0)
    """Seconds between two writings of <run>/heartbeat.json."""

    def deadline_of(self, phase: str | None) -> tuple[str, float | None]:
        """Return the setting that limits a phase, and its value; ``("", None)`` for others."""
        name = f"{'rollout' if phase == 'data' else phase}_s"  # `data`: the phase of sft
        return (name, getattr(self, name)) if hasattr(self, name) else ("", None)
