"""Run folders written by the first edition still work with every verb that reads one.

`fixtures/first_edition_run` holds what version 0.1.0 wrote, with the dotted paths and the file
formats of that time: a sweep of two jobs (the second one's checkpoint is left out), and a run with
an environment and a reward of the user's own. It is the folder of a stranger: nothing in it is
signed with the key of these tests.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from agenttrain.cli import main
from agenttrain.utils.locate import locate
from agenttrain.utils.moved import MOVED

FIXTURE = Path(__file__).parents[1] / "fixtures" / "first_edition_run"
PLAIN_SERVER = Path(__file__).parents[1] / "kit" / "mcp_plain_server.py"
RUN = "sweep/0"
CHECK = ["check", f"resume={RUN}", "resume_changed=[tools,reward,data]", "trust=true"]
"""Builds everything but weights from a changed config.yaml."""
STEP_ROLLOUTS = ["train-1-0-0", "train-1-0-1", "train-1-1-0", "train-1-1-1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A copy to work in: the recorded settings name the model and the rows relative to it."""
    copy = Path(shutil.copytree(FIXTURE, tmp_path / "old", symlinks=True))
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.delitem(sys.modules, "first_edition_world", raising=False)
    return copy


def lines(file: str) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def change_settings(run: str, **sections: dict) -> None:
    """Put other sections into the recorded config.yaml."""
    file = Path(run, "config.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **sections}))


def test_resume_goes_on_where_the_run_ended():
    before = Path(RUN, "metrics.jsonl").read_text()
    assert main([f"resume={RUN}", "steps=3"]) == 0
    assert Path(RUN, "metrics.jsonl").read_text().startswith(before)
    assert [row["step"] for row in lines(f"{RUN}/metrics.jsonl")] == [1, 2, 3]
    # Two tasks a step: the third one trains on the fifth and sixth row.
    tasks = [record["task_id"] for record in lines(f"{RUN}/rollouts/step-000003.jsonl")]
    assert tasks == ["shop/train/0/4"] * 2 + ["shop/train/0/5"] * 2
    assert Path(RUN, "checkpoints", "latest").readlink() == Path("step-000003")
    # The linear schedule ends a step later now, where a third of the rate is left.
    assert [row["lr"] for row in lines(f"{RUN}/metrics.jsonl")] == pytest.approx(
        [8e-4, 4e-4, 8e-4 / 3]
    )
    assert (summary(RUN)["status"], summary(RUN)["steps"]) == ("finished", 3)


def test_resume_auto_sees_the_settings_that_the_run_was_started_with(capsys):
    """The recorded paths equal those that the same words are composed to now."""
    job = json.loads(Path("sweep/sweep.json").read_text())["jobs"][0]
    # Values of the experiment and of the rows that have changed since.
    older = ("optimizer.lr=8e-4", "~data.train.curriculum")
    words = [*job["overrides"], *older, f"hydra.run.dir={RUN}", "resume=auto"]
    assert main(words) == 0
    assert "finished after 2 steps" in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_do(capsys):
    assert main([f"resume={RUN}"]) == 0
    assert "finished after 2 steps" in capsys.readouterr().out


def test_eval_scores_the_checkpoint_as_the_run_itself_did():
    assert main(["eval", f"run={RUN}", "hydra.run.dir=evaluation"]) == 0
    after, recorded = summary("evaluation")["eval"]["after"], summary(RUN)["eval"]["after"]
    names = ("questions", "reward_greedy", "pass@1_greedy")
    assert {name: after[name] for name in names} == {name: recorded[name] for name in names}
    assert after["reward_greedy"] == 2.254375


@pytest.mark.parametrize("run", [RUN, "sweep/1", "environment"])
def test_view_shows_the_rollouts(run):
    assert main(["view", run, "step=1", "to=page.html"]) == 0
    page = Path("page.html").read_text()
    assert all(name in page for name in STEP_ROLLOUTS)


def test_timeline_says_that_no_times_were_recorded(capsys):
    assert main(["timeline", RUN]) == 2
    assert f"timeline {RUN}: it has recorded no times (timeline/*.jsonl)" in capsys.readouterr().err
    assert not Path(RUN, "timeline.html").exists()


@pytest.mark.parametrize(("step", "tools"), [(1, "recorded"), (2, "live")])
def test_replay_gives_the_same_ids(capsys, step, tools):
    assert main(["replay", RUN, f"step={step}", f"tools={tools}"]) == 0
    printed = capsys.readouterr().out
    assert f"4 of 4 rollouts of step {step} replay to identical ids" in printed


def test_replay_of_an_environment_needs_trust_only_where_it_runs(capsys):
    assert main(["replay", "environment"]) == 0
    assert "6 of 6 rollouts of step 1 replay to identical ids" in capsys.readouterr().out
    assert "first_edition_world" not in sys.modules
    live = ["replay", "environment", "tools=live"]
    assert main(live) == 2
    assert "environment.till._target_=first_edition_world.Till" in capsys.readouterr().err
    assert main([*live, "trust=true"]) == 0
    assert "6 of 6 rollouts of step 1 replay to identical ids" in capsys.readouterr().out


def test_rescore_by_another_reward():
    assert main(["rescore", RUN, "reward=[exact_match]", "to=scores.jsonl"]) == 0
    scores = lines("scores.jsonl")
    assert [row["new"]["reward"] for row in scores] == [0, 0, 0, 0, 0, 0, 1, 0]
    for row in scores:
        assert row["new"]["rewards"] == {"exact_match": row["old"]["rewards"]["exact_match"]}


def test_rescore_by_the_recorded_rewards_with_another_weight():
    assert main(["rescore", RUN, "reward.exact_match.weight=2", "to=scores.jsonl"]) == 0
    for row in lines("scores.jsonl"):
        old = row["old"]
        assert row["new"]["rewards"] == old["rewards"]
        assert row["new"]["reward"] == pytest.approx(old["reward"] + old["rewards"]["exact_match"])


def test_rescore_by_a_reward_of_the_user_and_the_environment():
    changed = ["rescore", "environment", "reward.patient.weight=2", "to=scores.jsonl"]
    assert main(changed) == 2
    assert main([*changed, "trust=true"]) == 0
    # patient + environment = 1 + 0 four times, then 0 + 1 twice
    assert [row["new"]["reward"] for row in lines("scores.jsonl")] == [2, 2, 2, 2, 1, 1]


def test_compare_a_sweep(capsys):
    assert main(["compare", "sweep", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["configurations"]
    assert [
        (row["overrides"]["algorithm"], row["figures"]["eval/reward"]["mean"]) for row in table
    ] == [("grpo", 1.4505908203125), ("rloo", 1.7872786458333332)]


def test_every_bundled_tool_and_reward_of_the_first_edition_has_its_name():
    server = [sys.executable, str(PLAIN_SERVER)]
    paths = {
        "sql": {
            "_target_": "agenttrain.tools.builtin.sql.Sql",
            "connect": "agenttrain.data.bundled.shop.connect",
        },
        "add": {"_target_": "agenttrain.tools.builtin.calculator.add"},
        "subtract": {"_target_": "agenttrain.tools.builtin.calculator.subtract"},
        "multiply": {"_target_": "agenttrain.tools.builtin.calculator.multiply"},
        "calculator": {"_target_": "agenttrain.tools.builtin.calculator.calculator"},
        "search": {
            "_target_": "agenttrain.tools.builtin.search.Search",
            "path": "bundled:encyclopedia",
        },
        "mcp": {"_target_": "agenttrain.tools.mcp.server.McpServer", "command": server},
        "final_answer": {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"},
    }
    interpreter = {"_target_": "agenttrain.tools.sandbox.tool.interpreter", "sandbox": "none"}
    for language in ("python", "bash"):
        paths[language] = {**interpreter, "language": language}
    judge = {"url": "http://localhost:1/v1", "model": "m", "prompt": "?", "pattern": r"(\d)"}
    rewards = {
        "contains": {"_target_": "agenttrain.rewards.builtin.answers.Contains"},
        "exact_match": {"_target_": "agenttrain.rewards.builtin.answers.ExactMatch"},
        "format": {"_target_": "agenttrain.rewards.builtin.format.Format", "pattern": ".+"},
        "jmespath": {
            "_target_": "agenttrain.rewards.builtin.format.JMESPath",
            "expression": "reward",
        },
        "json_schema": {"_target_": "agenttrain.rewards.builtin.format.JsonSchema", "schema": {}},
        "judge": {"_target_": "agenttrain.rewards.builtin.judge.Judge", **judge},
        "length_penalty": {
            "_target_": "agenttrain.rewards.builtin.tools.LengthPenalty",
            "free_tokens": 0,
            "full_tokens": 100,
        },
        "math_verify": {"_target_": "agenttrain.rewards.builtin.math_verify.MathVerify"},
        "numeric_close": {"_target_": "agenttrain.rewards.builtin.answers.NumericClose"},
        "reward_model": {
            "_target_": "agenttrain.rewards.builtin.reward_model.RewardModel",
            "path": "model",
        },
        "stop_tool_called": {"_target_": "agenttrain.rewards.builtin.tools.stop_tool_called"},
        "tool_penalty": {"_target_": "agenttrain.rewards.builtin.tools.ToolPenalty"},
        "tool_success": {"_target_": "agenttrain.rewards.builtin.tools.tool_success"},
    }
    change_settings(RUN, tools=paths, reward=rewards)
    assert main(CHECK) == 0


def test_the_reward_of_an_environment_that_is_named_has_its_name():
    target = "agenttrain.rewards.builtin.tools.environment"
    change_settings("environment", reward={"environment": {"_target_": target, "weight": 2}})
    changed = ["rescore", "environment", "reward.environment.weight=3", "to=scores.jsonl"]
    assert main(changed) == 0
    assert [row["new"]["reward"] for row in lines("scores.jsonl")] == [0, 0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (
            {"_target_": "agenttrain.data.bundled.calculator.row", "split": "train", "seed": 0},
            {"_target_": "agenttrain.data.bundled.code.row", "split": "test", "seed": 0},
        ),
        (
            {"_target_": "agenttrain.data.bundled.encyclopedia.row", "split": "train", "seed": 0},
            {
                "_target_": "agenttrain.data.bundled.demonstrations.row",
                "task": "shop",
                "split": "test",
                "seed": 0,
            },
        ),
        (
            {"_target_": "agenttrain.data.files.FileRows", "path": "rows.jsonl"},
            {"_target_": "agenttrain.data.files.HubRows", "path": "hub", "split": "train"},
        ),
    ],
)
def test_every_bundled_data_set_of_the_first_edition_has_its_name(folder, train, test):
    (folder / "hub").mkdir()
    shutil.copy("rows.jsonl", "hub/train.jsonl")
    change_settings(
        RUN,
        tools={"final_answer": {"_target_": "agenttrain.tools.builtin.final_answer.final_answer"}},
        reward={"tool_success": {"_target_": "agenttrain.rewards.builtin.tools.tool_success"}},
        data={"train": train, "test": test},
    )
    assert main([*CHECK, "eval.group_by=null"]) == 0


@pytest.mark.parametrize("path", MOVED.values())
def test_the_table_of_moved_names_leads_to_components(path):
    assert callable(locate(path, key="path"))


def test_an_old_path_on_the_command_line_is_answered_with_the_new_one(capsys):
    assert main(["check", "+tools.db._target_=agenttrain.tools.sql.Sql"]) == 2
    assert "agenttrain.tools.sql.Sql: is agenttrain.tools.builtin.sql.Sql now" in (
        capsys.readouterr().err
    )


def test_a_recorded_name_that_no_table_has_is_refused_with_its_key(capsys):
    tools = {"db": {"_target_": "agenttrain.tools.sqlx.Sql"}}
    change_settings(RUN, tools=tools)
    assert main([f"resume={RUN}", "steps=3", "trust=true"]) == 2
    expected = (
        "tools.db._target_=agenttrain.tools.sqlx.Sql: is no name of this version of agenttrain"
    )
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_never_started_runs_with_todays_names():
    record = json.loads(Path("sweep/sweep.json").read_text())
    # It names its experiment: its model is no bundled one, which has to say so now.
    record["jobs"][1]["overrides"] += [
        "+reward.more._target_=agenttrain.rewards.exact_match.ExactMatch",
        "experiment=shop",
    ]
    Path("sweep/sweep.json").write_text(json.dumps(record))
    shutil.rmtree("sweep/1")
    assert main(["-m", "resume=sweep", "trust=true"]) == 0
    settings = yaml.safe_load(Path("sweep/1/config.yaml").read_text())
    assert settings["reward"]["more"]["_target_"] == "agenttrain.rewards.builtin.answers.ExactMatch"
