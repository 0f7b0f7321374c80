"""Whole runs with a teacher: what they record, how they go on, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import same_run
from safetensors.torch import load_file, save_file

from agenttrain.cli import main
from agenttrain.runs.setup import Components
from agenttrain.runs.teacher import check_teacher, with_text
from agenttrain.settings.checks import check_for_verb, validate
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.types import ConfigError, Task
from agenttrain.utils.model_path import model_folder

TINY = ["debug=tiny", "tracker=none", "eval.questions=0", "optimizer.schedule=constant"]

SOURCE = Source()


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The bundled agent, surer of its tokens."""
    folder = tmp_path / "teacher"
    shutil.copytree(model_folder("bundled:shop"), folder)
    scale(folder, 1.5)
    return folder


def scale(folder: Path, factor: float, name: str = "model.norm") -> None:
    """Multiply weights of a model: those of the last norm scale its logits."""
    weights = load_file(folder / "model.safetensors")
    for key in weights:
        if key.startswith(name):
            weights[key] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_hint(teacher: Path) -> list[str]:
    return [
        f"algorithm.teacher.path={teacher}",
        "algorithm.teacher.prompt='The answer is {{ answer }}.'",
    ]


def test_a_run_records_what_each_token_learned(teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main([*TINY, *with_hint(teacher), "steps=1", f"hydra.run.dir={folder}"]) == 0
    (row,) = same_run.metrics(folder)
    assert row["teacher/kl"] > 0
    assert row["grad_norm"] > 0
    assert (row["teacher/gated_in"], row["teacher/too_long"]) == (1.0, 0.0)

    lines = (folder / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    spans = [s for one in records for s in one["trajectories"][0]["spans"]]
    lists = [s for s in spans if isinstance(s["advantage"], list)]
    assert lists
    assert all(len(s["advantage"]) == s["end"] - s["start"] for s in lists)
    for record in records:  # what is read is what was written
        again = read_rollout(record, Task(task_id=record["task_id"], messages=()))
        written = rollout_record(again)["trajectories"][0]["spans"]
        assert written == record["trajectories"][0]["spans"]


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_with_the_same_teacher(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = [*TINY, *with_hint(teacher)]
    assert main([*settings, "steps=2", f"hydra.run.dir={whole}"]) == 0
    assert main([*settings, "steps=1", f"hydra.run.dir={part}"]) == 0
    assert main([f"resume={part}", "steps=2"]) == 0
    same_run.assert_same(part, whole)

    scale(teacher, 1.1, name="")  # other weights
    capsys.readouterr()
    assert main([f"resume={part}", "steps=3"]) == 2
    assert "weights of algorithm.teacher.path changed since the run" in capsys.readouterr().err


def problem(*overrides: str) -> str:
    """What a run with these settings is refused with, before any weights load."""
    with hydra_session(SOURCE), pytest.raises(ConfigError) as caught:
        config = compose_run([*TINY, *overrides], SOURCE).config
        validate(config, code=())
        check_for_verb("train", config)
        components = Components(config)
        check_teacher(config, components.tokenizer, components.tasks.train)
    return str(caught.value)


def test_a_teacher_that_cannot_score_the_rollouts_is_refused(teacher: Path) -> None:
    own, path = f"algorithm.teacher.path={teacher}", "algorithm.teacher.path=bundled:shop"
    text = problem("algorithm.teacher.path=bundled:calculator")
    assert text.startswith("algorithm.teacher.path=bundled:calculator: has another tokenizer than")
    assert text.endswith("choose a teacher of the same family")
    text = problem("algorithm.teacher.path=bundled:shpo")
    assert text.startswith("algorithm.teacher.path=bundled:shpo: no such bundled model (did you")
    text = problem(path, "algorithm.teacher.prompt='{{ answr }}'")
    assert text.startswith("algorithm.teacher.prompt has {{ answr }}, and the row has no such")
    assert "did you mean 'answer'?" in text
    text = problem(path, "algorithm.teacher.prompt='{{ answer '")
    assert text.startswith("algorithm.teacher.prompt: is no template")
    text = problem(path, "algorithm.teacher.revision=main")
    assert text.startswith("algorithm.teacher.revision=main: algorithm.teacher.path=bundled:shop")

    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "vocab_size": 600}))
    assert "has 600 token embeddings, and model.path=bundled:shop samples from" in problem(own)
    (teacher / "adapter_config.json").write_text("{}")
    assert "holds adapters; merge them into their model first" in problem(own)


def test_the_hint_is_at_the_end_of_the_last_user_message() -> None:
    asked = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "a"},
    ]
    assert with_text(asked, "It is 7.") == [
        asked[0],
        {"role": "user", "content": "3 + 4?\n\nIt is 7."},
        asked[2],
    ]
    assert asked[1]["content"] == "3 + 4?"
    parts = [{"role": "user", "content": [{"type": "text", "text": "3 + 4?"}]}]
    (message,) = with_text(parts, "7")
    assert message["content"] == [
        {"type": "text", "text": "3 + 4?"},
        {"type": "text", "text": "\n\n7"},
    ]
    assert with_text(asked[:1], "7") == [asked[0], {"role": "user", "content": "7"}]


@pytest.mark.long
def test_the_bundled_agent_nears_its_teacher(teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        *("algorithm.teacher.reward_weight=0", "algorithm.group_size=4", "tasks_per_step=16"),
        *("steps=8", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "checkpoint.every=null"),
    ]
    assert (
        main([*TINY, f"algorithm.teacher.path={teacher}", *arguments, f"hydra.run.dir={folder}"])
        == 0
    )
    kls = [row["teacher/kl"] for row in same_run.metrics(folder)]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])
