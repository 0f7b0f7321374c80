"""Checks of `rollout.structured_calls`: the gradient must be that of the policy."""

from __future__ import annotations

from collections.abc import Iterator

from agenttrain.config.algorithm import Correction, CorrectionMode
from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import RunConfig

KEY = "rollout.structured_calls=true"
UNTRAINED = ("eval", "sft", "plan")
"""Verbs that train nothing by what is sampled."""


def check_structured(verb: str, config: RunConfig) -> None:
    """Raise ConfigError where training would take a grammar's samples for the policy's own."""
    if not config.rollout.structured_calls or verb in UNTRAINED:
        return
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(problems))


def _problems(config: RunConfig) -> Iterator[str]:
    a = config.algorithm
    if a.correction not in (Correction.token, Correction.sequence):
        yield (
            f"algorithm.correction={a.correction}: with {KEY} completions are sampled from the "
            "policy renormalised over what the grammar allows, and only the ratio of both makes "
            "the gradient the policy's; set algorithm.correction=token or sequence, with "
            "algorithm.behaviour=recomputed, or leave structured_calls out"
        )
    elif a.correction_min is not None and a.correction_mode is CorrectionMode.truncate:
        yield (
            f"algorithm.correction_min={a.correction_min}: with {KEY} it would raise the weight of "
            "tokens that the policy would hardly have written; leave it out, or set "
            "algorithm.correction_mode=mask"
        )
    if a.kl_in_loss:
        yield (
            f"algorithm.beta={a.beta}: with {KEY} tokens are not the policy's own, and nothing "
            "weighs their KL; set algorithm.kl_in=reward, whose KL is weighed with the reward, or "
            "algorithm.beta=0"
        )
    if a.off_policy_threshold is not None:
        yield (
            f"algorithm.off_policy_threshold={a.off_policy_threshold}: with {KEY} it would take "
            "what the grammar rules out for a policy that has moved; leave it out"
        )
    limit = config.guards.logprob_gap.limit
    if limit is not None:
        yield (
            f"guards.logprob_gap.limit={limit}: with {KEY} the gap of a token holds what the "
            "grammar ruled out before it, without a bound; add guards.logprob_gap.limit=null"
        )
