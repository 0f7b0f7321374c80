"""Runs that read no images: each reason, from the settings, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vision_kit

from agenttrain.cli import main
from agenttrain.runs.sampling import placeholders_of
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys


def reason(*overrides: str) -> object:
    """The placeholders of a run's images, or why it has none."""
    source = Source()
    words = open_keys(["experiment=sight", *overrides])
    with hydra_session(source):
        return placeholders_of(compose_run(words, source).config)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["engine=vllm"], "engine=vllm reads token ids alone; set engine=transformers"),
        (["engine=vllm_server"], "engine=vllm_server reads token ids alone; set engine="),
        (
            ["rollout.process=own"],
            "the model's copy in the rollout process reads token ids alone; set rollout.process=",
        ),
        (
            ["async_training.max_staleness=1"],
            "the model's copy in the rollout process reads token ids alone; set async_training.max",
        ),
        (
            ["rollout.compact_at=100", "rollout.compaction=summary"],
            "rollout.compact_at shortens contexts, and those with",
        ),
        (["algorithm.teacher.path=bundled:shop"], "algorithm.teacher reads token ids alone"),
        (["distributed=fsdp2"], "distributed=fsdp2 does not share a vision tower; set"),
        (["model.path=bundled:shop"], "this model reads text only"),
    ],
    ids=str,
)
def test_a_run_says_why_it_reads_no_images(overrides: list[str], problem: str) -> None:
    assert str(reason(*overrides)).startswith(problem)


def test_the_bundled_agent_that_sees_reads_images() -> None:
    assert not isinstance(reason(), str)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "lfm2_vl", "mistral3", "qwen2_vl"])
def test_other_families_are_refused_with_the_row(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vision_kit.save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    words = ("data=sight", "reward=[exact_match]", f"model.path={tmp_path / 'model'}")
    assert main(["data", "experiment=none", *words, "tools=[final_answer]", "--rows", "1"]) == 2
    printed = capsys.readouterr().err
    assert f"images of model_type={kind} are not read: " in printed
    assert "type 'image'" in printed
