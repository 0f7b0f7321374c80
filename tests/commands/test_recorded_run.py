"""A run and a sweep that an earlier version wrote still work with every verb that reads one.

`fixtures/recorded_run` holds what commit f96d236 wrote: KL, correction, entropy bonus and credit
under the keys of that time, all of them with values that are not the defaults. It is the folder of
a stranger: nothing in it is signed with the key of these tests, and everything in it is data.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from agenttrain.cli import main
from agenttrain.tracking.rollouts import read_step, step_path, write_records

FIXTURE = Path(__file__).parents[1] / "fixtures" / "recorded_run"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A copy to work in: the recorded settings name the model relative to it."""
    copy = Path(shutil.copytree(FIXTURE, tmp_path / "old"))
    # A link within a source distribution would replace the folder that it points to.
    (copy / "run" / "checkpoints" / "latest").symlink_to("step-000002")
    monkeypatch.chdir(copy)
    return copy


def lines(file: str) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def test_resume_goes_on_where_the_run_ended():
    before = Path("run", "metrics.jsonl").read_text()
    assert main(["resume=run", "steps=4"]) == 0
    assert Path("run", "metrics.jsonl").read_text().startswith(before)
    rows = lines("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # The adaptive bonus goes on by its own step, 0.002, and the KL is to the synced reference.
    coefficients = [row["entropy_coef"] for row in rows]
    changes = {round(abs(b - a), 6) for a, b in pairwise(coefficients)}
    assert changes == {0.002}
    assert all(row["kl"] is not None and row["mask/correction"] is not None for row in rows)
    assert Path("run", "checkpoints", "latest").readlink() == Path("step-000004")
    assert (summary("run")["status"], summary("run")["steps"]) == ("finished", 4)


def test_a_finished_run_has_nothing_to_do(capsys):
    assert main(["resume=run"]) == 0
    assert "finished after 2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_eval_scores_the_checkpoint_as_the_run_itself_did():
    assert main(["eval", "run=run", "hydra.run.dir=evaluation"]) == 0
    after, recorded = summary("evaluation")["eval"]["after"], summary("run")["eval"]["after"]
    names = ("questions", "reward_greedy", "pass@1_greedy")
    assert {name: after[name] for name in names} == {name: recorded[name] for name in names}


def test_view_shows_the_rollouts():
    assert main(["view", "run", "step=2", "to=page.html"]) == 0
    page = Path("page.html").read_text()
    assert all(record["rollout_id"] in page for record in lines("run/rollouts/step-000002.jsonl"))


@pytest.mark.parametrize("tools", ["recorded", "live"])
def test_replay_gives_the_same_ids(capsys, tools):
    assert main(["replay", "run", "step=2", f"tools={tools}"]) == 0
    assert "4 of 4 rollouts of step 2 replay to identical ids" in capsys.readouterr().out


def test_rescore_by_the_recorded_rewards_with_another_weight():
    assert main(["rescore", "run", "reward.tool_success.weight=2", "to=scores.jsonl"]) == 0
    scores = lines("scores.jsonl")
    assert len(scores) == 8
    for row in scores:
        old = row["old"]
        assert row["new"]["rewards"] == old["rewards"]
        expected = old["reward"] + old["rewards"]["tool_success"]
        assert row["new"]["reward"] == pytest.approx(expected)


VERBS = {
    "view": ["view", "{}", "to=page.html"],
    "view step": ["view", "{}", "step=1", "to=page.html"],
    "replay": ["replay", "{}", "step=2"],
    "replay live": ["replay", "{}", "step=1", "rollout=train-1-0-0", "tools=live"],
    "rescore": ["rescore", "{}", "reward.tool_success.weight=2", "to=scores.jsonl"],
}
"""Verbs that read rollouts; `{}` is the run folder."""


@pytest.mark.parametrize("verb", VERBS)
def test_arrays_give_what_lines_give(verb, capsys):
    shutil.copytree("run", "arrays/run", symlinks=True)
    for step in (1, 2):
        records = list(read_step(Path("run"), step))
        write_records(step_path(Path("arrays/run"), step), records, arrays_above=100)
    assert len(list(Path("arrays/run/rollouts").glob("*.npz"))) == 2
    results = []
    for run in ("run", "arrays/run"):
        assert main([word.format(run) for word in VERBS[verb]]) == 0
        pages = [path for path in (Path("page.html"), Path("scores.jsonl")) if path.exists()]
        printed = capsys.readouterr().out.replace("arrays/run", "run")
        results.append((printed, [path.read_text() for path in pages]))
        for path in pages:
            path.unlink()
    assert results[0] == results[1]
    for path in Path("arrays/run/rollouts").glob("*.npz"):
        path.unlink()
    assert main([word.format("arrays/run") for word in VERBS[verb]]) == 2
    assert "is missing, and holds the token ids" in capsys.readouterr().err


def test_export_writes_a_model():
    assert main(["export", "run", "to=exported"]) == 0
    assert (Path("exported") / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_job_of_a_sweep_that_never_started_runs_with_the_recorded_settings():
    record = json.loads(Path("sweep/sweep.json").read_text())
    del record["jobs"][0]
    Path("sweep/sweep.json").write_text(json.dumps(record))
    assert main(["-m", "resume=sweep", "trust=true"]) == 0
    settings = yaml.safe_load(Path("sweep/1/config.yaml").read_text())
    assert settings["algorithm"]["credit"] == {"name": "turn_baseline", "gamma": 1.0}
    assert settings["algorithm"]["kl"] == {
        **{"beta": 0.04, "estimator": "k3", "place": "reward", "bias_correction": False},
        "reference": {"sync_steps": 512, "mixup": 0.6},
    }
    assert settings["algorithm"]["correction"]["level"] == "token"
