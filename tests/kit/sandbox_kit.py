"""Calls into real sandboxes, for tests: what the model would read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from agenttrain.tools.sandbox.config import BACKENDS, SandboxSettings
from agenttrain.tools.sandbox.pool import Pool, usable_backend
from agenttrain.types import ToolFailure


def usable(wanted: str) -> str:
    """The backend; where there is none the test is skipped, with the reason and what would help."""
    try:
        return usable_backend(wanted)
    except ValueError as error:
        pytest.skip(str(error))


def each_backend() -> Any:
    """Run a test with the backend that a run would take, and in the slow tests with each."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]
    return pytest.mark.parametrize("backend", ["required", *slow])


def calls(backend: str, *codes: str | tuple[str, str], **limits: Any) -> list[str]:
    """Replies to calls of one rollout, one after the other; afterwards no process is left.

    A call is Python code, or ``("bash", command)``. Errors begin with ``Error: ``.
    """
    settings = SandboxSettings(sandbox=usable(backend), **limits)
    before = set(psutil.Process().children(recursive=True))
    replies = asyncio.run(_calls(settings, codes))
    assert set(psutil.Process().children(recursive=True)) - before == set()
    return replies


async def _calls(settings: SandboxSettings, codes: Sequence[str | tuple[str, str]]) -> list[str]:
    pool = Pool(settings, settings.sandbox)
    replies = []
    for code in codes:
        kind, text = ("python", code) if isinstance(code, str) else code
        replies.append(await reply(pool, "r", kind, text))
    await pool.release("r")
    return replies


async def reply(pool: Pool, rollout: str, kind: str, code: str) -> str:
    """What the model reads."""
    try:
        return await pool.call(rollout, kind, code)
    except ToolFailure as error:
        return f"Error: {error}"
