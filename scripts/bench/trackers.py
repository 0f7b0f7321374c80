"""CPU time of a run's own process with all four trackers, beside the same run with none.

Runs of the bundled agent in pairs, one with `tracker=[trackio,wandb,tensorboard,mlflow]` (wandb
offline) and one with `tracker=none`, the order alternating from pair to pair. The CPU time is that
of the process of the run with its threads; the trackers' processes are not it.

    cpu_ratio                 median over nine pairs of CPU seconds with / without
    cpu_ratio_upper           upper bound of that median at 95 %: the second largest of the nine, as
                              two or more of nine above the median are seen in 98 % of cases
    cpu_s_none, cpu_s_all     median CPU seconds of a run
    wall_ratio                median of wall seconds with / without; the trackers share the cores
    trackers_cpu_s            median CPU seconds of the four trackers' processes together
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import harness

PAIRS = 9
RUN = """
import json, resource, sys, time
from agenttrain.cli import main
started = time.perf_counter()
code = main(sys.argv[1:])
children = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = {"cpu_s": time.process_time(), "wall_s": time.perf_counter() - started}
seconds["children_s"] = children.ru_utime + children.ru_stime
print(json.dumps({"code": code, **seconds}))
"""


def measure(quick: bool) -> dict[str, float]:
    """Run the pairs."""
    settings = ("steps=6", "algorithm.group_size=4") if quick else ("steps=40",)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), "all", settings)  # warms caches of files
        pairs = []
        for number in range(PAIRS):
            order = ("none", "all") if number % 2 else ("all", "none")
            pairs.append({name: run(Path(folder) / str(number), name, settings) for name in order})
    ratios = sorted(pair["all"]["cpu_s"] / pair["none"]["cpu_s"] for pair in pairs)
    children = [pair["all"]["children_s"] - pair["none"]["children_s"] for pair in pairs]
    return {
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratio_upper": ratios[-2],
        "cpu_s_none": statistics.median(pair["none"]["cpu_s"] for pair in pairs),
        "cpu_s_all": statistics.median(pair["all"]["cpu_s"] for pair in pairs),
        "wall_ratio": statistics.median(
            pair["all"]["wall_s"] / pair["none"]["wall_s"] for pair in pairs
        ),
        "trackers_cpu_s": statistics.median(children),
    }


def run(folder: Path, name: str, settings: Sequence[str]) -> dict[str, float]:
    """Run the bundled agent with `all` or `none` of the trackers, in a process of its own."""
    trackers = {"none": "none", "all": "[trackio,wandb,tensorboard,mlflow]"}[name]
    arguments = (f"tracker={trackers}", *settings, "eval.questions=10")
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    for variable in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        environment.pop(variable, None)
    command = [sys.executable, "-c", RUN, *arguments, f"hydra.run.dir={folder}/shop/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    last = done.stdout.strip().splitlines()[-1:]
    figures = json.loads(last[0]) if last and last[0].startswith("{") else {"code": 1}
    if figures["code"] or "have arrived" in done.stdout:
        raise SystemExit(f"the run with tracker={trackers} failed:\n{done.stdout}{done.stderr}")
    return figures


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
