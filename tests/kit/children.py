"""Runs of the command line in processes of their own, which a signal meets at a chosen moment.

The processes are forked from one that has imported everything. What sends the signal stands outside
of the package: hooks of torch and of the interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["agenttrain.runs.run", "agenttrain.cli"])
PATIENCE_S = 600
"""Only a run that hangs takes so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The `nth` event of a kind after `steps` optimizer steps of this process.

    `kind`: `decode` (a forward pass without a gradient), `update` (an optimizer step begins), or
    `checkpoint` (the run touches a file or folder under checkpoints/).
    """

    kind: str
    steps: int = 0
    nth: int = 1
    number: int = signal.SIGKILL
    times: int = 1
    """How often it is sent."""
    apart_s: float = 0.0
    """Between two of them."""
    delay_s: float = 0.0
    action: Callable[[], None] | None = None
    """What to do instead."""


def arm(moment: Moment) -> None:
    """Have this process send itself the signal, or act, at that moment."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    counts = {"steps": 0, "events": 0}

    def event(kind: str) -> None:
        if kind == moment.kind and counts["steps"] == moment.steps:
            counts["events"] += 1
            if counts["events"] == moment.nth:
                time.sleep(moment.delay_s)
                if moment.action is not None:
                    return moment.action()
                for sent in range(moment.times):
                    time.sleep(moment.apart_s if sent else 0)
                    os.kill(os.getpid(), moment.number)

    def forward(module: object, inputs: object) -> None:
        if not torch.is_grad_enabled():
            event("decode")

    def step(optimizer: object, arguments: object, keywords: object) -> None:
        event("update")
        counts["steps"] += 1

    def audit(name: str, arguments: tuple) -> None:
        if name.startswith(("open", "os.", "shutil.")) and any(
            isinstance(a, str | os.PathLike) and "/checkpoints" in os.fspath(a) for a in arguments
        ):
            event("checkpoint")

    torch.nn.modules.module.register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(step)
    sys.addaudithook(audit)


def _redirect(log: Path) -> None:
    """A process group of its own, and output into a file."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _main(arguments: Sequence[str], log: Path, prepare: Callable[[], None] | None) -> None:
    _redirect(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    from agenttrain.cli import main

    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: -9 for SIGKILL; and what it printed."""

    code: int
    said: str


def _call(function: Callable[[], None], log: Path) -> None:
    _redirect(log)
    import torch

    torch.set_num_threads(1)
    function()


def in_child(function: Callable[[], None], log: Path) -> None:
    """Call a function of a module in a process of its own; what it raises is told here."""
    process = CONTEXT.Process(target=_call, args=(function, log))
    process.start()
    try:
        process.join(PATIENCE_S)
    finally:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    assert process.exitcode == 0, log.read_text()


def agenttrain(*arguments: str, log: Path, prepare: Callable[[], None] | None = None) -> Ended:
    """Run a command to its end, or to that of `prepare`'s making, which is called before it."""
    start = log.stat().st_size if log.exists() else 0
    process = CONTEXT.Process(target=_main, args=(arguments, log, prepare))
    process.start()
    try:
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"the run hangs: {log.read_text()[start:]}"
    finally:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return Ended(process.exitcode, log.read_bytes()[start:].decode())
