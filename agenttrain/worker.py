"""One process of a run of several: what `launcher.py` starts, and what torchrun's ranks become.

The first rank has the terminal; the others write into <run>/logs/rank-<rank>.log. What stops one of
them goes to the terminal all the same.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from agenttrain.config.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED
from agenttrain.processes import EXCHANGE, Order

WATCH_S = 1.0
"""Between two looks at whether the launcher still lives."""
ORDER, CRASH = "order.json", "crash-{rank}.json"
"""Files of the exchange: what the launcher wants done; why a rank could not go on."""


def write_order(exchange: Path, order: Order) -> None:
    """For the workers that are to be started, with where they find modules."""
    text = json.dumps({"order": order.text(), "sys_path": sys.path})
    (exchange / ORDER).write_text(text, encoding="utf-8")


def read_crash(exchange: Path, rank: int) -> dict[str, Any]:
    """What a rank left: `time`, `error` in a line, `trace`; empty where it left nothing."""
    try:
        crash: dict[str, Any] = json.loads((exchange / CRASH.format(rank=rank)).read_text())
    except (OSError, ValueError):
        return {}
    return crash


def main() -> int:
    """The life of a worker; its exit code."""
    exchange = Path(os.environ[EXCHANGE])
    written = json.loads((exchange / ORDER).read_text(encoding="utf-8"))
    # As in the launcher: `-m` has put the current folder first, where it can hide a package.
    sys.path[:] = written["sys_path"]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    order = Order.parse(written["order"])
    try:
        from agenttrain.training.world import World  # torch comes with it

        world = World.start(timeout_s=order.composed().config.distributed.timeout_s)
        # Of the first node; another one composed the same, but may name the folder by its clock.
        order = Order.parse(world.broadcast(order.text(), "the settings"))
        return serve(order, world)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        rank = os.environ["RANK"]
        record = {"time": time.time(), "error": in_a_line(error), "trace": trace(error)}
        (exchange / CRASH.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")
        return code_of(error)


def serve(order: Order, world: Any) -> int:
    """Do the run's share of this process; raises what stops it, except on the first rank."""
    folder = Path(order.folder)
    if not world.is_main:
        _write_to(folder / "logs" / f"rank-{world.rank}.log")
    composed = order.composed()
    config, plain = composed.config, composed.plain
    from agenttrain.launch import launch

    return launch(config, plain, folder, order.verb, order.sweep, world=world)


def _write_to(path: Path) -> None:
    """Let everything that is printed from here on, by libraries in C too, go to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    faulthandler.enable()


def _end_with(launcher: int) -> None:
    """Stop when the launcher is gone: nobody would pass signals on, or notice a dead rank."""
    while os.getppid() == launcher:
        time.sleep(WATCH_S)
    print("the launcher of this process is gone: it stops", file=sys.stderr, flush=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def in_a_line(error: BaseException) -> str:
    """``ValueError: what it says``."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def trace(error: BaseException) -> str:
    """The traceback of an error that is nobody's mistake but ours; empty for others."""
    from agenttrain.types import AgenttrainError

    if isinstance(error, AgenttrainError | ValueError | OSError):
        return ""
    return "".join(traceback.format_exception(error))


def code_of(error: BaseException) -> int:
    """The exit code of a process that this stopped."""
    from agenttrain.config.errors import ConfigError

    return REFUSED if isinstance(error, ConfigError) else FAILED


def leave(code: int) -> None:
    """End the process with an exit code that nothing can change any more.

    The threads of a process group whose other members are gone may abort the interpreter's end.
    """
    import torch.distributed as dist

    if code == DONE and dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
