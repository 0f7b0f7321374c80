"""The table of metrics: the names that `metrics.jsonl` can hold, with their meaning.

An objective's own metrics stand in its decorator.

A part in angle brackets stands for any text without a slash: ``tools/<tool>/calls``.
`docs/reference/metrics.md` is generated from this table, and the metrics of runs are compared with
it by tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricName:
    """One row of the table."""

    pattern: str
    meaning: str


def metric_row(name: str) -> MetricName | None:
    """Return the row of a metric; None for a name that the table lacks.

    Exact names go before patterns: ``tools/stuck`` is not a tool.
    """
    rows = [
        row
        for section in METRICS.values()
        for row in section
        if re.fullmatch(re.sub(r"<[a-z ]+>", "[^/]+", row.pattern), name)
    ]
    return min(rows, key=lambda row: "<" in row.pattern, default=None)


_PATTERNS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Rewards": (
        ("reward", "Mean reward: the weighted sum over reward functions."),
        ("reward_std", "Standard deviation within a group, averaged over groups."),
        ("frac_reward_zero_std", "Share of groups whose rewards are all equal."),
        ("success", "Share of rollouts with a reward of at least 1."),
        ("rewards/<function>/mean", "Mean of one reward function, unweighted."),
        ("rewards/<function>/std", "Standard deviation of one reward function."),
    ),
    "Credit per turn": (
        ("credit/turn_reward", "Mean reward of a turn; the rollout's own is in its last."),
        ("credit/step_groups", "Share of turns whose state another rollout was in (gigpo)."),
        ("credit/variance/<turn>", "Mean square of the advantages of one turn."),
    ),
    "Tools": (
        ("tools/call_frequency", "Tool calls per rollout."),
        ("tools/failure_frequency", "Share of calls that ended in an error of any kind."),
        ("tools/rollout_share", "Share of rollouts that called a tool."),
        ("tools/unavailable", "Calls that failed because the tool itself is broken."),
        ("tools/lenient_calls", "Calls read only thanks to `response_schema.lenient`."),
        ("tools/stuck", "Blocking calls that still run past their time limit."),
        ("tools/<tool>/calls", "Calls of one tool."),
        ("tools/<tool>/failures", "Calls of one tool that ended in an error."),
        ("tools/<tool>/latency_s", "Mean seconds of a call in which the tool ran."),
    ),
    "Rollouts": (
        ("turns/mean", "Sampled completions per rollout."),
        ("trajectories/mean", "Trajectories per rollout: 1 if no context was compacted."),
        ("completions/mean_length", "Mean sampled tokens of a rollout; tool text does not count."),
        ("completions/min_length", "Fewest sampled tokens of a rollout."),
        ("completions/max_length", "Most sampled tokens of a rollout."),
        ("completions/clipped_ratio", "Share of rollouts cut by a token limit."),
        ("stop/<reason>", "Share of rollouts that ended for this reason."),
        ("rollout/dropped", "Rollouts that failed for reasons other than the model; not scored."),
        ("rollout/ledger_breaks", "Rollouts whose tokens, mask and messages disagree."),
        ("data/overlong", "Tasks or conversations left out because they are too long."),
        ("data/uneven_prompts", "Groups whose rollouts began with different prompts."),
        (
            "data/bad_rows",
            "Rows left out by `data.on_bad_row=skip` while the run goes on; in `sft` always, else "
            "where there are any.",
        ),
    ),
    "Outside agents": (
        ("agent/requests", "Requests that agents sent."),
        (
            "agent/merged_share",
            "Share of turns after the first of each conversation that continue a trajectory.",
        ),
        (
            "agent/untrained_share",
            "Share of sampled tokens in conversations that are not trained: side calls and models "
            "that are frozen.",
        ),
        ("agent/ambiguous", "Requests that matched several turns; the newest was taken."),
        ("agent/overridden", "Requests with fields that were replaced by the run's."),
        ("agent/unforced_forms", "Requests for a call or JSON that no grammar forced."),
        ("agent/respelled_calls", "Calls that came back otherwise than they were issued."),
        ("agent/hosted_tools", "Tools of requests that the model was not shown."),
        ("agent/restarts/system", "Trajectories begun because a system message changed."),
        ("agent/restarts/tools", "Trajectories begun because tools or tool texts changed."),
        ("agent/restarts/edited", "Trajectories begun because other messages changed."),
        ("agent/restarts/dropped", "Trajectories begun because messages are missing."),
    ),
    "Resampling": (
        ("data/tasks", "Tasks drawn from the data in this step."),
        ("resample/rounds", "Extra rounds of dynamic sampling."),
        ("resample/uninformative", "Groups with equal rewards that were replaced."),
        ("resample/surplus", "Groups that were sampled beyond the number needed."),
    ),
    "Curriculum": (
        ("curriculum/new", "Rows that were never drawn."),
        ("curriculum/band", "Measured tasks with a success rate between `low` and `high`."),
        ("curriculum/easy", "Measured tasks above `high`."),
        ("curriculum/hard", "Measured tasks below `low`."),
        ("curriculum/unmeasured", "Drawn tasks without a scored rollout."),
        ("curriculum/success", "Mean success rate of the measured tasks."),
    ),
    "Training": (
        ("loss", "Mean loss of the step's optimizer updates."),
        ("grad_norm", "Mean gradient norm before clipping."),
        ("lr", "Learning rate of the step."),
        ("train/tokens", "Mean sampled tokens of an optimizer update that had a gradient."),
        ("entropy", "Mean entropy of the trainer's distribution at sampled tokens, in nats."),
        ("entropy_coef", "Coefficient of the entropy bonus."),
        ("kl", "KL divergence from the reference, in nats per sampled token."),
        ("teacher/kl", "KL divergence from the teacher, in nats per sampled token."),
        ("teacher/gated_in", "Share of rollouts whose tokens get the teacher's part."),
        ("teacher/too_long", "Share of rollouts too long for the teacher, which are not trained."),
        ("mask/truncated", "Share of rollouts without a gradient because they were cut."),
        ("mask/top_entropy", "Share of tokens left out by `algorithm.top_entropy`."),
        ("mask/off_policy", "Share of trajectories left out by `algorithm.off_policy_threshold`."),
        ("mask/correction", "Share of weights that the correction set to zero."),
        ("training/kernel/<kernel>", "Share of attention calls that this kernel computed."),
    ),
    "Engine and trainer": (
        ("sampling/logprob_gap", "Mean |trainer - engine| log-probability of sampled tokens."),
        ("sampling/logprob_gap_max", "The largest gap of a token."),
        ("sampling/logprob_gap_first_turn", "Mean gap in first turns."),
        ("sampling/logprob_gap_later_turns", "Mean gap in later turns."),
        ("sampling/logprob_gap_early", "Mean gap in the first third of a rollout."),
        ("sampling/logprob_gap_middle", "Mean gap in the second third of a rollout."),
        ("sampling/logprob_gap_late", "Mean gap in the last third of a rollout."),
        ("sampling/logprob_gap_fresh", "Mean gap of tokens sampled under the current weights."),
        ("sampling/logprob_gap_stale", "Mean gap of tokens sampled under older weights."),
        ("sampling/logprob_gap_fresh_max", "The largest gap of one under the current weights."),
        ("sampling/kl", "k3 estimate of KL(engine || trainer), in nats per token."),
        ("sampling/logprob_slope", "Slope of the engine's log-probabilities over the trainer's."),
        ("sampling/stale_tokens", "Share of tokens sampled under older weights."),
        ("sampling/importance_sampling_ratio/min", "Smallest correction weight."),
        ("sampling/importance_sampling_ratio/mean", "Mean correction weight."),
        ("sampling/importance_sampling_ratio/max", "Largest correction weight."),
        ("weight_sync/gap", "Mean gap of a fixed text after a weight sync, in nats."),
        ("weight_sync/gap_q90", "Its 90 % quantile over tokens."),
        ("weight_sync/gap_max", "Its largest token."),
        ("fleet/servers", "Servers that answer, at the end of the step."),
        ("fleet/deaths", "Servers that died or were killed in the step."),
        ("fleet/requests", "Requests that were sent to servers, those sent again included."),
        ("fleet/resent", "Requests that were sent again, as a server failed."),
        ("fleet/load", "Largest share of the requests that a server got: 0.5 of two is even."),
        ("fleet/cached", "Share of the prompts' tokens that servers had in their prefix caches."),
        ("fleet/pause_s", "Longest time that a server was paused for new weights."),
    ),
    "Asynchronous training": (
        ("async/staleness/mean", "Mean age of a rollout: updates since its oldest weights."),
        ("async/staleness/max", "Age of the oldest rollout, at most async_training.max_staleness."),
        ("async/staleness/<updates>", "Rollouts of this age."),
        ("async/queue", "Groups that were ready when the step asked for its own."),
        ("async/wait_s", "Seconds for which the trainer waited for groups."),
        ("async/idle_s", "Seconds since the last step for which the engine had no request."),
        ("async/dropped", "Groups that were sampled and are not trained on: only after a resume."),
    ),
    "Time": (
        ("time/rollout_s", "Seconds of sampling, tools included."),
        ("time/reward_s", "Seconds of reward functions."),
        ("time/train_s", "Seconds of the update."),
        ("time/sync_s", "Seconds of the weight sync."),
        ("time/data_s", "Seconds of reading conversations (`agenttrain sft`)."),
        ("time/loop_lag_max_s", "Longest time for which the event loop stood still."),
        ("tokens_per_s", "Tokens per second: sampled tokens of rollouts, all tokens of sft."),
    ),
    "Supervised": (
        ("sft/conversations", "Conversations of the step."),
        ("sft/tokens", "Tokens of these conversations."),
    ),
}

METRICS: Mapping[str, tuple[MetricName, ...]] = {
    section: tuple(MetricName(*row) for row in rows) for section, rows in _PATTERNS.items()
}
"""Section of the page -> its rows. `metrics.jsonl` also has `step`."""
