"""One process of a run of several: what `launcher.py` starts, and what torchrun's ranks become.

The first rank has the terminal; the others write into <run>/logs/rank-<rank>.log. What stops one of
them goes to the terminal all the same.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agenttrain.utils.exit_codes import DONE
from agenttrain.utils.output import protect
from agenttrain.utils.signals import listening

if TYPE_CHECKING:  # Ctrl-C is caught below from the first import on that takes its time
    from agenttrain.launch.orders import Order
    from agenttrain.training.world import World


TOLD = "signal.txt"
"""File of the exchange: which signal the launcher passes on, always as the same one."""
WATCH_S = 1.0
"""Seconds between two checks that the launcher still lives."""


def main() -> int:
    """Run a worker's life; return its exit code."""
    protect()
    exchange = Path(os.environ["AGENTTRAIN_EXCHANGE"])

    def signal_passed_on() -> str | None:
        try:
            return (exchange / TOLD).read_text()
        except OSError:
            return None

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with listening() as stop:  # before anything is imported that takes its time
        stop.passed_on = signal_passed_on
        try:
            from agenttrain.launch.orders import Order, read_order
            from agenttrain.training.world import World

            order = read_order(exchange)
            world = World.start(timeout_s=order.composed().config.distributed.timeout_s)
            # The first node's: another one composed the same, but may name the folder by its clock.
            order = Order.parse(world.broadcast(order.text(), "the settings"))
            return serve(order, world)
        except KeyboardInterrupt:
            from agenttrain.launch.orders import read_order, stop_code

            return stop_code(stop, read_order(exchange).verb)
        except BaseException as error:
            from agenttrain.launch.orders import code_of, write_crash

            write_crash(exchange, os.environ["RANK"], error)
            return code_of(error)


def serve(order: Order, world: World) -> int:
    """Do the run's share of this process; raises what stops it, except on the first rank."""
    folder = Path(order.folder)
    if not world.is_main:
        # Everything that is printed from now on, by libraries in C too, goes to a file.
        path = folder / "logs" / f"rank-{world.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        faulthandler.enable()
    composed = order.composed()
    config, plain = composed.config, composed.plain
    from agenttrain.runs.run import Run

    run = Run(
        verb=order.verb,
        config=config,
        plain=plain,
        folder=folder,
        sweep=order.sweep,
        world=world,
    )
    return run.execute()


def _end_with(launcher: int) -> None:
    """Stop when the launcher is gone: nobody would pass signals on, or notice a dead rank."""
    while os.getppid() == launcher:
        time.sleep(WATCH_S)
    print("the launcher of this process is gone: it stops", file=sys.stderr, flush=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def leave(code: int) -> None:
    """End the process with an exit code that nothing can change any more.

    The threads of a process group whose other members are gone may abort the interpreter's end.
    """
    if code == DONE:  # else a signal may have cut the import of torch short: it takes no second one
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
