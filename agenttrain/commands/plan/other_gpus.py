"""GPUs beside those of the trainer: of the rollout process's copy of the policy, and of roles.

Everything here is computed; none of it has been run on a GPU. The policy's servers are in
`servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agenttrain.commands.plan.estimate import GIB, MemoryEstimate, copied
from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.plan.servers import TENSOR_PARALLEL, fits, load_apart, most
from agenttrain.engines.memory import EngineLoad, EngineMemory
from agenttrain.engines.vllm_server.config import RoleConfig
from agenttrain.engines.vllm_server.server_memory import role_memory
from agenttrain.settings.engine_checks import run_spec
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import ModelConfig

COPY = "rollout process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A part of the run on GPUs that the trainer does not have."""

    key: str
    """``rollout process``, or the section of a role: ``roles.judge``."""
    what: str
    count: int
    """Processes, or servers."""
    gpus: int
    """GPUs of each."""
    bytes: int
    """Of each GPU."""
    fits: bool | None
    """None: the GPUs' memory is not known."""
    remedy: str | None
    """Setting with which it fits; None: it fits, or there is none."""


def plan_beside(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> list[Beside]:
    """Return the parts that have GPUs beside the trainer's; with a CPU there are none."""
    machine = memory.machine
    if machine.kind == "cpu":
        return []
    parts = [] if machine.shared or not copied(config) else [_copy(config, planner, memory)]
    for name, role in used_roles(config, "train").items():
        parts.append(_role(f"roles.{name}", role, planner, memory))
    return parts


def _copy(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> Beside:
    load, estimate = memory.load, run_spec(config).server_memory
    assert estimate is not None
    sizes = planner.sizes(config.model)
    by_rows = {
        rows: estimate(config.engine, load_apart(config, memory, sizes, rows), sizes, 1)
        for rows in (load.rows >> power for power in range(load.rows.bit_length()))
    }
    return _part(
        COPY,
        f"a copy of the policy and keys and values of {load.rows:,} rollouts",
        count=1,
        gpus=1,
        chosen=by_rows[load.rows],
        others={f"engine.max_rows={rows}": one for rows, one in by_rows.items()},
        limit=memory.machine.memory,
    )


def _role(key: str, role: RoleConfig, planner: Planner, memory: MemoryEstimate) -> Beside:
    assert role.model is not None
    model = ModelConfig(path=role.model, revision=role.revision)
    sizes = planner.sizes(model, f"{key}.model")
    load, gpus = memory.load, role.tensor_parallel_size
    limit = role.max_context or sizes.max_context or load.context
    engine_load = EngineLoad(
        rows=min(role.max_rows, load.in_flight),
        prompt=min(load.prompt, limit),
        sampled=min(load.context, limit),
        limit=limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,
        sharded=False,
        adapters=False,
    )
    return _part(
        key,
        f"{role.model}, {sizes.parameters:,} weights, of which each GPU has its part",
        count=role.count,
        gpus=gpus,
        chosen=role_memory(role, engine_load, sizes, gpus),
        others={
            f"{key}.tensor_parallel_size={more}": role_memory(role, engine_load, sizes, more)
            for more in TENSOR_PARALLEL
            if more > gpus
        },
        limit=memory.machine.memory,
    )


def _part(
    key: str,
    what: str,
    *,
    count: int,
    gpus: int,
    chosen: EngineMemory,
    others: Mapping[str, EngineMemory],
    limit: int | None,
) -> Beside:
    """Return a part that takes `chosen`, with the first of the `others` that fits if it does not.

    These are by their settings; `limit` is the bytes of a GPU.
    """
    is_enough = fits(chosen, limit)
    able = (text for text, one in others.items() if is_enough is False and fits(one, limit))
    return Beside(
        key=key,
        what=what,
        count=count,
        gpus=gpus,
        bytes=most(chosen),
        fits=is_enough,
        remedy=next(able, None),
    )


def lines(parts: Sequence[Beside]) -> Iterator[str]:
    """Yield the parts as text."""
    if not parts:
        return
    yield ""
    yield "beside the trainer's GPUs (computed, never run on GPUs)"
    yield f"{'':<18}{'GiB':>8}  of each GPU"
    for part in parts:
        gpus = f"{part.count} x {part.gpus} GPU{'s' * (part.gpus > 1)}"
        yield f"{part.key:<18}{part.bytes / GIB:8.2f}  {gpus}: {part.what}"
        if part.fits is False:
            remedy = part.remedy or "no known setting makes it fit; choose a smaller model"
            yield f"DOES NOT FIT: {part.key}; {remedy}"


def record(parts: Sequence[Beside]) -> list[dict[str, Any]]:
    """Return the parts for --json."""
    return [{"computed_only": True, **asdict(part)} for part in parts]
