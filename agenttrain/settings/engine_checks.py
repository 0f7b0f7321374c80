"""Checks of the engine: its abilities against the needs of other sections, and its own checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agenttrain.engines.config import LEAST_TEMPERATURE, ServersConfig
from agenttrain.engines.registry import OutsideEngine, admit, names_with, plain, spec_of
from agenttrain.engines.spec import EngineSpec, RunFacts
from agenttrain.launch.config import several_processes
from agenttrain.rollout.config import RolloutPlace
from agenttrain.settings.compose import Composed
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Transport, WeightSyncConfig
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import ADAPTER_CONFIG, has_experts, model_folder, why_merged
from agenttrain.utils.sections import plain as plain_settings
from agenttrain.utils.sections import raise_config_error, shown

WITHOUT_REPLAY = ("eval", "sft", "play", "serve")
"""Verbs without updates by sampled tokens: no experts are recorded, whatever router_replay says."""
SERVERS = plain_settings(ServersConfig())
"""Default of every key of the section `servers`."""


def typed_engine(overrides: Sequence[str]) -> str | None:
    """Return the typed override that chooses the engine, or None."""
    choices = ("engine=", "engine._target_=")
    return next((text for text in overrides if text.startswith(choices)), None)


def has_rollout_process(config: RunConfig) -> bool:
    """Return True if the run's rollouts are made in a process of their own."""
    place = config.rollout.process
    if place is RolloutPlace.auto:
        return config.is_asynchronous or spec_of(config.engine).fleet
    return place is RolloutPlace.own


def run_spec(config: RunConfig) -> EngineSpec[Any]:
    """Return the spec of the run's engine.

    With a rollout process it is `apart`: the same engine with a copy of the weights, if it has one.
    """
    spec = spec_of(config.engine)
    return (spec.apart or spec) if has_rollout_process(config) else spec


def policy_gpus(config: RunConfig, trainers: int) -> int:
    """Return the number of GPUs of the trainers and, if there is one, of the policy's copy."""
    has_copy = run_spec(config) is not spec_of(config.engine)  # in the rollout process
    return trainers + int(has_copy)


def replays_routes(config: RunConfig, verb: str) -> bool:
    """Return True if a run of `verb` trains with the experts by which its rollouts were sampled.

    `agenttrain check` without a verb stands for a run that trains.
    """
    return config.algorithm.replays_routes and verb not in WITHOUT_REPLAY


def route_recording_problems(config: RunConfig) -> Iterator[str]:
    """Yield why the engine cannot record the experts that algorithm.router_replay needs.

    An engine from outside is not checked before `admit_engine`.
    """
    engine = config.engine
    if not isinstance(engine, OutsideEngine) and not run_spec(config).records_routes:
        yield (
            f"algorithm.router_replay=rollout: engine={engine.name} does not return the experts by "
            f"which it samples; set {names_with(records_routes=True)}, or leave it out"
        )


def engine_problems(config: RunConfig, *, several: bool | None = None) -> Iterator[str]:
    """Yield settings that the engine does not support, or that have no effect with it.

    `several`: the run has more than one process; None: take it from the settings. An engine from
    outside is not checked before `admit_engine` has imported it.
    """
    engine = config.engine
    if isinstance(engine, OutsideEngine):
        return
    spec = run_spec(config)
    yield from _missing_abilities(config, spec)
    yield from _unused_weight_sync(config, spec)
    if not spec.fleet:
        yield from _servers_unused(config)
    # None (only the model's architecture tells) counts as merged: `runs.loading.check_model` checks
    # again once the architecture is known.
    is_merged = merges_adapters(config) is not False
    yield from spec.check(engine, _facts(config, is_merged=is_merged, several=several))


def _missing_abilities(config: RunConfig, spec: EngineSpec[Any]) -> Iterator[str]:
    """Yield settings of rollouts that need what the engine cannot do."""
    engine = config.engine
    for name in ("rollout", "eval"):
        temperature = getattr(config, name).temperature
        if 0 < temperature < LEAST_TEMPERATURE:
            greedy = "; or set it to 0, which is greedy" if name == "eval" else ""
            yield f"{name}.temperature={temperature:g}: {spec.too_cold}; raise it{greedy}"
    if config.rollout.deterministic and not spec.deterministic:
        yield (
            f"rollout.deterministic=true: the batches of engine={engine.name} depend on the clock; "
            f"leave it out, or set {names_with(deterministic=True)}"
        )
    if config.rollout.structured_calls and not spec.grammars:
        yield (
            f"rollout.structured_calls=true: engine={engine.name} has no grammars; set "
            f"{names_with(grammars=True)}, or leave it out"
        )
    # With a rollout process, `spec` is the form that the engine has there (`EngineSpec.apart`). It
    # must not need the training process: `standalone`. `may_stand_alone` is True for an engine that
    # has such a form.
    if has_rollout_process(config) and not spec.standalone:
        ahead = config.async_training.max_staleness
        cause = f"async_training.max_staleness={ahead}"
        if config.rollout.process is RolloutPlace.own:
            cause = "rollout.process=own"
        yield (
            f"{cause}: "
            f"engine={engine.name} samples in the training process; leave it out, or set "
            f"{names_with(may_stand_alone=True)}"
        )


