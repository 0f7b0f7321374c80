"""What a sandboxed interpreter costs, by backend, beside a plain Python process.

    <backend>_first_ms      a rollout's first call: the sandbox starts (median)
    <backend>_next_ms       a later call of the rollout (median)
    <backend>_64_first_s    the first calls of 64 rollouts at once, until all are answered
    <backend>_64_next_s     the same for a later call
    <backend>_64_release_s  their end, until no process is left
    plain_first_ms          side by side: a fresh `python -I -S -c 1`, without any sandbox

Backends that do not work on this machine are left out.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable

import harness

from agenttrain.tools.sandbox.config import BACKENDS, SandboxSettings
from agenttrain.tools.sandbox.outside_process import base_python
from agenttrain.tools.sandbox.pool import Pool, usable_backend

ROLLOUTS = 64


def measure(quick: bool) -> dict[str, float]:
    """All figures; `quick` repeats less."""
    repeats = 5 if quick else 30
    figures: dict[str, float] = {}
    for backend in BACKENDS:
        try:
            usable_backend(backend)
        except ValueError as error:
            print(error)
            continue
        figures |= asyncio.run(of_backend(backend, repeats))
    plain = [timed_process() for _ in range(repeats)]
    return figures | {"plain_first_ms": 1e3 * statistics.median(plain)}


async def of_backend(backend: str, repeats: int) -> dict[str, float]:
    """One rollout after the other, then many at once."""
    pool = Pool(SandboxSettings(sandbox=backend, call_s=60.0), backend)
    first, following = [], []
    for number in range(repeats):
        first.append(await seconds(pool.call(f"r{number}", "python", "1")))
        following.append(await seconds(pool.call(f"r{number}", "python", "1")))
        await pool.release(f"r{number}")
    names = [f"r{number}" for number in range(ROLLOUTS)]
    return {
        f"{backend}_first_ms": 1e3 * statistics.median(first),
        f"{backend}_next_ms": 1e3 * statistics.median(following),
        **{
            f"{backend}_64_{what}_s": await seconds(
                asyncio.gather(*(pool.call(name, "python", "1") for name in names))
            )
            for what in ("first", "next")
        },
        f"{backend}_64_release_s": await seconds(
            asyncio.gather(*(pool.release(name) for name in names))
        ),
    }


async def seconds(work: Awaitable[object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def timed_process() -> float:
    """Seconds of a plain interpreter's start and end."""
    started = time.perf_counter()
    subprocess.run([base_python(), "-I", "-S", "-c", "1"], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
