"""The bundled agent that sees, through the command line: a short run, and what shows its images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agenttrain.cli import main

TINY = ("experiment=sight", "debug=tiny", "tracker=none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight") / "run"
    assert main([*TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_short_run_samples_and_trains_with_images(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all((row["sampling/logprob_gap_max"] or 0) < 1e-4 for row in rows)
    record = json.loads((run / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    (trajectory,) = record["trajectories"]
    (image, question) = trajectory["messages"][
        1 if trajectory["messages"][0]["role"] == "system" else 0
    ]["content"]
    assert question["type"] == "text"
    assert (run / "rollouts" / image["file"]).is_file()
    assert trajectory["spans"][0]["images"] == [
        {"start": 27, "grid": [4, 4], "sha256": image["sha256"]}
    ]


def test_the_page_of_a_step_holds_its_images(run: Path, tmp_path: Path) -> None:
    assert main(["view", str(run), "step=2", f"to={tmp_path / 'page.html'}"]) == 0
    page = (tmp_path / "page.html").read_text()
    shown = set(re.findall(r"data:image/png;base64,[A-Za-z0-9+/=]+", page))
    files = re.findall(r'"file":"(images/[0-9a-f]+\.png)"', page)
    assert shown and len(shown) == len(set(files))


def test_a_run_with_images_is_replayed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "step=2", "trust=true"]) == 0


@pytest.mark.parametrize("blank", ["looks", "all"])
def test_blank_pictures_are_evaluated(blank: str, tmp_path: Path) -> None:
    arguments = [f"data.test.blank={blank}", "eval.questions=2", f"hydra.run.dir={tmp_path}"]
    assert main(["eval", *TINY, *arguments]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["eval"]["after"]
