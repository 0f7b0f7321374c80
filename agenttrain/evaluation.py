"""Evaluation without updates: rollouts of held-out tasks, or the loss on held-out conversations."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import mean
from typing import Any

from agenttrain.data.mixture import Questions
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.config import Sampling
from agenttrain.rollout.collector import Collected, Collector, may_be_scored, why_unrewarded
from agenttrain.rollout.config import EvalConfig, RolloutConfig
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.sharing import Costs, collect_share, merge_shares
from agenttrain.rollout.source import Demonstrations, RolloutSource
from agenttrain.settings.mixture import source_views
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.metrics import Estimate, Scores, mean_estimate, pass_at_k, solved
from agenttrain.training.policy import Policy
from agenttrain.training.world import World
from agenttrain.types import Rollout, RowTool, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Scores):
    """Result of one evaluation, with its rollouts."""

    stop_reasons: dict[str, float]
    """Share of rollouts by stop reason."""
    dropped: int
    """Rollouts that failed for reasons other than the model; no other metric counts them."""
    unscored: int
    """Rollouts that ended well without a reward: no function applied, or one gave no number."""
    overlong: int
    """Questions whose prompt leaves no room to sample; no other metric counts them."""
    rollouts: list[Rollout]
    """Empty in processes other than the main one."""

    def metrics(self) -> dict[str, float]:
        """Return flat metrics, without those that are NaN.

        Example: ``reward``, ``pass@4``, ``group/hard`` (the reward where the column `eval.group_by`
        is ``hard``), ``stop/max_turns``, and of each source of a mixture ``source/maze/reward``.
        ``reward_low`` and ``reward_high`` are the ends of the confidence interval of the reward.
        """
        metrics = {
            **score_metrics(self),
            **{f"stop/{reason}": share for reason, share in self.stop_reasons.items()},
            **{
                f"source/{source}/{name}": value
                for source, scores in self.by_source.items()
                for name, value in score_metrics(scores).items()
            },
            "rollout/dropped": self.dropped,
            "rollout/unscored": self.unscored,
            "data/overlong": self.overlong,
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def score_metrics(scores: Scores) -> dict[str, float]:
    """Return scores as flat metrics: reward and pass@k with their intervals, group/<value>."""
    metrics: dict[str, float] = {}
    pass_at = {f"pass@{k}": estimate for k, estimate in scores.pass_at.items()}
    for name, estimate in {"reward": scores.reward, **pass_at}.items():
        metrics[name] = estimate.mean
        metrics[f"{name}_low"] = estimate.low
        metrics[f"{name}_high"] = estimate.high
    return metrics | {f"group/{name}": group.mean for name, group in scores.by_group.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Cross entropy of the policy on conversations that are not trained on."""

    loss: float
    """Nats per token."""
    tokens: int
    """Assistant tokens of the conversations."""
    conversations: int
    # The trainer reads these two of every kind of evaluation.
    label: str = "held_out"
    rollouts: Sequence[Rollout] = ()

    def metrics(self) -> dict[str, float]:
        """Return flat figures: ``{"loss": 0.21, "tokens": 5210, "conversations": 100}``."""
        return {
            "loss": self.loss,
            "tokens": float(self.tokens),
            "conversations": float(self.conversations),
        }


@dataclass(slots=True, kw_only=True)
class Evaluator(ABC):
    """Evaluates the policy of a run on the first `eval.questions` tasks or rows."""

    config: RunConfig
    tasks: TaskSource | Questions
    world: World = field(default_factory=World)
    title: str = "evaluation"
    """Name of the evaluation on the console."""

    @property
    def questions(self) -> int:
        """Number of tasks or rows to evaluate on, perhaps 0."""
        return question_count(self.config, self.tasks)

    @abstractmethod
    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Evaluate the current policy; all processes together."""

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return the result of `evaluate` for summary.json."""
        return to_json([e for e in evaluations if isinstance(e, Evaluation)])


def question_count(config: RunConfig, tasks: TaskSource | Questions) -> int:
    """Return the number of rows of one evaluation, perhaps 0.

    Those of a mixture are limited source by source already.
    """
    if isinstance(tasks, Questions):
        return len(tasks)
    return min(config.eval.questions, len(tasks))


def source_columns(config: RunConfig) -> dict[str, str | None]:
    """Return the column of each source of a mixture by which its reward is broken down."""
    return {name: view.eval.group_by for name, view in source_views(config).items()}


