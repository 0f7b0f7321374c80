"""Trackers of the tests' own: what the process of a tracker does with one that misbehaves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from agenttrain.tracking.backends.base import ExperimentTracker


class Recorded(ExperimentTracker):
    """Appends one line per call to `<shared>/<file>`; knows its last step if `knows`."""

    def __init__(self, file: str = "recorded.jsonl", knows: bool = False) -> None:
        self.name, self.knows = file, knows

    def start(self, run, config):
        self.path = run.shared / self.name
        steps = [row[1] for row in lines(self.path) if row[0] == "log"]
        self.add("start", run.id, run.started, config)
        return max(steps, default=0) if self.knows else None

    def log(self, step, metrics):
        self.add("log", step, metrics)

    def rollouts(self, step, records):
        self.add("rollouts", step, [record["rollout_id"] for record in records])

    def ended(self, how):
        self.how = str(how)

    def finish(self):
        self.add("finish", self.how)

    def add(self, *row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class KilledBeforeAcknowledgement(Recorded):
    """Dies once, after step 3 has arrived."""

    def flush(self):
        steps = [row[1] for row in lines(self.path) if row[0] == "log"]
        if steps[-1] == 3 and sum(row[0] == "start" for row in lines(self.path)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Recorded):
    """Hangs at step 2."""

    def log(self, step, metrics):
        if step == 2:
            time.sleep(600)
        super().log(step, metrics)


class Slow(Recorded):
    """Takes 0.3 s for a step."""

    def log(self, step, metrics):
        time.sleep(0.3)
        super().log(step, metrics)


class Unreachable(Recorded):
    """Is on the other side of a network that does not work until the file `network` exists."""

    def start(self, run, config):
        if not (run.shared / "network").exists():
            raise ConnectionError("no route to host")
        return super().start(run, config)


class LosesItsNetwork(Recorded):
    """Cannot be reached at its first table."""

    def rollouts(self, step, records):
        if sum(row[0] == "start" for row in lines(self.path)) == 1:
            raise TimeoutError("no answer")
        super().rollouts(step, records)


class WithoutItsLibrary(Recorded):
    """Needs a library that is not there."""

    def start(self, run, config):
        raise ImportError("No module named 'tracklib'")


def lines(path: Path) -> list[list]:
    """Return what a `Recorded` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
