"""`agenttrain plan`: will the run fit, and if not, which setting makes it fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from agenttrain.config.distributed import DistributedName
from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import RunConfig
from agenttrain.plan.estimate import GIB, Estimate, Machine, Part, When
from agenttrain.plan.remedies import Planner, Remedy

PROMPT = 1024
"""Tokens of a prompt when nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for beside the overrides."""

    machine: Machine
    devices: int | None
    """GPUs, if it was said."""
    prompt_tokens: int
    as_json: bool


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Take the options out of the arguments; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="agenttrain plan", allow_abbrev=False, add_help=False)
    parser.add_argument("--gpu-memory-gb", type=float)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.error = _refuse  # type: ignore[method-assign]
    parsed, rest = parser.parse_known_args(list(arguments))
    _check(parsed)
    here = [] if parsed.cpu else _gpus_here()
    given = None if parsed.gpu_memory_gb is None else int(parsed.gpu_memory_gb * GIB)
    machine = Machine(
        devices=parsed.devices or len(here) or 1,
        memory=min(here, default=None) if given is None else given,
        kind="cpu" if parsed.cpu else "cuda",
    )
    return Options(
        machine=machine,
        devices=parsed.devices,
        prompt_tokens=parsed.prompt_tokens,
        as_json=parsed.json,
    ), rest


def _check(parsed: argparse.Namespace) -> None:
    for name, value in (
        ("--devices", parsed.devices),
        ("--prompt-tokens", parsed.prompt_tokens),
        ("--gpu-memory-gb", parsed.gpu_memory_gb),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value:g}: must be more than 0")


def _refuse(message: str) -> NoReturn:
    raise ConfigError(
        f"plan: {message}; its options are --gpu-memory-gb 80, --devices 8, --prompt-tokens 1024, "
        "--cpu, --json"
    )


def _gpus_here() -> list[int]:
    """Bytes of each."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [int(torch.cuda.get_device_properties(i).total_memory) for i in range(count)]


def _check_devices(config: RunConfig, asked: int | None) -> None:
    section = config.distributed
    if section.name is DistributedName.single and (asked or 1) > 1:
        raise ConfigError(
            f"--devices {asked}: distributed=single is one process; add distributed=ddp or "
            "distributed=fsdp2"
        )
    there = None if section.processes is None else section.processes * section.nodes
    if asked is not None and there not in (None, asked):
        raise ConfigError(
            f"--devices {asked}: distributed.processes={section.processes} and "
            f"distributed.nodes={section.nodes} are {there} of them; leave one out"
        )


def show(config: RunConfig, options: Options) -> int:
    """Print the plan. Exit code 1 where the run does not fit; raises ConfigError."""
    _check_devices(config, options.devices)
    planner = Planner(config, options.machine, options.prompt_tokens)
    found = planner.estimate()
    limit = options.machine.memory
    fits = None if limit is None else found.peak <= limit
    remedies = planner.remedies() if fits is False else []
    if options.as_json:
        print(json.dumps(_json(found, options, fits, remedies), indent=2))
    else:
        print("\n".join(_lines(config, planner, found, options, remedies)))
    return 1 if fits is False else 0


def _json(
    found: Estimate, options: Options, fits: bool | None, remedies: Sequence[Remedy]
) -> dict[str, Any]:
    machine = options.machine
    return {
        "devices": found.load.devices,
        "gpu_bytes": machine.memory,
        "parts": [asdict(part) for part in found.parts],
        "rollouts_bytes": found.at(When.rollouts),
        "update_bytes": found.at(When.update),
        "peak_bytes": found.peak,
        "fits": fits,
        "remedies": [{"overrides": r.overrides, "peak_bytes": r.peak} for r in remedies],
        "tokens": {
            "prompt": found.load.prompt,
            "rollout": found.load.context,
            "microbatch": found.load.packed,
            "rollouts_in_flight": found.load.rows,
        },
        "arithmetic": asdict(found.load.arithmetic),
    }


def _lines(
    config: RunConfig,
    planner: Planner,
    found: Estimate,
    options: Options,
    remedies: Sequence[Remedy],
) -> Iterator[str]:
    machine, load = options.machine, found.load
    sizes = planner.sizes(config.model)
    kind = type(sizes.model).__name__
    yield f"model       {config.model.path}: {kind}, {sizes.parameters:,} weights"
    yield f"machine     {_machine(config, machine, load.devices)}"
    yield (
        f"a rollout   {load.prompt:,} tokens of prompt (--prompt-tokens), at most {load.context:,} "
        "in all"
    )
    yield from load.arithmetic.lines()
    yield ""
    yield f"{'per process' if machine.kind == 'cpu' else 'per GPU':<18}{'GiB':>8}"
    for part in found.parts:
        yield _row(part)
    yield f"{'while sampling':<18}{found.at(When.rollouts) / GIB:8.2f}"
    yield f"{'while updating':<18}{found.at(When.update) / GIB:8.2f}"
    yield from _verdict(found, machine.memory, remedies)


def _machine(config: RunConfig, machine: Machine, devices: int) -> str:
    what = "GPU" if machine.kind == "cuda" else "process on a CPU"
    size = "" if machine.memory is None else f", {machine.memory / GIB:.1f} GiB each"
    return f"{devices} x {what}{size}, distributed={config.distributed.name}"


def _row(part: Part) -> str:
    when = "" if part.when is When.always else f" ({part.when} only)"
    when += " (in the host's memory, not counted)" * part.on_host
    return f"{part.name:<18}{part.bytes / GIB:8.2f}  {part.why}{when}"


def _verdict(found: Estimate, limit: int | None, remedies: Sequence[Remedy]) -> Iterator[str]:
    yield ""
    if limit is None:
        yield "whether it fits: say how large a GPU is, --gpu-memory-gb 80"
    elif found.peak <= limit:
        yield f"fits: {(limit - found.peak) / GIB:.2f} GiB to spare"
    else:
        yield (
            f"DOES NOT FIT: {found.peak / GIB:.2f} GiB of {limit / GIB:.2f}, the most while "
            f"{'updating' if found.largest is When.update else 'sampling'}"
        )
        yield from _told(remedies, limit)


def _told(remedies: Sequence[Remedy], limit: int) -> Iterator[str]:
    if remedies[0].peak > limit:
        yield "nothing known here makes it fit; the smallest that was found is"
    elif len(remedies) > 1:
        yield "each of these makes it fit:"
    else:
        yield "this makes it fit:"
    width = max(len(remedy.overrides) for remedy in remedies)
    for remedy in remedies:
        yield f"  {remedy.overrides:<{width}}  {remedy.peak / GIB:.2f} GiB"
