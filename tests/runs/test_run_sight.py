"""The bundled agent that sees, through the command line: a short run, and what shows its images."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from agenttrain.chat.vision import load_placeholders
from agenttrain.cli import main
from agenttrain.tracking.pictures import blocks
from agenttrain.utils.image_files import read_image
from agenttrain.utils.placeholders import Placeholders

TINY = ("experiment=sight", "debug=tiny", "tracker=none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight") / "run"
    assert main([*TINY, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.slow
def test_a_short_run_samples_and_trains_with_images(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all((row["sampling/logprob_gap_max"] or 0) < 1e-4 for row in rows)
    record = json.loads((run / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    (trajectory,) = record["trajectories"]
    image, question = trajectory["messages"][0]["content"]
    assert question["type"] == "text"
    assert (run / "rollouts" / image["file"]).is_file()
    assert trajectory["spans"][0]["images"] == [
        {"start": 18, "grid": [4, 4], "sha256": image["sha256"]}
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


@pytest.mark.slow
def test_a_crash_bundle_holds_the_images_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text("def nan(rollout, **columns):\n    return float('nan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    reward = ("reward=[]", "reward.r._target_=planted.nan", "eval.questions=0")
    assert main([*TINY, *reward, f"hydra.run.dir={folder}"]) == 1
    bundle = folder / "crash" / "step-000001"
    printed = capsys.readouterr().err
    assert f"agenttrain replay {bundle} (it holds the images of its rollouts)" in printed
    record = json.loads((bundle / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    (part, _) = record["trajectories"][0]["messages"][0]["content"]
    assert (bundle / "rollouts" / part["file"]).is_file()


def test_an_exported_model_reads_images_and_its_card_says_so(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), f"to={tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "| images | read; none of the training's is in this folder |" in card
    assert isinstance(load_placeholders(tmp_path / "model"), Placeholders)


@pytest.mark.slow
def test_data_shows_sizes_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "experiment=sight", "--rows", "1"]) == 0
    printed = capsys.readouterr().out
    assert "  images  500 in 500 of 500 rows, 32x32 pixels, 16 tokens each, of the first" in printed
    assert re.search(r"<\|vision_start\|>\[image of 32x32 pixels \(\w{8}\), 16 tokens\]<", printed)


def test_play_names_images_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/ask\n/tokens\n"))
    assert main(["play", "experiment=sight", "eval.temperature=0", "tracker=none"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"row    0: \[image of 32x32 pixels \(\w{8}\)\]", printed)
    assert re.search(r"crop → \[image of 32x32 pixels \(\w{8}\)\]", printed)
    assert len(re.findall(r"\(\w{8}\), 16 tokens\]", printed)) >= 2


def test_a_terminal_shows_two_pixels_a_character() -> None:
    text = blocks(read_image(np.array([[[255, 0, 0]], [[0, 0, 255]]], dtype=np.uint8)))
    assert text.plain == "▀\n"
    (span,) = text.spans
    assert str(span.style) == "#ff0000 on #0000ff"
