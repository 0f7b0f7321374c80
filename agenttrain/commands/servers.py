"""`agenttrain servers`: the servers of a run, as it sees them, while it goes on and afterwards."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.engines.registry import names_with, specs
from agenttrain.types import ConfigError

COLUMNS = ("server", "state", "version", "in flight", "completions", "boot", "address")


def servers(args: Namespace) -> int:
    """Print the servers of a run, with the last lines of each log; raises ConfigError."""
    folder = args.folder
    # A run has one engine, and only that engine finds records of its servers.
    records = (
        spec.read_servers(folder, args.lines) for spec in specs().values() if spec.read_servers
    )
    status = next((record for record in records if record is not None), None)
    if status is None:
        raise ConfigError(
            f"{folder}: no servers of a run have been here; a run with "
            f"{names_with(fleet=True)} has some"
        )
    write_report(status, args.json)
    if args.json != STDOUT:  # there the JSON takes the place of the text
        _print(folder, status)
    return 0


def _print(folder: Path, status: dict[str, Any]) -> None:
    """Print the table of servers, how they ended, and the last lines of their logs."""
    console = Console(highlight=False)
    age = max(time.time() - status["time"], 0)
    if status["ended"]:
        note = f"the run has ended, {_ago(age)} ago; its servers were then"
    elif status["running"]:
        note = f"as of {_ago(age)} ago"
    else:
        note = f"the run was killed; as of {_ago(age)} ago"
    console.print(f"{folder}: {note}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        is_number = column in ("version", "in flight", "completions", "boot")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in status["servers"]:
        version = "-" if row["version"] is None else str(row["version"])
        numbers = [version, *(str(row[key]) for key in ("requests", "completions", "boot"))]
        name = " ".join(filter(None, (row["role"], str(row["number"]))))
        table.add_row(name, row["state"], *numbers, row["url"] or "-")
    console.print(table)
    for row in status["servers"]:
        if row["reason"] and row["state"] != "live":
            server = f"{row['role']} server".strip()
            console.print(f"{server} {row['number']} {row['reason']}", soft_wrap=True)
        for line in row["log"]:
            mark = f"{row['role']} {row['number']}".strip()
            console.print(f"  {mark}| {line}", soft_wrap=True, markup=False)


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
