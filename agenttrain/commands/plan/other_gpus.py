"""GPU memory of the other processes: the rollout process's copy of the policy, and role servers.

Everything here is computed and has never been run on a GPU. The policy's servers are in
`servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.plan.servers import TENSOR_PARALLEL, fits, peak_bytes, server_load
from agenttrain.engines.memory import EngineLoad, EngineMemory
from agenttrain.engines.vllm_server.config import RoleConfig
from agenttrain.engines.vllm_server.server_memory import role_memory
from agenttrain.runs.memory_plan import GIB, MemoryEstimate, has_policy_copy
from agenttrain.settings.engine_checks import run_spec
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import ModelConfig

COPY = "rollout process"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpus:
    """Plan of a part of the run with GPUs beside the trainer's, such as a judge's servers."""

    key: str
    """``rollout process``, or the section of a role: ``roles.judge``."""
    what: str
    """Contents of the GPUs in words: ``a copy of the policy and keys and values of 6 rollouts``."""
    count: int
    """Number of processes or servers."""
    gpus: int
    """GPUs of each of them."""
    bytes: int
    """Bytes that it needs on each GPU, at its peak."""
    fits: bool | None
    """None: the GPUs' memory is not known."""
    remedy: str | None
    """Setting with which it fits. None: it fits, or no setting is known."""


def plan_other_gpus(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> list[OtherGpus]:
    """Return the parts of the run with GPUs beside the trainer's. On a CPU there are none."""
    machine = memory.machine
    if machine.kind == "cpu":
        return []
    parts = []
    # A copy that shares the trainer's GPU is counted there.
    if has_policy_copy(config) and not machine.shared:
        parts.append(_plan_copy(config, planner, memory))
    for name, role in used_roles(config, "train").items():
        parts.append(_plan_role(f"roles.{name}", role, planner, memory))
    return parts


def _plan_copy(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> OtherGpus:
    """Plan the rollout process's copy of the policy, on one GPU.

    If it does not fit, `_plan_part` proposes the first smaller engine.max_rows with which it does.
    """
    load, estimate = memory.load, run_spec(config).server_memory
    assert estimate is not None  # engines that sample from a copy have one
    sizes = planner.sizes(config.model)
    # The present number of rows and its halves. The present one is among the remedies too, but is
    # never proposed: remedies are tried only if it does not fit.
    halves = [load.rows >> power for power in range(load.rows.bit_length())]  # 12, 6, 3, 1
    # The last argument, 1, is the number of GPUs that divide the weights.
    by_rows = {
        rows: estimate(config.engine, server_load(config, memory, sizes, rows), sizes, 1)
        for rows in halves
    }
    return _plan_part(
        COPY,
        f"a copy of the policy and keys and values of {load.rows:,} rollouts",
        count=1,
        gpus=1,
        estimate=by_rows[load.rows],
        remedies={f"engine.max_rows={rows}": smaller for rows, smaller in by_rows.items()},
        limit=memory.machine.memory,
    )


def _plan_role(key: str, role: RoleConfig, planner: Planner, memory: MemoryEstimate) -> OtherGpus:
    """Plan the servers of a role. Its remedies give each server more GPUs."""
    assert role.model is not None
    model = ModelConfig(path=role.model, revision=role.revision)
    sizes = planner.sizes(model, f"{key}.model")
    load, gpus = memory.load, role.tensor_parallel_size
    # Most tokens of a sequence. (Below, `limit` of `_plan_part` is in bytes of a GPU.)
    limit = role.max_context or sizes.max_context or load.context
    engine_load = EngineLoad(
        rows=min(role.max_rows, load.in_flight),  # one request for each rollout in flight
        prompt=min(load.prompt, limit),
        # Tokens of a whole sequence, prompt included. How long the role's own sequences are is not
        # known. A judge reads whole rollouts: they are planned as long as one of the run.
        sampled=min(load.context, limit),
        limit=limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,  # the servers have their GPUs and weights to themselves
        sharded=False,
        adapters=False,
    )
    return _plan_part(
        key,
        f"{role.model}, {sizes.parameters:,} weights, of which each GPU has its part",
        count=role.count,
        gpus=gpus,
        estimate=role_memory(role, engine_load, sizes, gpus),
        remedies={
            f"{key}.tensor_parallel_size={more}": role_memory(role, engine_load, sizes, more)
            for more in TENSOR_PARALLEL
            if more > gpus
        },
        limit=memory.machine.memory,
    )


def _plan_part(
    key: str,
    what: str,
    *,
    count: int,
    gpus: int,
    estimate: EngineMemory,
    remedies: Mapping[str, EngineMemory],
    limit: int | None,
) -> OtherGpus:
    """Return the plan of a part of the run, with a remedy if it does not fit GPUs of `limit` bytes.

    The part has `count` processes or servers of `gpus` GPUs each. `remedies` maps settings to the
    estimates with them; the first that fits is taken.
    """
    fits_gpu = fits(estimate, limit)
    remedy = None
    if fits_gpu is False:
        remedy = next((text for text, smaller in remedies.items() if fits(smaller, limit)), None)
    return OtherGpus(
        key=key,
        what=what,
        count=count,
        gpus=gpus,
        bytes=peak_bytes(estimate),
        fits=fits_gpu,
        remedy=remedy,
    )


def lines(parts: Sequence[OtherGpus]) -> Iterator[str]:
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


def record(parts: Sequence[OtherGpus]) -> list[dict[str, Any]]:
    """Return the parts as --json prints them."""
    return [{"computed_only": True, **asdict(part)} for part in parts]
