"""The loss from its definition, one token at a time, in Python's floats.

A row is one rollout: lists `new`, `old`, `ref`, `engine`, `entropy`, `kept` of its tokens and a
number `advantage`. `at` is `new` where a stopped gradient is taken: a difference quotient moves
`new` and leaves `at` alone.
"""

from __future__ import annotations

import math

from agenttrain.algorithms.config import AlgorithmConfig

FIXED_LENGTH = 8
BONUS = 0.25


def python_loss(rows: list[dict], config: AlgorithmConfig) -> float:
    """The loss of a whole update; every token's entropy weighs BONUS."""
    tokens = sum(len(row["new"]) for row in rows)
    total = 0.0
    for row in rows:
        length = len(row["new"])
        divisor = {
            "token_mean": tokens,
            "sequence_mean": len(rows) * length,
            "sequence_sum": len(rows),
            "fixed_length": len(rows) * FIXED_LENGTH,
        }[config.aggregation.value]
        weights = corrections(row, config)
        for index in range(length):
            term = surrogate(row, index, config)
            if config.objective.name != "vespo":
                term *= weights[index]
            term *= row["kept"][index] * keeps(row, config)
            total += (term + penalty(row, index, config)) / divisor
            total -= BONUS * config.has_bonus * row["entropy"][index] * row["kept"][index]
    return total


def ratios(row: dict, key: str, level: str) -> list[float]:
    deltas = [a - b for a, b in zip(row[key], row["old"], strict=True)]
    return {
        "token": [math.exp(d) for d in deltas],
        "sequence_mean": [math.exp(sum(deltas) / len(deltas))] * len(deltas),
        "sequence_sum": [math.exp(sum(deltas))] * len(deltas),
    }[level]


def surrogate(row: dict, index: int, config: AlgorithmConfig) -> float:
    a, l = row["advantage"], row["new"][index]  # noqa: E741
    kind, settings = config.objective.name, config.objective.settings
    level = getattr(settings, "ratio", "token")
    r = ratios(row, "new", level)[index]
    stopped = ratios(row, "at", level)[index]
    if kind == "clip":
        bounded = r if settings.dual is None else min(r, settings.dual)
        return -min(bounded * a, min(max(r, 1 - settings.low), 1 + settings.high) * a)
    if kind == "cispo":
        return -min(stopped, 1 + settings.high) * a * l
    if kind == "sapo":
        tau = settings.tau_pos if a > 0 else settings.tau_neg
        return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
    if kind == "reinforce":
        return -a * l
    if kind == "vespo":
        return -vespo(row, config) * a * l
    deltas = [x - y for x, y in zip(row["new"], row["old"], strict=True)]
    clipped = [min(d, settings.high) if a > 0 else max(d, -settings.low) for d in deltas]
    return -math.exp(sum(clipped) / len(clipped)) * a


def vespo(row: dict, config: AlgorithmConfig) -> float:
    log_w = sum(x - y for x, y in zip(row["at"], row["old"], strict=True))
    weights, settings = corrections(row, config), config.objective.settings
    of_tokens = config.correction is not None and config.correction.level == "token"
    log_w += sum(math.log(max(w, 1e-8)) for w in (weights if of_tokens else weights[:1]))
    log_w = max(log_w, math.log(1e-8))
    k, scale = (
        (settings.k_pos, settings.lambda_pos)
        if row["advantage"] >= 0
        else (settings.k_neg, settings.lambda_neg)
    )
    return math.exp(scale + k * log_w - scale * math.exp(log_w))


def corrections(row: dict, config: AlgorithmConfig) -> list[float]:
    deltas = [a - b for a, b in zip(row["old"], row["engine"], strict=True)]
    if (correction := config.correction) is None:
        return [1.0] * len(deltas)
    values = {
        "token": [math.exp(d) for d in deltas],
        "sequence": [math.exp(sum(deltas))] * len(deltas),
        "geometric": [math.exp(sum(deltas) / len(deltas))] * len(deltas),
    }[correction.level.value]
    low = 0.0 if correction.min is None else correction.min
    high = math.inf if correction.max is None else correction.max
    if correction.mode == "truncate":
        return [min(max(v, low), high) for v in values]
    return [v if low <= v <= high else 0.0 for v in values]


def keeps(row: dict, config: AlgorithmConfig) -> bool:
    if config.off_policy_threshold is None or row["advantage"] >= 0:
        return True
    drift = [e - x for e, x in zip(row["engine"], row["at"], strict=True)]
    return sum(drift) / len(drift) <= config.off_policy_threshold


def penalty(row: dict, index: int, config: AlgorithmConfig) -> float:
    if (settings := config.kl_in_loss) is None:
        return 0.0
    d = row["new"][index] - row["ref"][index]
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[settings.estimator.value]
    r = ratios(row, "new", "token")[index] if settings.bias_correction else 1.0
    return settings.beta * kl * r
