"""Results of a sweep's jobs: figures of their summary.json and metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agenttrain.config.sweep_settings import SUMMARY
from agenttrain.tracking.metrics_file import read_metrics
from agenttrain.tracking.run_folder import read_summary


def result(folder: Path, name: str) -> float | None:
    """Return the figure `name` of a run: see `sweep.objective`; None where there is none."""
    return results(folder).get(name)


def results(folder: Path) -> dict[str, float]:
    """Return all figures of a run: `eval/<name>`, those of SUMMARY, and metrics.jsonl's last row.

    Example: ``{"eval/pass@1": 0.5, "eval/reward": 0.5, "seconds": 93.0, "reward": 0.41, …}``
    """
    summary = read_summary(folder)
    last = curves(folder)[-1:] or [{}]
    after = summary.get("eval", {}).get("after", {})
    return {
        **{f"eval/{name}": value for name, value in _numbers(after).items()},
        **{name: value for name, value in _numbers(summary).items() if name in SUMMARY},
        **{name: value for name, value in _numbers(last[0]).items() if name != "step"},
    }


def curves(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; none for a run that has no such file."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
