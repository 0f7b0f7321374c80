"""Messages between the processes of a run, in files and text: what to do, and why they stopped.

A launcher and its workers share a folder, the exchange.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agenttrain.config.compose import Composed, convert
from agenttrain.config.errors import ConfigError
from agenttrain.config.exit_codes import FAILED, INTERRUPTED, PREEMPTED, REFUSED, TERMINATED
from agenttrain.config.schema import RunPart
from agenttrain.signals import StopRequest
from agenttrain.types import AgenttrainError

EXCHANGE = "AGENTTRAIN_EXCHANGE"
"""Environment: the folder where a launcher and its workers leave each other files."""
ORDER, CRASH = "order.json", "crash-{rank}.json"
"""Files of the exchange: what the launcher wants done; why a rank could not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run as plain data: what the process that composed it tells the others."""

    plain: dict[str, Any]
    resume: str | None
    folder: str
    verb: str
    sweep: bool = False
    resume_changed: tuple[str, ...] = ()
    """Settings changed for this resume only: `plain` does not have them."""

    @classmethod
    def of(cls, composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> Order:
        """The order to run `verb` in `folder`."""
        return cls(
            plain=composed.plain,
            resume=composed.config.resume,
            folder=str(folder),
            verb=verb,
            sweep=sweep,
            resume_changed=tuple(map(str, composed.config.resume_changed)),
        )

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read an order that `text` wrote."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))

    def composed(self) -> Composed:
        """Return the settings."""
        composed = convert(self.plain)
        composed.config.resume = self.resume
        composed.config.resume_changed = [RunPart(name) for name in self.resume_changed]
        return composed


def write_order(exchange: Path, order: Order) -> None:
    """Write the order for the workers that are to be started, with where they find modules."""
    text = json.dumps({"order": order.text(), "sys_path": sys.path})
    (exchange / ORDER).write_text(text, encoding="utf-8")


def read_order(exchange: Path) -> Order:
    """Read what `write_order` wrote; from now on modules are found as in the launcher."""
    record = json.loads((exchange / ORDER).read_text(encoding="utf-8"))
    # `python -m` has put the current folder first, where it can hide a package.
    sys.path[:] = record["sys_path"]
    return Order.parse(record["order"])


def write_crash(exchange: Path, rank: str, error: BaseException) -> None:
    """Write why a rank cannot go on, for the launcher to report."""
    from agenttrain.training.world import PeerFailed  # only here: torch comes with it

    record = {
        **{"time": time.time(), "error": in_a_line(error), "trace": trace(error)},
        "of_peer": isinstance(error, PeerFailed),
    }
    (exchange / CRASH.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")


def read_crash(exchange: Path, rank: int) -> dict[str, Any]:
    """Read the crash that a rank recorded: `time`, `error` in a line, `trace`, and `of_peer` where
    another rank caused it; empty where it recorded nothing."""
    try:
        crash: dict[str, Any] = json.loads((exchange / CRASH.format(rank=rank)).read_text())
    except (OSError, ValueError):
        return {}
    return crash


def in_a_line(error: BaseException) -> str:
    """``ValueError: what it says``; of a ConfigError only that, which says it all."""
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def trace(error: BaseException) -> str:
    """The traceback of an error that is nobody's mistake but ours; empty for others."""
    if isinstance(error, AgenttrainError | ValueError | OSError):
        return ""
    return "".join(traceback.format_exception(error))


def code_of(error: BaseException) -> int:
    """The exit code of a process that this stopped."""
    return REFUSED if isinstance(error, ConfigError) else FAILED


def stop_code(stop: StopRequest, verb: str) -> int:
    """The exit code of a process that was interrupted before there was anything to save."""
    if not stop.at_once:
        return INTERRUPTED
    return TERMINATED if stop.insisted or verb == "eval" else PREEMPTED
