"""`agenttrain plan`: will the run fit, and if not, which setting makes it fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import RunConfig
from agenttrain.plan.estimate import GIB, Estimate, Machine, Part, Sharding, When
from agenttrain.plan.remedies import Planner, Remedy

PROMPT = 1024
"""Tokens of a prompt when nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for beside the overrides."""

    machine: Machine
    prompt_tokens: int
    as_json: bool


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Take the options out of the arguments; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="agenttrain plan", allow_abbrev=False, add_help=False)
    parser.add_argument("--gpu-memory-gb", type=float)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--distributed", choices=[str(kind) for kind in Sharding])
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.error = _refuse  # type: ignore[method-assign]
    parsed, rest = parser.parse_known_args(list(arguments))
    _check(parsed)
    default = Sharding.single if parsed.devices == 1 else Sharding.ddp
    memory = None if parsed.gpu_memory_gb is None else int(parsed.gpu_memory_gb * GIB)
    machine = Machine(
        devices=parsed.devices,
        sharding=Sharding(parsed.distributed or default),
        memory=memory if memory is not None or parsed.cpu else _found(),
        kind="cpu" if parsed.cpu else "cuda",
    )
    return Options(
        machine=machine, prompt_tokens=parsed.prompt_tokens, as_json=parsed.json
    ), rest


def _check(parsed: argparse.Namespace) -> None:
    for name, value, least in (
        ("--devices", parsed.devices, 1),
        ("--prompt-tokens", parsed.prompt_tokens, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} {value}: must be at least {least}")
    if parsed.gpu_memory_gb is not None and not 0 < parsed.gpu_memory_gb < float("inf"):
        raise ConfigError(f"--gpu-memory-gb {parsed.gpu_memory_gb:g}: must be more than 0")
    if parsed.devices > 1 and parsed.distributed == Sharding.single:
        raise ConfigError(
            f"--devices {parsed.devices} --distributed single: one process uses one GPU; take ddp "
            "or fsdp2"
        )


def _refuse(message: str) -> NoReturn:
    raise ConfigError(
        f"plan: {message}; its options are --gpu-memory-gb 80, --devices 8, --distributed ddp or "
        "fsdp2, --prompt-tokens 1024, --cpu, --json"
    )


def _found() -> int | None:
    """Bytes of the first GPU here."""
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def show(config: RunConfig, options: Options) -> int:
    """Print the plan. Exit code 1 where the run does not fit; raises ConfigError."""
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
        "devices": machine.devices,
        "distributed": str(machine.sharding),
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
    yield f"machine     {_machine(machine)}"
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


def _machine(machine: Machine) -> str:
    size = "" if machine.memory is None else f" of {machine.memory / GIB:.1f} GiB"
    if machine.kind == "cpu":
        return f"{machine.devices} process{'es' * (machine.devices > 1)} on CPU{size}"
    many = f", {machine.sharding}" if machine.devices > 1 else ""
    return f"{machine.devices} GPU{'s' * (machine.devices > 1)}{size}{many}"


def _row(part: Part) -> str:
    when = "" if part.when is When.always else f" ({part.when} only)"
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
