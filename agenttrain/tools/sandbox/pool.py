"""Outside: a sandbox for each rollout, shared by the tools that have the same settings."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

from agenttrain.tools.sandbox.config import BACKENDS, SandboxSettings
from agenttrain.tools.sandbox.outside_process import Jail, SandboxError
from agenttrain.tools.sandbox.session import (
    CodeOutcome,
    End,
    check_code,
    join_lines,
    run_call,
)
from agenttrain.types import ToolFailure, ToolUnavailable
from agenttrain.utils.signals import signal_name

PROBE = 'import subprocess; print(6 * 7, subprocess.run(["/bin/sh", "-c", "exit 3"]).returncode)'
PROBE_PRINTS = "42 3"
LOST = "The session is ended: its variables, files and processes are lost"
# Ends after which the sandbox is dead.
END_REASONS = {
    End.timeout: "the code ran longer than {call_s:g} s",
    End.memory: "the code and its files took more than {memory_mb} MB of memory",
    End.flood: "the code printed without end",
    End.full: "the processes left behind by earlier calls are as many as are allowed",
    End.broken: "the interpreter's own connection was tampered with",
}


DEFAULTS = SandboxSettings()
_pools: dict[SandboxSettings, Pool] = {}


class Pool:
    """The sandboxes of all rollouts under one kind of settings, until `release`."""

    def __init__(self, settings: SandboxSettings, backend: str) -> None:
        self._settings, self._backend = settings, backend
        self._jails: dict[str, Jail] = {}
        """Rollout -> its sandbox."""
        self._ending: dict[Jail, str] = {}
        """Killed sandbox whose processes may still run -> its rollout."""
        self._lost: dict[str, str] = {}
        """Rollout -> why its sandbox was lost during a call whose text the model did not get. The
        text of the next call says so."""
        self._open_tools = 0
        """Tools that use this pool and are not closed."""

    @classmethod
    def of(cls, settings: SandboxSettings) -> Pool:
        """Return the pool for these settings; raises ValueError if no sandbox can be made here.

        Settings that differ only in limits of a call share a pool: those come with each call.
        """
        settings = replace(settings, call_s=DEFAULTS.call_s, max_chars=DEFAULTS.max_chars)
        if settings not in _pools:
            _pools[settings] = cls(settings, usable_backend(settings.sandbox))
        pool = _pools[settings]
        pool._open_tools += 1
        return pool

    async def call(
        self, rollout_id: str, kind: str, code: str, settings: SandboxSettings | None = None
    ) -> str:
        """Run code in a rollout's sandbox; return its output. `settings` has this call's limits.

        Raises ToolFailure if the code failed or was ended, ToolUnavailable if the sandbox failed.
        """
        check_code(code)
        settings = settings or self._settings
        while True:
            if rollout_id not in self._jails:
                self._jails[rollout_id] = Jail(self._settings, self._backend)
            jail = self._jails[rollout_id]
            await jail.lock.acquire()
            if self._jails.get(rollout_id) is jail:
                break
            # An earlier call ended this sandbox while we waited for its lock: take a new one.
            jail.lock.release()
        was_used = jail.started
        try:
            if not was_used:
                await jail.start()
            outcome = await run_call(jail, kind, code, settings)
        except SandboxError as error:
            if was_used:  # a new sandbox had nothing of the model's to lose
                self._lost[rollout_id] = "The sandbox broke down"
            raise ToolUnavailable(f"tool {kind}: the sandbox is broken: {error}") from error
        except asyncio.CancelledError:
            # Also in a new sandbox: the model reads of a timeout, not that its files are lost.
            self._lost[rollout_id] = "The call before took too long"
            raise
        finally:
            if not jail.alive:
                self._end(rollout_id, jail)
            jail.lock.release()
        return self._make_text(rollout_id, kind, outcome, settings)

    async def release(self, rollout_id: str) -> None:
        """End a rollout's sandbox, and wait until nothing of it is left."""
        self._lost.pop(rollout_id, None)
        if rollout_id in self._jails:
            self._end(rollout_id, self._jails[rollout_id])
        for jail in [j for j, owner in self._ending.items() if owner == rollout_id]:
            await jail.wait()
            self._ending.pop(jail, None)

    async def close(self) -> None:
        """Count a tool as closed. With the last tool, all sandboxes end."""
        self._open_tools -= 1
        if self._open_tools > 0:
            return
        # Another pool may stand under these settings: `of` did not make this one, or it was closed
        # before and has a successor.
        if _pools.get(self._settings) is self:
            del _pools[self._settings]
        # Rollouts with a sandbox in use, and those with a killed one whose end `release` awaits.
        rollout_ids = {*self._jails, *self._ending.values()}
        for rollout_id in rollout_ids:
            await self.release(rollout_id)

    def _end(self, rollout_id: str, jail: Jail) -> None:
        """Kill a sandbox without waiting; `release` waits for its end."""
        jail.kill()
        if self._jails.get(rollout_id) is jail:
            del self._jails[rollout_id]
        self._ending[jail] = rollout_id

    def _make_text(
        self, rollout_id: str, kind: str, outcome: CodeOutcome, settings: SandboxSettings
    ) -> str:
        """Make the text that the model reads; raises ToolFailure with it for a failed call.

        A bash command with an exit status other than 0 is no failure. If an earlier call lost the
        rollout's sandbox, the text says so once.
        """
        text, end, status = outcome.output, outcome.end, outcome.status
        # LOST says that the session is gone: with an earlier call, or with this one.
        if earlier_loss := self._lost.pop(rollout_id, None):
            text = join_lines(f"[{earlier_loss}. {LOST}]", text)
        if end in END_REASONS:  # this call's end killed the sandbox
            reason = END_REASONS[end].format(call_s=settings.call_s, memory_mb=settings.memory_mb)
            raise ToolFailure(join_lines(text, f"[{reason}. {LOST}]"))
        if end is End.exited:  # only the interpreter ended; the next call starts another
            name = "the interpreter" if kind == "python" else "the shell"
            what_happened = f"exited with status {status}"
            if status < 0:
                what_happened = f"was killed by {signal_name(-status)}"
            note = f"[{name} {what_happened}; its variables are lost, files are kept]"
            raise ToolFailure(join_lines(text, note))
        # The interpreter goes on after `failed`: the code raised, or a command's status is not 0.
        if end is End.failed and kind == "bash":
            return join_lines(text, f"[exit status {status}]")
        if end is End.failed:  # Python code raised, and printed the traceback
            raise ToolFailure(text)
        return text or "(no output)"


