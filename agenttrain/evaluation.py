"""Evaluation without updates: how good is the policy on held-out tasks, or at held-out rows?"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import mean
from typing import Any, Protocol

from agenttrain.data.tasks import TaskSource
from agenttrain.rollout.collector import Collected, Collector, may_be_scored, why_unrewarded
from agenttrain.rollout.config import EvalConfig, RolloutConfig
from agenttrain.rollout.sharing import Costs, collect_share, merge_shares
from agenttrain.rollout.source import Demonstrations, RolloutSource
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.metrics import Estimate, mean_estimate, pass_at_k, solved
from agenttrain.training.policy import Policy
from agenttrain.training.world import World
from agenttrain.types import Rollout, RowTool, Sampling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The figures of one evaluation that summary.json keeps.

    Intervals are of 95 % over questions, which are independent; samples of one question are not.
    Where every question is worth 0 or 1, they are Wilson's, else normal.
    """

    label: str
    """`sampled` or `greedy`."""
    questions: int
    reward: Estimate
    """Mean reward."""
    pass_at: dict[int, Estimate]
    """k -> share of questions solved (reward 1) by at least one of k samples, unbiased."""
    by_group: dict[str, Estimate]
    """Mean reward by the values of the column `eval.group_by`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Scores):
    """The result of one evaluation, with the rollouts that it comes from."""

    stop_reasons: dict[str, float]
    """Share of rollouts by stop reason."""
    dropped: int
    """Rollouts that failed for reasons not the model's; no figure counts them."""
    unscored: int
    """Rollouts that ended well and have no reward: no function applied, or one gave no number."""
    overlong: int
    """Questions that leave no room to sample; no figure counts them."""
    rollouts: list[Rollout]
    """On the main process; the others have the figures."""

    def metrics(self) -> dict[str, float]:
        """Flat figures: reward, pass@k, group/<value>, stop/<reason>; `_low` and `_high` are the
        ends of intervals. What could not be measured is left out: none is NaN."""
        found = {
            **_flat("reward", self.reward),
            **{n: v for k, e in self.pass_at.items() for n, v in _flat(f"pass@{k}", e).items()},
            **{f"group/{name}": group.mean for name, group in self.by_group.items()},
            **{f"stop/{reason}": share for reason, share in self.stop_reasons.items()},
            "rollout/dropped": self.dropped,
            "rollout/unscored": self.unscored,
            "data/overlong": self.overlong,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The cross entropy of the policy on rows that are not trained on."""

    loss: float
    """Nats per token."""
    tokens: int
    conversations: int
    label: str = "held_out"
    rollouts: Sequence[Rollout] = ()

    def metrics(self) -> dict[str, float]:
        """Return flat figures: ``{"loss": 0.21, "tokens": 5210, "conversations": 100}``."""
        return {
            "loss": self.loss,
            "tokens": float(self.tokens),
            "conversations": float(self.conversations),
        }


class Evaluator(Protocol):
    """Evaluates the policy of a run."""

    title: str
    """Name of what it does."""

    @property
    def questions(self) -> int:
        """Number of tasks or rows; 0: there is nothing to evaluate on."""
        ...

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Evaluate the policy as it is now, all processes together."""
        ...

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return an evaluation for summary.json."""
        ...


@dataclass(slots=True, kw_only=True)
class TaskEvaluator:
    """Evaluates by rollouts of the first `eval.questions` test tasks."""

    config: RunConfig
    source: RolloutSource
    tasks: TaskSource
    world: World = field(default_factory=World)
    title: str = "evaluation"

    @property
    def questions(self) -> int:
        """Number of tasks."""
        return min(self.config.eval.questions, len(self.tasks))

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the sampled evaluation and, if `eval.greedy`, a greedy one."""
        return await evaluate(
            self.source.collector,
            self.tasks.tasks(0, self.questions),
            self.config.eval,
            seed=self.config.seed,
            world=self.world,
            costs=self.source.costs.copy(),
        )

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return an evaluation for summary.json."""
        return to_json([e for e in evaluations if isinstance(e, Evaluation)])


@dataclass(slots=True, kw_only=True)
class LossEvaluator:
    """Evaluates by the loss on the first `eval.questions` test rows."""

    config: RunConfig
    source: Demonstrations
    tasks: TaskSource
    policy: Policy
    world: World = field(default_factory=World)
    title: str = "held-out loss"
    _rollouts: list[Rollout] | None = None
    """This process's share of the rows, once they were made."""

    @property
    def questions(self) -> int:
        """Number of rows."""
        return min(self.config.eval.questions, len(self.tasks))

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the loss, averaged over the tokens of all processes; nothing without a row."""
        if self._rollouts is None:
            self._rollouts = self.source.demonstrate(self.tasks, 0, self.questions).rollouts
        conversations = int(self.world.sum(len(self._rollouts), "the held-out rows"))
        if conversations == 0:
            return []
        with self.world.collective("the held-out loss"):
            logprobs = self.policy.logprobs(self._rollouts)
        total = sum(float(logprobs_S.double().sum()) for logprobs_S in logprobs.values())
        total = self.world.sum(total, "the held-out loss")
        tokens = sum(logprobs_S.numel() for logprobs_S in logprobs.values())
        tokens = int(self.world.sum(tokens, "the held-out tokens"))
        return [HeldOutLoss(loss=-total / tokens, tokens=tokens, conversations=conversations)]

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return an evaluation for summary.json."""
        return evaluations[0].metrics() if evaluations else {}


def _flat(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


@dataclass(slots=True)
class Best:
    """The best of the evaluations while training and after, by the mean of the sampled reward."""

    record: dict[str, Any] | None = None
    """``{"step": 40, "reward": 0.53, "low": 0.48, "high": 0.58, "n": 400}``"""

    @property
    def step(self) -> int | None:
        """Steps that the policy had done."""
        return None if self.record is None else self.record["step"]

    def consider(self, step: int, evaluations: Sequence[Scores | HeldOutLoss]) -> bool:
        """Return True if these are better than all before; of equals the first stays."""
        first = evaluations[0]
        if not isinstance(first, Scores):
            return False
        reward = first.reward
        if math.isnan(reward.mean) or (self.record and reward.mean <= self.record["reward"]):
            return False
        ends = {"low": reward.low, "high": reward.high, "n": reward.n}
        self.record = {"step": step, "reward": reward.mean, **ends}
        return True


async def evaluate(
    collector: Collector,
    tasks: Sequence[Task],
    config: EvalConfig,
    *,
    seed: int,
    world: World | None = None,
    costs: Costs | None = None,
) -> list[Evaluation]:
    """Sampled evaluation and, if `config.greedy`, a greedy one, on the same tasks.

    Seeds depend on `seed`, the task and the sample only: two policies meet the same noise, and
    training's own random state is not touched. The processes of `world` share the tasks.
    """
    world, costs = world or World(), costs or Costs(config.group_by)
    sampled = Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
    )
    runs = [("sampled", sampled, config.samples)]
    if config.greedy:
        runs.append(("greedy", Sampling(temperature=0.0), 1))
    collector = for_evaluation(collector, config)
    tasks = [restricted(task, config.tools, collector.tools_of(task)) for task in tasks]
    evaluations = []
    for label, sampling, samples in runs:
        collected, _ = await collect_share(
            collector,
            tasks,
            peers=world,
            costs=costs,
            samples=samples,
            sampling=sampling,
            seed_path=(seed, "eval", label),
        )
        evaluations.append(_of_all(label, collected, config.group_by, world))
    return evaluations


def _of_all(label: str, share: Collected, group_by: str | None, world: World) -> Evaluation:
    """The figures over all processes; World of one: of the share."""
    shares = world.to_main([share], "the rollouts of an evaluation")
    mine = summarise(label, merge_shares(shares), group_by) if world.is_main else None
    if mine:
        _tell_unscored(mine)
    told = world.broadcast(mine and replace(mine, rollouts=[]), "the figures of an evaluation")
    whole = mine or told
    assert whole is not None  # the main process told it
    return whole


def _tell_unscored(evaluation: Evaluation) -> None:
    """Say why rollouts that ended well have no reward."""
    reasons = [r.error for r in evaluation.rollouts if may_be_scored(r) and r.error is not None]
    if not reasons and (reason := why_unrewarded(evaluation.rollouts)):
        print(
            f"note: {evaluation.label} evaluation: not one of {len(evaluation.rollouts)} rollouts "
            f"has a reward; the first: {reason}",
            file=sys.stderr,
        )
    if reasons:
        print(
            f"note: {evaluation.label} evaluation: {len(reasons)} of {len(evaluation.rollouts)} "
            f"rollouts have no reward and count in no figure; the first: {reasons[0]}",
            file=sys.stderr,
        )


def for_evaluation(collector: Collector, config: EvalConfig) -> Collector:
    """The same parts under the limits of `eval.*`, with rewards that NaN does not stop."""
    limits = limits_of(collector.limits, config)
    return replace(collector, limits=limits, rubric=collector.rubric.lenient())


def limits_of(limits: RolloutConfig, config: EvalConfig) -> RolloutConfig:
    """The limits of evaluated rollouts."""
    names = ("max_turns", "max_turn_tokens", "max_completion_tokens")
    own = {name: value for name in names if (value := getattr(config, name)) is not None}
    return replace(limits, **own)


def restricted(task: Task, tools: Sequence[str] | None, declared: Sequence[str]) -> Task:
    """The task with no tools but these; a row's own count as what runs them.

    `declared` are all that such a row may have.
    """
    if tools is None:
        return task
    listed: Sequence[str | RowTool] = declared if task.tools is None else task.tools
    kept = [t for t in listed if (t if isinstance(t, str) else t.executor) in tools]
    return replace(task, tools=tuple(kept))


def summarise(label: str, collected: Collected, group_by: str | None) -> Evaluation:
    """The figures of one evaluation from its scored rollouts.

    Rollouts that failed for reasons not the model's have no reward and are left out, as they are
    in training; `stop/error` tells their share.
    """
    groups, rollouts = collected.groups, collected.rollouts
    scored = [[r.reward for r in group if r.reward is not None] for group in groups]
    samples = max([1, *(len(rewards) for rewards in scored)])
    columns = [str(group[0].task.columns.get(group_by)) for group in groups] if group_by else []
    return Evaluation(
        label=label,
        questions=len(groups),
        reward=_mean_of_means(scored),
        pass_at={k: _pass_at(scored, k) for k in sorted({1, samples})},
        by_group={
            name: _mean_of_means([s for s, c in zip(scored, columns, strict=True) if c == name])
            for name in sorted(set(columns))
        },
        stop_reasons=_stop_reasons(rollouts),
        dropped=collected.dropped,
        unscored=sum(may_be_scored(r) and r.reward is None for r in rollouts),
        overlong=collected.overlong,
        rollouts=rollouts,
    )


def _mean_of_means(scored: Sequence[Sequence[float]]) -> Estimate:
    """Questions are independent, the samples of one question are not."""
    return mean_estimate([mean(rewards) for rewards in scored if rewards])


def _pass_at(scored: Sequence[Sequence[float]], k: int) -> Estimate:
    """Questions with fewer than k scored samples are left out; NaN when none is left."""
    counts = [(len(rewards), sum(map(solved, rewards))) for rewards in scored]
    return mean_estimate([pass_at_k(n, correct, k) for n, correct in counts if n >= k])


def _stop_reasons(rollouts: Sequence[Rollout]) -> dict[str, float]:
    reasons = [str(rollout.stop_reason) for rollout in rollouts]
    return {reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))}


