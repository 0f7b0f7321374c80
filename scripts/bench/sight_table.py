"""The table of docs/benchmarks.md on the agent that sees: GRPO and RLOO over seeds, and blank
pictures.

Every row is one whole `agenttrain experiment=sight` run in a process of its own, then evaluations
of its last checkpoint on pictures without content: `looks` blanks the closer looks, `all` the
overview too. Results go to FILE as they come, one JSON object a line, so that an interrupted table
goes on where it stopped. The flat figures, of the mean over seeds unless they say otherwise:

    chance                            reward of guessing with the number of plates known
    grpo_before / grpo_after          sampled reward, unseen walls
    grpo_after_lowest                 of the worst seed
    grpo_greedy_before / _after       greedy reward
    grpo_plates_<n>_before / _after   sampled, by number of plates
    grpo_blank_looks / grpo_blank_all sampled reward after training, with blank pictures
    grpo_blank_highest                the largest of these, sampled or greedy, over seeds
    grpo_seconds                      of training, longest run
    rloo_…                            the same for RLOO
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from shop_table import add_rows, agenttrain, read, scores

from agenttrain.data.bundled.sight import COLOURS, Blank

CODES = len(COLOURS) ** 2
"""Codes of one plate; two have as many times as many. Half of the walls have one."""
CHANCE = (1 / CODES + 1 / CODES**2) / 2


def main() -> None:
    """Make the rows that FILE lacks, print the table, and the figures as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled:sight", help="warm start (bundled:sight)")
    parser.add_argument("--seeds", type=int, default=3, help="per algorithm (3)")
    parser.add_argument("--questions", type=int, default=400, help="of each evaluation (400)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--rows", type=Path, default=Path("outputs/sight_table.jsonl"))
    parser.add_argument("--quick", action="store_true", help="one tiny run per algorithm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("overrides", nargs="*", help="of every run: optimizer.lr=1e-3")
    arguments = parser.parse_args()
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    done = read(arguments.rows)
    made = {(row["algorithm"], row["seed"]) for row in done}
    common = ["experiment=sight", "tracker=none", *arguments.overrides]
    common += [f"eval.questions={arguments.questions}"]
    common += ["debug=tiny"] if arguments.quick else []
    missing = [
        (algorithm, seed)
        for seed in range(1 if arguments.quick else arguments.seeds)
        for algorithm in ("grpo", "rloo")
        if (algorithm, seed) not in made
    ]
    one = partial(one_run, common, arguments.model)
    add_rows(done, missing, one, arguments.rows, arguments.at_once)
    print(table(done))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(done), indent=2) + "\n")


def one_run(common: list[str], model: str, algorithm: str, seed: int) -> dict[str, Any]:
    """Train, then evaluate on blank pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [f"algorithm={algorithm}", f"seed={seed}", f"model.path={model}"]
        summary = agenttrain(*common, *own, folder=folder / "run")
        latest = f"model.path={folder / 'run' / summary['latest_checkpoint']}"
        blank = {}
        for kind in Blank:
            arguments = [*common, latest, f"data.test.blank={kind}"]
            blank[str(kind)] = agenttrain("eval", *arguments, folder=folder / kind)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "before": scores(summary["eval"]["before"]),
        "after": scores(summary["eval"]["after"]),
        "blank": {kind: scores(one["eval"]["after"]) for kind, one in blank.items()},
        "steps": summary["steps"],
        "training_seconds": summary["training_seconds"],
        "seconds": summary["seconds"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = (
        "| algorithm | seed | before | after | greedy | 1 plate | 2 plates | closer looks blank | "
        f"all blank (chance {CHANCE:.3f}) | steps | training |\n" + "|---" * 11 + "|\n"
    )
    return head + "\n".join(line(row) for row in rows)


def line(row: dict[str, Any]) -> str:
    """One row."""
    before, after = row["before"], row["after"]
    cells = [
        row["algorithm"],
        row["seed"],
        f"{before['sampled']:.3f} ± {before['half']:.3f}",
        f"{after['sampled']:.3f} ± {after['half']:.3f}",
        f"{before['greedy']:.2f} → {after['greedy']:.2f}",
        *(f"{before['groups'][g]:.2f} → {after['groups'][g]:.2f}" for g in sorted(after["groups"])),
        *(f"{one['sampled']:.3f} ± {one['half']:.3f}" for one in row["blank"].values()),
        row["steps"],
        f"{row['training_seconds']:.0f} s",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The flat figures."""
    result: dict[str, float] = {"chance": CHANCE}
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        for when in ("before", "after"):
            result[f"{name}_{when}"] = mean(row[when]["sampled"] for row in own)
            result[f"{name}_greedy_{when}"] = mean(row[when]["greedy"] for row in own)
            for plates in own[0][when]["groups"]:
                values = [row[when]["groups"][plates] for row in own]
                result[f"{name}_plates_{plates}_{when}"] = mean(values)
        result[f"{name}_after_lowest"] = min(row["after"]["sampled"] for row in own)
        for kind in own[0]["blank"]:
            result[f"{name}_blank_{kind}"] = mean(row["blank"][kind]["sampled"] for row in own)
        blank = [one for row in own for one in row["blank"].values()]
        result[f"{name}_blank_highest"] = max(max(b["sampled"], b["greedy"]) for b in blank)
        result[f"{name}_seconds"] = max(row["training_seconds"] for row in own)
    return result


if __name__ == "__main__":
    main()