@cache
def usable_backend(choice: str) -> str:
    """Return the first backend that works on this machine, as a trial sandbox shows.

    Raises ValueError, which begins ``sandbox=…``, with the problem of each backend and a remedy.
    """
    if choice == "none":
        return choice
    problems = []
    for backend in BACKENDS if choice == "required" else (choice,):
        problem: str | None = "namespaces are Linux's"
        if sys.platform == "linux":
            # In a thread: this one may have a running event loop.
            with ThreadPoolExecutor(1) as thread:
                problem = thread.submit(asyncio.run, _probe(backend)).result()
        if problem is None:
            return backend
        problems.append(f"{backend}: {problem}")
    raise ValueError(
        f"sandbox={choice}: no sandbox can be made on this machine ({'; '.join(problems)}); it "
        "takes Linux 5.14 with user namespaces (sysctl user.max_user_namespaces above 0) or root, "
        "and `apt-get install bubblewrap` where only that may make them; sandbox=none runs the "
        "model's code without one, as this user and with the network"
    )


async def _probe(backend: str) -> str | None:
    """Run a program in a trial sandbox; return the problem, or None if it works."""
    pool = Pool(SandboxSettings(sandbox=backend), backend)
    try:
        printed = await pool.call("probe", "python", PROBE)
    except (ToolFailure, ToolUnavailable) as error:
        printed = str(error).rpartition("is broken: ")[2]  # the reason alone
    finally:
        await pool.release("probe")
    return None if printed == PROBE_PRINTS else printed
