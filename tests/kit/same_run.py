"""Two runs compared to the bit: what a run that was stopped must share with one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from agenttrain.tracking.names import depends_on_clock


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock; a torn last one is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, which may be in several files."""
    files = sorted((folder / "checkpoints" / "latest").glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(folder: Path, reference: Path) -> None:
    """Metrics and final weights, to the bit."""
    assert metrics(folder) == metrics(reference) != []
    assert_same_weights(folder, reference)


def assert_same_weights(folder: Path, reference: Path) -> None:
    """Final weights, to the bit."""
    mine, theirs = (saved_weights(path) for path in (folder, reference))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
