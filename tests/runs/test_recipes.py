"""The recipes: four short steps of each on the bundled model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import spider_folder
from sandbox_kit import usable

from agenttrain.cli import main
from agenttrain.utils.files import conf_folder

RECIPES = sorted(file.stem for file in (conf_folder() / "experiment" / "recipes").glob("*.yaml"))
TINY = (
    *("model.path=bundled:shop", "debug=tiny", "steps=4", "eval.questions=0", "tracker=none"),
    *("tracker.rollouts=all", "checkpoint.every=null"),
)


def run(folder: Path, recipe: str, *overrides: str) -> list[dict]:
    """Train a recipe for four steps, and return the records of its rollouts."""
    verb = ["sft"] if recipe.endswith("_warmstart") else []
    words = [*verb, f"experiment=recipes/{recipe}", *TINY, *overrides]
    assert main([*words, f"hydra.run.dir={folder / 'run'}"]) == 0
    metrics = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3, 4]
    return [
        json.loads(line)
        for file in sorted((folder / "run" / "rollouts").glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def test_every_recipe_has_a_page() -> None:
    pages = Path(__file__).parents[2] / "docs" / "recipes"
    text = "".join(page.read_text(encoding="utf-8") for page in pages.glob("*.md"))
    assert [name for name in RECIPES if f"recipes/{name}" not in text] == []
    index = (pages / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", index))
    assert linked == {page.name for page in pages.glob("*.md")} - {"index.md"}


def test_reverse_text_runs(tmp_path: Path) -> None:
    records = run(tmp_path, "reverse_text")
    assert len(records) == 16  # 4 steps of 2 tasks, each with 2 rollouts
    assert all(record["rewards"].keys() == {"similarity"} for record in records)


@pytest.mark.slow
def test_alphabet_sort_has_three_turns_of_the_user(tmp_path: Path) -> None:
    for record in run(tmp_path, "alphabet_sort"):
        assert record["rewards"].keys() == {"turn_similarity"}
        messages = record["trajectories"][0]["messages"]
        if record["stop_reason"] == "completed":
            assert [m["role"] for m in messages] == ["user", "assistant"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse_text", "alphabet_sort", "gsm8k", "gsm8k_python"])
def test_warm_starts_run(task: str, tmp_path: Path) -> None:
    assert run(tmp_path, f"{task}_warmstart")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gsm8k", "gsm8k_python"])
def test_word_problems_run_with_and_without_a_tool(recipe: str, tmp_path: Path) -> None:
    if recipe == "gsm8k_python":
        usable("required")
    for record in run(tmp_path, recipe, "data=word_problems"):
        (trajectory,) = record["trajectories"]
        assert "end with the number alone" in trajectory["messages"][-2]["content"]


@pytest.mark.slow
def test_search_runs(tmp_path: Path) -> None:
    for record in run(tmp_path, "search"):
        assert record["rewards"].keys() == {"exact_match", "token_f1"}


@pytest.mark.slow
def test_sql_runs_on_a_folder_in_spiders_layout(tmp_path: Path) -> None:
    folder = spider_folder.make(tmp_path / "spider")
    for record in run(tmp_path, "sql", f"data.path={folder}"):
        assert record["rewards"].keys() == {"sql_result"}
        assert "orders(id INTEGER" in record["trajectories"][0]["messages"][1]["content"]


@pytest.mark.slow
def test_wordle_runs(tmp_path: Path) -> None:
    for record in run(tmp_path, "wordle"):
        assert record["rewards"].keys() == {"environment"}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward"])
def test_reasoning_gym_runs(dataset: str, tmp_path: Path) -> None:
    python = os.environ.get("REASONING_GYM_PYTHON")
    if not python:
        pytest.skip("scripts/test-ecosystems reasoning_gym runs it")
    override = f"environment.reasoning_gym.python={python}"
    for record in run(tmp_path, f"reasoning_gym_{dataset}", override):
        assert record["rewards"].keys() == {"environment"}


@pytest.mark.slow
def test_the_service_desk_runs_with_its_customers(tmp_path: Path) -> None:
    for record in run(tmp_path, "service_desk"):
        assert record["rewards"].keys() == {"environment"}
        assert (
            "service desk of a furniture shop"
            in record["trajectories"][0]["messages"][0]["content"]
        )