def to_json(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """An evaluation for summary.json.

    Example: ``{"questions": 400, "reward": 0.26, "pass@1": 0.26, "reward_greedy": 0.5, "scores":
    [{"label": "sampled", …}, …]}``
    """
    found: dict[str, Any] = {}
    for evaluation in evaluations:
        suffix = "" if evaluation.label == "sampled" else f"_{evaluation.label}"
        found["questions"] = evaluation.questions
        found[f"reward{suffix}"] = evaluation.reward.mean
        found |= {f"pass@{k}{suffix}": value.mean for k, value in evaluation.pass_at.items()}
    kept = [one.name for one in fields(Scores)]
    found["scores"] = [
        {name: value for name, value in asdict(replace(e, rollouts=[])).items() if name in kept}
        for e in evaluations
    ]
    return found


def from_json(found: dict[str, Any]) -> list[Scores]:
    """The scores that `to_json` wrote; none for an evaluation that was not made."""
    return [
        Scores(
            label=scores["label"],
            questions=scores["questions"],
            reward=_estimate(scores["reward"]),
            pass_at={int(k): _estimate(value) for k, value in scores["pass_at"].items()},
            by_group={name: _estimate(value) for name, value in scores["by_group"].items()},
        )
        for scores in found.get("scores", [])
    ]


def _estimate(found: dict[str, Any] | float | None) -> Estimate:
    """JSON has null where an estimate of nothing has NaN; earlier versions kept means alone."""
    if not isinstance(found, dict):
        found = {"mean": found, "low": None, "high": None, "n": 0}
    bounds = [math.nan if found[k] is None else found[k] for k in ("mean", "low", "high")]
    return Estimate(mean=bounds[0], low=bounds[1], high=bounds[2], n=found["n"])
