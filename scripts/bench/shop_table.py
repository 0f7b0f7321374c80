"""The table of docs/benchmarks.md: training runs over seeds, warm starts, algorithms.

Every row is one whole `agenttrain` run in a process of its own, then two evaluations of its last
checkpoint and of its warm start on unseen phrasings. Results go to FILE as they come, one JSON
object a line, so that an interrupted table goes on where it stopped. The flat figures:

    grpo_before / grpo_after / grpo_after_lowest     sampled reward, unseen databases
    grpo_phrasing                                    sampled reward after, unseen phrasings as well
    grpo_hops_<n>_before / grpo_hops_<n>_after       by number of chained queries, mean over runs
    grpo_steps                                       of the longest run: stop_when ends it
    grpo_seconds                                     of training, longest run
    rloo_…                                           the same for RLOO
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

AGENTTRAIN = [sys.executable, "-m", "agenttrain.cli"]
WARM = "AAABB"
"""Warm start by seed: A is the shipped model or `--model`, B one of another seed."""


def main() -> None:
    """Make the rows that FILE lacks, print the table, and the figures as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm-b", type=Path, help="folder of warm start B; none: A alone")
    parser.add_argument("--experiment", default="shop")
    parser.add_argument("--model", help="warm start A (bundled:EXPERIMENT)")
    parser.add_argument("--seeds", type=int, default=5, help="per algorithm (5)")
    parser.add_argument("--questions", type=int, default=400, help="of each evaluation (400)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--rows", type=Path, default=Path("outputs/shop_table.jsonl"))
    parser.add_argument("--quick", action="store_true", help="one tiny run per algorithm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("overrides", nargs="*", help="of every run: model.dtype=bfloat16")
    arguments = parser.parse_args()
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    done = read(arguments.rows)
    made = {(row["algorithm"], row["seed"]) for row in done}
    missing = [
        (algorithm, seed)
        for algorithm in ("grpo", "rloo")
        for seed in range(1 if arguments.quick else arguments.seeds)
        if (algorithm, seed) not in made and (WARM[seed] == "A" or arguments.warm_b is not None)
    ]

    def one(algorithm: str, seed: int) -> dict[str, Any]:
        model = arguments.model or f"bundled:{arguments.experiment}"
        if WARM[seed] == "B":
            model = str(arguments.warm_b)
        overrides = [f"experiment={arguments.experiment}", f"model.path={model}"]
        overrides += [f"eval.questions={arguments.questions}", *arguments.overrides]
        overrides += ["debug=tiny"] if arguments.quick else []
        row = {"algorithm": algorithm, "seed": seed, "warm": WARM[seed]}
        return row | one_run(overrides, algorithm, seed)

    add_rows(done, missing, one, arguments.rows, arguments.at_once)
    print(table(done))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(done), indent=2) + "\n")


def add_rows(
    rows: list[dict[str, Any]],
    missing: list[tuple[str, int]],
    one: Callable[[str, int], dict[str, Any]],
    path: Path,
    at_once: int,
) -> None:
    """Make the row of each missing algorithm and seed by `one`, and write it as it comes; sort."""
    with ThreadPoolExecutor(at_once) as pool:
        for finished in as_completed([pool.submit(one, *run) for run in missing]):
            rows.append(finished.result())
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    rows.sort(key=lambda row: (row["algorithm"], row["seed"]))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one_run(overrides: list[str], algorithm: str, seed: int) -> dict[str, Any]:
    """Train, then evaluate before and after on unseen phrasings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [*overrides, f"algorithm={algorithm}", f"seed={seed}", "tracker=none"]
        summary = agenttrain(*train, folder=folder / "run")
        phrasing = ["data.test.split=test_phrasing", "tracker=none"]
        before = agenttrain("eval", *overrides, *phrasing, folder=folder / "before")
        latest = f"model.path={folder / 'run' / summary['latest_checkpoint']}"
        after = agenttrain("eval", *overrides, latest, *phrasing, folder=folder / "after")
    return {
        "before": scores(summary["eval"]["before"]),
        "after": scores(summary["eval"]["after"]),
        "phrasing_before": scores(before["eval"]["after"]),
        "phrasing_after": scores(after["eval"]["after"]),
        "steps": summary["steps"],
        "training_seconds": summary["training_seconds"],
        "seconds": summary["seconds"],
    }


def agenttrain(*arguments: str, folder: Path) -> dict[str, Any]:
    """Run one command; its summary."""
    subprocess.run([*AGENTTRAIN, *arguments, f"hydra.run.dir={folder}"], check=True)
    return json.loads((folder / "summary.json").read_text())


def scores(evaluation: dict[str, Any]) -> dict[str, Any]:
    """{sampled, greedy, half (of the sampled interval), n, groups}."""
    by_label = {score["label"]: score for score in evaluation["scores"]}
    sampled = by_label["sampled"]
    return {
        "sampled": sampled["reward"]["mean"],
        "half": (sampled["reward"]["high"] - sampled["reward"]["low"]) / 2,
        "n": sampled["reward"]["n"],
        "greedy": by_label["greedy"]["reward"]["mean"],
        "groups": {name: group["mean"] for name, group in sampled["by_group"].items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = (
        "| algorithm | seed | warm start | before | after | unseen phrasings | "
        "1 query | 2 queries | 3 queries | greedy | steps | training |\n" + "|---" * 12 + "|\n"
    )
    return head + "\n".join(line(row) for row in rows)


def line(row: dict[str, Any]) -> str:
    """One row."""
    before, after, phrasing = row["before"], row["after"], row["phrasing_after"]
    cells = [
        row["algorithm"],
        row["seed"],
        row["warm"],
        f"{before['sampled']:.3f} ± {before['half']:.3f}",
        f"{after['sampled']:.3f} ± {after['half']:.3f}",
        f"{row['phrasing_before']['sampled']:.3f} → {phrasing['sampled']:.3f}",
        *(f"{before['groups'][g]:.2f} → {after['groups'][g]:.2f}" for g in sorted(after["groups"])),
        f"{before['greedy']:.2f} → {after['greedy']:.2f}",
        row["steps"],
        f"{row['training_seconds']:.0f} s",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The flat figures."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [row for row in rows if row["algorithm"] == name]
        found[f"{name}_before"] = mean(row["before"]["sampled"] for row in mine)
        found[f"{name}_after"] = mean(row["after"]["sampled"] for row in mine)
        found[f"{name}_after_lowest"] = min(row["after"]["sampled"] for row in mine)
        found[f"{name}_phrasing"] = mean(row["phrasing_after"]["sampled"] for row in mine)
        for hops in mine[0]["after"]["groups"]:
            for when in ("before", "after"):
                values = [row[when]["groups"][hops] for row in mine]
                found[f"{name}_hops_{hops}_{when}"] = mean(values)
        found[f"{name}_steps"] = max(row["steps"] for row in mine)
        found[f"{name}_seconds"] = max(row["training_seconds"] for row in mine)
    return found


if __name__ == "__main__":
    main()