@dataclass(slots=True, kw_only=True)
class TaskEvaluator(Evaluator):
    """Evaluates with rollouts of test tasks."""

    source: RolloutSource

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the sampled evaluation and, if `eval.greedy`, a greedy one."""
        return await evaluate(
            self.source.collector,
            self.tasks.tasks(0, self.questions),
            self.config.eval,
            seed=self.config.seed,
            world=self.world,
            costs=self.source.costs.copy(),  # what evaluation measures stays out of training's
            sources=source_columns(self.config),
        )


@dataclass(slots=True, kw_only=True)
class LossEvaluator(Evaluator):
    """Evaluates with the loss on test rows."""

    source: Demonstrations
    policy: Policy
    title: str = "held-out loss"
    _rollouts: list[Rollout] | None = None
    """Demonstrations of this process's share of the rows; None until they are first needed."""

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the loss averaged over the tokens of all processes; empty without a row."""
        if self._rollouts is None:
            # `sft`, which has no mixtures, is the only verb that evaluates by the loss.
            assert isinstance(self.tasks, TaskSource), "a mixture has no demonstrations"
            batch = self.source.demonstrate(self.tasks, start=0, count=self.questions)
            self._rollouts = batch.rollouts
        conversations = int(self.world.sum(len(self._rollouts), "the held-out rows"))
        if conversations == 0:
            return []
        with self.world.collective("the held-out loss"):
            # Sequence -> logprobs [S] of its assistant tokens, the only ones that the loss counts.
            logprobs = self.policy.logprobs(self._rollouts)
        total = sum(float(logprobs_S.double().sum()) for logprobs_S in logprobs.values())
        total = self.world.sum(total, "the held-out loss")
        tokens = sum(logprobs_S.numel() for logprobs_S in logprobs.values())
        tokens = int(self.world.sum(tokens, "the held-out tokens"))
        return [HeldOutLoss(loss=-total / tokens, tokens=tokens, conversations=conversations)]

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return the result of `evaluate` for summary.json."""
        return evaluations[0].metrics() if evaluations else {}


@dataclass(slots=True)
class Best:
    """The best evaluation during and after training, by the mean reward of sampled rollouts."""

    record: dict[str, Any] | None = None
    """``{"step": 40, "reward": 0.53, "low": 0.48, "high": 0.58, "n": 400}``; of a mixture also
    `sources`: the best evaluation of each source, likewise."""

    @property
    def step(self) -> int | None:
        """Number of steps after which the best evaluation was made; None before the first."""
        return None if self.record is None else self.record["step"]

    @property
    def _steps(self) -> dict[str, int]:
        """The step of the best evaluation, by source; "" is the run as a whole."""
        if self.record is None:
            return {}
        records = {"": self.record, **self.record.get("sources", {})}
        return {name: record["step"] for name, record in records.items()}

    def sources_at(self, step: int) -> list[str]:
        """Return the sources whose best evaluation is that of a step; "" is the run as a whole.

        The checkpoint of such a step is kept.
        """
        return [name for name, best_step in self._steps.items() if best_step == step]

    def are_all_at(self, step: int) -> bool:
        """Return True if the best evaluations of the run and of each source are all of a step."""
        return {*self._steps.values()} == {step}

    def consider(self, step: int, evaluations: Sequence[Scores | HeldOutLoss]) -> bool:
        """Update `record` with the evaluations of a step, and return True if any was better.

        The run as a whole and each source of a mixture have their best evaluation each.
        """
        sampled = evaluations[0]  # a greedy evaluation comes after it
        if not isinstance(sampled, Scores):
            return False
        earlier = self.record or {}
        earlier_sources = earlier.get("sources", {})
        better_run = _record_if_better(step, sampled.reward, self.record)
        better_sources = {
            name: record
            for name, scores in sampled.by_source.items()
            if (record := _record_if_better(step, scores.reward, earlier_sources.get(name)))
        }
        if better_run is None and not better_sources:
            return False
        earlier_run = {name: value for name, value in earlier.items() if name != "sources"}
        self.record = earlier_run if better_run is None else better_run
        if sources := {**earlier_sources, **better_sources}:
            self.record["sources"] = sources
        return True


