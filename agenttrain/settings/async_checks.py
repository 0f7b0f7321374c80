"""Checks of asynchronous training: what `async_training.max_staleness` above 0 needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agenttrain.algorithms.config import Behaviour
from agenttrain.rollout.config import RolloutPlace
from agenttrain.settings.engine_checks import run_spec
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import WeightSyncMode


def async_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings that do not go with rollouts of an older policy (max_staleness > 0)."""
    if not config.is_asynchronous:
        return
    key = f"async_training.max_staleness={config.async_training.max_staleness}"
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.process is RolloutPlace.same:
        yield (
            f"rollout.process=same: with {key} rollouts are made beside the update, in a process "
            "of their own; leave it out, or set async_training.max_staleness=0"
        )
    if algorithm.oversample > 1:
        yield (
            f"algorithm.oversample={algorithm.oversample:g}: with {key} every group that is "
            "sampled is trained on; set algorithm.oversample=1, or async_training.max_staleness=0"
        )
    if algorithm.dynamic_sampling:
        yield (
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling}: with {key} the tasks of a "
            "step would depend on those of steps that are not done; set "
            "algorithm.dynamic_sampling=0, or async_training.max_staleness=0"
        )
    if rollout.deterministic:
        yield (
            f"rollout.deterministic=true: with {key} it depends on the clock which rollouts share "
            "a batch; leave it out, or set async_training.max_staleness=0"
        )
    if algorithm.correction is not None:
        return
    objective = algorithm.objective
    if not objective.is_own and objective.registered.single_update:
        yield (
            f"algorithm.objective={objective.name}: compares the policy with no other, and with "
            f"{key} tokens are sampled by an older one; set algorithm.correction.level=token "
            "algorithm.behaviour=recomputed, or an objective with a ratio: algorithm/objective=clip"
        )
    elif algorithm.behaviour is Behaviour.recomputed:
        yield (
            f"algorithm.behaviour=recomputed: with {key} tokens are sampled by an older policy, "
            "which the ratio would not see; set algorithm.correction.level=token, or "
            "algorithm.behaviour=engine"
        )


def async_note(config: RunConfig, adapters_are_sent: Callable[[RunConfig], bool]) -> str | None:
    """Return a warning about a weight sync that makes asynchronous training wait, or None.

    With mode=drain, new weights are loaded once all turns in flight are complete. `abort_resume`
    interrupts these turns, and samples their rest after the load.

    `adapters_are_sent` returns True if a run's adapters are sent to the servers, and not merged
    into the weights. It is called only if that matters, as it may have to build the model's
    architecture.
    """
    ahead, mode = config.async_training.max_staleness, config.weight_sync.mode
    spec = run_spec(config)
    if not config.is_asynchronous or mode is not WeightSyncMode.drain:
        return None
    if not spec.own_weights:  # it samples from the policy itself, and no weights are sent
        return None
    if spec.fleet and adapters_are_sent(config):  # servers load adapters beside the turns in flight
        return None
    return (
        f"warning: weight_sync.mode=drain with async_training.max_staleness={ahead}: each weight "
        "sync waits for the longest turn that is being sampled; set weight_sync.mode=abort_resume"
    )