def _unused_weight_sync(config: RunConfig, spec: EngineSpec[Any]) -> Iterator[str]:
    """Yield settings of the weight sync, if the engine is sent no weights."""
    sync = config.weight_sync
    if spec.own_weights:
        return
    if sync.tolerance is not None:
        yield (
            f"weight_sync.tolerance={sync.tolerance}: has no effect: engine={config.engine.name} "
            "samples from the policy itself"
        )
    if sync.mode != WeightSyncConfig.mode:
        yield (
            f"weight_sync.mode={sync.mode}: has no effect without {names_with(own_weights=True)}"
        )


def sent_problems(config: RunConfig, *, is_merged: bool) -> Iterator[str]:
    """Yield problems of an engine with the weights that it is sent; see `sends_adapters`."""
    yield from run_spec(config).check(config.engine, _facts(config, is_merged=is_merged))


def _facts(config: RunConfig, *, is_merged: bool, several: bool | None = None) -> RunFacts:
    """Return the settings of other sections that an engine's check may see."""
    return RunFacts(
        lora_rank=config.model.lora.rank,
        transport=config.weight_sync.transport,
        mode=config.weight_sync.mode,
        sync_folder=config.weight_sync.folder,
        distributed=str(config.distributed.name),
        several=several_processes(config.distributed) if several is None else several,
        servers=config.servers,
        rollout_process=has_rollout_process(config),
        sends_adapters=sends_adapters(config, is_merged=is_merged),
    )


def sends_adapters(config: RunConfig, *, is_merged: bool) -> bool:
    """Return True if the engine is sent the policy's adapters as they are.

    `is_merged`: they are merged into the weights, because the engine would compute something else
    with them (`merges_adapters`). The transport `files` always sends all weights.
    """
    return (
        config.model.lora.rank > 0
        and not is_merged
        and run_spec(config).own_weights
        and config.weight_sync.transport is not Transport.files
    )


def merges_adapters(config: RunConfig) -> bool | None:
    """Return True if adapters are merged because vLLM 0.32 would compute something else with them.

    vLLM reads adapters of experts wrongly in most families of models, and adapters of several ranks
    or scales in all of them. It would add adapters of a base in 4 bits to the base's 16-bit weights
    on disk. `model.path` may itself be saved adapters.

    Returns None if only the model's architecture can say whether experts have adapters.
    """
    model = config.model
    if not model.lora.rank:
        return False
    if model.quantization is not None:
        return True
    try:
        folder = model_folder(model.path, (), revision=model.revision)
    except ConfigError:  # reported as a problem of model.path
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        return why_merged(folder) is not None
    if model.lora.target_parameters:  # packed weights of experts
        return True
    return None if has_experts(folder) else False


def broadcast_note(config: RunConfig) -> str | None:
    """Return a note about weight_sync.transport=nccl, which was never run, or None."""
    if config.weight_sync.transport is not Transport.nccl:
        return None
    return (
        "note: weight_sync.transport=nccl has never been run on GPUs: its parts were tested with "
        "doubles of servers and group; weight_sync.transport=files goes another way"
    )


def _servers_unused(config: RunConfig) -> Iterator[str]:
    """Yield settings of servers, for an engine that has none."""
    settings = {f"servers.{key}": getattr(config.servers, key) for key in SERVERS}
    settings["weight_sync.folder"] = config.weight_sync.folder
    settings["weight_sync.transport"] = config.weight_sync.transport
    defaults = {f"servers.{key}": value for key, value in SERVERS.items()}
    defaults["servers.count"] = max(config.servers.nodes, 1)  # one on each node
    defaults["weight_sync.transport"] = WeightSyncConfig.transport
    for key, value in settings.items():
        if value != defaults.get(key):
            yield (
                f"{key}={shown(value)}: engine={config.engine.name} has no servers; set "
                f"{names_with(fleet=True)}, or leave it out"
            )


def admit_engine(composed: Composed, verb: str) -> None:
    """Import an engine from outside, a user's own, and check its keys; raises ConfigError.

    Its class of settings is known only after the import, so that its keys were not checked before.
    `config.engine`, and with it `plain`, the settings for config.yaml, then get its defaults too.

    Call it for a run of a verb that samples, once its other settings are valid and the code that a
    saved run names is trusted. A bundled engine stays as it is.
    """
    config = composed.config
    if not isinstance(config.engine, OutsideEngine):
        return
    config.engine = admit(config.engine)
    composed.plain["engine"] = plain(config.engine)
    problems = list(engine_problems(config))
    # Training with router_replay needs the experts of a mixture-of-experts model by which the
    # engine sampled each token.
    if replays_routes(config, verb):
        problems += route_recording_problems(config)
    raise_config_error(problems)