def _record_if_better(
    step: int, reward: Estimate, best: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the record of an evaluation if it is better than the `best` before it, else None."""
    if math.isnan(reward.mean) or (best and reward.mean <= best["reward"]):
        return None
    ends = {"low": reward.low, "high": reward.high, "n": reward.n}
    return {"step": step, "reward": reward.mean, **ends}


async def evaluate(
    collector: Collector,
    tasks: Sequence[Task],
    config: EvalConfig,
    *,
    seed: int,
    world: World | None = None,
    costs: Costs | None = None,
    sources: Mapping[str, str | None] | None = None,
) -> list[Evaluation]:
    """Evaluate with sampled rollouts and, if `config.greedy`, greedy ones, on the same tasks.

    `sources` maps the sources of a mixture to the columns by which they are broken down. Seeds
    depend only on `seed`, the task and the sample, so that two policies get the same noise. The
    processes of `world` share the tasks by `costs`, the tokens that tasks of each kind are expected
    to take, and add what they measure. The main process returns the rollouts too.
    """
    world, costs = world or World(), costs or Costs(config.group_by)
    runs = [("sampled", config.sampling(), config.samples)]
    if config.greedy:
        # `routes`, the experts that each token passed, are needed for training only.
        runs.append(("greedy", Sampling(temperature=0.0, routes=False), 1))
    # Lenient: NaN of a reward function must not stop an evaluation.
    collector = replace(collector.lenient(), limits=limits_of(collector.limits, config))
    tasks = [restricted(task, config.tools, collector.tools_of(task)) for task in tasks]
    evaluations = []
    for label, sampling, samples in runs:  # samples of each task
        request = BatchRequest(
            tasks=tasks, samples=samples, sampling=sampling, seed_path=(seed, "eval", label)
        )
        collected, _summaries = await collect_share(collector, request, peers=world, costs=costs)
        shares = world.to_main([collected], "the rollouts of an evaluation")  # [] in the others
        evaluation: Evaluation | None = None
        if world.is_main:
            evaluation = summarise(label, merge_shares(shares), config.group_by, sources)
            _warn_of_unscored(evaluation)
        # The other processes get the results without the rollouts, which would take long to send.
        results = None if evaluation is None else replace(evaluation, rollouts=[])
        broadcast_results = world.broadcast(results, "the results of an evaluation")
        assert broadcast_results is not None, "the main process has sent its results"
        evaluations.append(broadcast_results if evaluation is None else evaluation)
    return evaluations


def _warn_of_unscored(evaluation: Evaluation) -> None:
    """Print why rollouts that ended well have no reward."""
    count = len(evaluation.rollouts)
    unscored = [r for r in evaluation.rollouts if may_be_scored(r) and r.reward is None]
    errors = [r.error for r in unscored if r.error is not None]
    if errors:
        problem = f"{len(errors)} of {count} rollouts have no reward and count in no figure"
        problem += f"; the first: {errors[0]}"
    else:
        # Every reward function gave None, which is worth a note only if no rollout has a reward.
        reason = why_unrewarded(evaluation.rollouts)
        if not reason:
            return
        problem = f"not one of {count} rollouts has a reward; the first: {reason}"
    print(f"note: {evaluation.label} evaluation: {problem}", file=sys.stderr)


def limits_of(limits: RolloutConfig, config: EvalConfig) -> RolloutConfig:
    """Return the limits of rollouts in evaluations: those of training, unless `eval` sets some."""
    names = ("max_turns", "max_turn_tokens", "max_completion_tokens")
    set_limits = {name: value for name in names if (value := getattr(config, name)) is not None}
    return replace(limits, **set_limits)


def restricted(task: Task, tools: Sequence[str] | None, declared: Sequence[str]) -> Task:
    """Return the task with no tools but `tools`; None leaves it as it is.

    `declared` are the tools of a row that lists none. A row's own tool stays if `tools` has its
    executor, the tool of the run that does its work.
    """
    if tools is None:
        return task
    listed: Sequence[str | RowTool] = declared if task.tools is None else task.tools
    kept = []
    for tool in listed:
        executor = tool if isinstance(tool, str) else tool.executor
        if executor in tools:
            kept.append(tool)
    return replace(task, tools=tuple(kept))


def summarise(
    label: str,
    collected: Collected,
    group_by: str | None,
    sources: Mapping[str, str | None] | None = None,
) -> Evaluation:
    """Compute the results of an evaluation from its scored rollouts.

    The mean reward is broken down by the values of the column `group_by`. In a mixture, `sources`
    maps each source to a column of its own: then each source is broken down, and the whole is not.
    As in training, rollouts that failed for reasons other than the model have no reward and are
    left out; `stop/error` is their share.
    """
    groups, rollouts = collected.groups, collected.rollouts
    reasons = [str(rollout.stop_reason) for rollout in rollouts]
    by_source = {}
    for name, source_column in (sources or {}).items():
        source_groups = [group for group in groups if group and group[0].task.source == name]
        by_source[name] = Scores(**_score_fields(label, source_groups, source_column))
    return Evaluation(
        # label, questions, reward, pass_at, by_group
        **_score_fields(label, groups, None if sources else group_by),
        by_source=by_source,
        stop_reasons={
            reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))
        },
        dropped=collected.dropped,
        unscored=sum(may_be_scored(r) and r.reward is None for r in rollouts),
        overlong=collected.overlong,
        rollouts=rollouts,
    )


def _score_fields(
    label: str, groups: Sequence[Sequence[Rollout]], group_by: str | None
) -> dict[str, Any]:
    """Return the fields of `Scores`, without `by_source`; a group has the samples of a question."""
    scored = [[r.reward for r in group if r.reward is not None] for group in groups]
    samples = max([1, *(len(rewards) for rewards in scored)])  # the largest k of pass@k
    group_names: list[str] = []  # value of the column `group_by`, for each question
    if group_by:
        group_names = [str(group[0].task.columns.get(group_by)) for group in groups]
    counts = [(len(rewards), sum(map(solved, rewards))) for rewards in scored]  # (n, correct)
    # Estimates are over questions, which are independent; the samples of one question are not.
    return {
        "label": label,
        "questions": len(groups),
        "reward": mean_estimate([mean(rewards) for rewards in scored if rewards]),
        # Without questions that have fewer than k scored samples.
        "pass_at": {
            k: mean_estimate([pass_at_k(n, correct, k) for n, correct in counts if n >= k])
            for k in sorted({1, samples})
        },
        "by_group": {
            name: mean_estimate(
                [
                    mean(rewards)
                    for rewards, group_name in zip(scored, group_names, strict=True)
                    if rewards and group_name == name
                ]
            )
            for name in sorted(set(group_names))
        },
    }


def to_json(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return evaluations for summary.json.

    Example: ``{"questions": 400, "reward": 0.26, "pass@1": 0.26, "reward_greedy": 0.5, "scores":
    [{"label": "sampled", …}, …]}``
    """
    results: dict[str, Any] = {}
    for evaluation in evaluations:
        suffix = "" if evaluation.label == "sampled" else f"_{evaluation.label}"
        results["questions"] = evaluation.questions
        results[f"reward{suffix}"] = evaluation.reward.mean
        results |= {f"pass@{k}{suffix}": value.mean for k, value in evaluation.pass_at.items()}
    # Only the fields of `Scores`: neither the rollouts nor the counts of them. The rollouts are
    # taken out first, since `asdict` would copy them.
    names = [field.name for field in fields(Scores)]
    results["scores"] = [
        {name: value for name, value in asdict(replace(e, rollouts=[])).items() if name in names}
        for e in evaluations
    ]
    for scores in results["scores"]:
        sources = scores.pop("by_source")
        if sources:
            scores["sources"] = sources
        for source_scores in sources.values():
            del source_scores["by_source"]  # a source has no sources
    return results


def from_json(results: dict[str, Any]) -> list[Scores]:
    """Read the scores that `to_json` wrote; empty if there was no evaluation."""
    return [_read_scores(scores) for scores in results.get("scores", [])]


def _read_scores(scores: Mapping[str, Any]) -> Scores:
    """Read the scores of one evaluation, or of one source in it."""
    return Scores(
        label=scores["label"],
        questions=scores["questions"],
        reward=_estimate(scores["reward"]),
        pass_at={int(k): _estimate(value) for k, value in scores["pass_at"].items()},
        by_group={name: _estimate(value) for name, value in scores["by_group"].items()},
        by_source={name: _read_scores(part) for name, part in scores.get("sources", {}).items()},
    )


def _estimate(value: dict[str, Any]) -> Estimate:
    """Read an estimate: null stands for NaN."""
    ends = [math.nan if value[name] is None else value[name] for name in ("mean", "low", "high")]
    return Estimate(mean=ends[0], low=ends[1], high=ends[2], n=value["n"])
