"""The table and the curve of a recipe's page: its warm start, then a training run for each seed.

    python scripts/bench/recipe_table.py reverse_text --seeds 3 model.dtype=bfloat16
    python scripts/bench/recipe_table.py wordle --model my_model --seeds 3

Runs are folders below outputs/recipe_table/<recipe>/, and one that has finished is not made again,
so that an interrupted table goes on where it stopped. The warm start is `<recipe>_warmstart`, for a
recipe that has one and without `--model`. Prints a Markdown table and writes `curve.svg`, the mean
reward of the steps of each seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shop_table import AGENTTRAIN, scores

CONF = Path(__file__).resolve().parents[2] / "conf" / "experiment" / "recipes"
WIDTH, HEIGHT, MARGIN = 640, 320, 48
"""Pixels of the picture, and of the margin around its axes."""
COLOURS = ("#00796b", "#ef6c00", "#5c6bc0", "#8e24aa", "#546e7a")


def main() -> None:
    """Make the runs that are missing; print the table, write the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=sorted(file.stem for file in CONF.glob("*.yaml")))
    parser.add_argument("--model", help="the model to begin with (that of the recipe)")
    parser.add_argument("--seeds", type=int, default=3, help="0 … N-1 (3)")
    parser.add_argument("--quick", action="store_true", help="four tiny steps of one seed")
    parser.add_argument("--out", type=Path, default=Path("outputs/recipe_table"))
    parser.add_argument("overrides", nargs="*", help="of every run: model.dtype=bfloat16")
    arguments = parser.parse_intermixed_args()
    folder = arguments.out / arguments.recipe
    common = [*arguments.overrides, "tracker=none"]
    if arguments.quick:
        common += ["debug=tiny", "steps=4"]
    model = arguments.model
    has_warm_start = (CONF / f"{arguments.recipe}_warmstart.yaml").is_file()
    if has_warm_start and model is None:
        words = ["sft", f"experiment=recipes/{arguments.recipe}_warmstart", *common]
        warm_start = finished_run(folder / "warm_start", words)
        print(f"warm start: {warm_start['seconds'] / 60:.1f} min")
        model = str(folder / "warm_start" / warm_start["latest_checkpoint"])
    rows, curves = [], []
    for seed in range(1 if arguments.quick else arguments.seeds):
        words = [f"experiment=recipes/{arguments.recipe}", *common, f"seed={seed}"]
        words += [] if model is None else [f"model.path={model}"]
        summary = finished_run(folder / f"seed-{seed}", words)
        rows.append(line(seed, summary))
        curves.append(rewards(folder / f"seed-{seed}"))
    head = ["seed", "sampled before", "after", "greedy before", "after", "steps", "minutes"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    print("\n".join(rows))
    (folder / "curve.svg").write_text(picture(curves), encoding="utf-8")
    print(folder / "curve.svg")


def finished_run(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the summary of the run in a folder, which is made or continued unless it is done."""
    summary = folder / "summary.json"
    if summary.is_file():
        done = json.loads(summary.read_text(encoding="utf-8"))
        if done["status"] == "finished":
            return done
    command = [*AGENTTRAIN, *words, "resume=auto", f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True)
    return json.loads(summary.read_text(encoding="utf-8"))


def line(seed: int, summary: dict[str, Any]) -> str:
    """Return the table's row of a run."""
    before, after = (scores(summary["eval"][when]) for when in ("before", "after"))
    cells = [
        seed,
        f"{before['sampled']:.3f} ± {before['half']:.3f}",
        f"{after['sampled']:.3f} ± {after['half']:.3f}",
        f"{before['greedy']:.2f}",
        f"{after['greedy']:.2f}",
        summary["steps"],
        f"{summary['seconds'] / 60:.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def rewards(folder: Path) -> list[float]:
    """Return the mean reward of each step of a run; a step without one repeats the last."""
    values: list[float] = []
    for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        value = json.loads(text)["reward"]
        values.append(value if value is not None else (values or [0.0])[-1])
    return values


def picture(curves: Sequence[Sequence[float]]) -> str:
    """Return an SVG of the curves, one for each seed, over steps from 1 and rewards from 0 up."""
    steps = max(map(len, curves))
    top = max(1.0, *(max(curve) for curve in curves))

    def place(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - 1) / max(steps - 1, 1)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * max(value, 0.0) / top
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (left, y), (right, _) = (place(step, share * top).split(",") for step in (1, steps))
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y}">{share * top:.2f}</text>')
    for step in sorted({1, (1 + steps) // 2, steps}):
        x = place(step, 0.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 24}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for seed, curve in enumerate(curves):
        points = " ".join(place(step, value) for step, value in enumerate(curve, start=1))
        colour = COLOURS[seed % len(COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{WIDTH - 44}" y="{20 + 14 * seed}" fill="{colour}">seed {seed}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
