"""The rollouts with which the page of a run opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_tracking_viewer import dump
from tracking_rollouts import decode, new, say

from agenttrain.tracking.notable import Notable, notable_rollouts
from agenttrain.tracking.rollouts import step_path, write_step
from agenttrain.tracking.run_folder import update_summary
from agenttrain.tracking.viewer import render
from agenttrain.types import ConfigError, Rollout, StopReason

SHORT, LONG = (5, 2), (6, 6, 6, 2)


def rollout(group: str, sample: int, reward: float | None, ids: tuple[int, ...] = SHORT) -> Rollout:
    made = new(sample, reward, group)
    say(made, ids)
    made.stop_reason = StopReason.completed
    return made


def group(name: str, *rewards: float | None) -> list[Rollout]:
    return [rollout(name, sample, reward) for sample, reward in enumerate(rewards)]


def listed(notable: Notable) -> dict[str, list[str]]:
    return {
        section.title: [notable.records[place]["rollout_id"] for place in section.rollouts]
        for section in notable.sections
    }


def test_the_best_the_worst_and_the_most_surprising(tmp_path):
    # means: 0.25, 0.75, 0.4, 1
    step = [*group("a", 0.0, 0.0, 0.0, 1.0), *group("b", 1.0, 0.0, 1.0, 1.0)]
    step += [*group("c", 0.4, 0.5, None, 0.3), *group("d", 1.0, 1.0)]
    step.append(rollout("d", 2, 1.0, LONG))
    write_step(tmp_path, 7, step)
    assert listed(notable_rollouts(tmp_path, "view")) == {
        # of equal ones the longest, then the order of the file; one of a group
        "Best": ["d-2", "a-3", "b-0"],
        "Worst": ["a-0", "b-1", "c-3"],
        # |1 - 0.25|, |0 - 0.75|, |0.5 - 0.4|; all of d are as good as their mean
        "Most surprising": ["a-3", "b-1", "c-1"],
    }


def test_groups_without_a_difference_hold_no_surprise(tmp_path):
    write_step(tmp_path, 1, [*group("a", 1.0, 1.0), *group("b", None, None)])
    assert listed(notable_rollouts(tmp_path, "view")) == {"Best": ["a-0"]}  # none is worse
    write_step(tmp_path, 1, [*group("a", 0.5, 1.0)])
    assert len(notable_rollouts(tmp_path, "view").records) == 2  # each is shown once
    with pytest.raises(ConfigError, match=r"^view x: the run has written no rollouts"):
        notable_rollouts(tmp_path / "other", "view x")


def test_alarms_come_first_and_old_steps_are_not_read(tmp_path):
    for step in range(1, 9):
        write_step(tmp_path, step, group(f"train-{step}-0", 0.0, 1.0))
    step_path(tmp_path, 4).write_text("no JSON")
    named = [[2, "train-2-0-1"], [3, "train-3-0-1"], [9, "train-9-0-1"]]
    alarms = [{"step": 3, "text": "first", "rollouts": named}]
    alarms.append({"step": 99, "text": "not written", "rollouts": [[99, "train-99-0-0"]]})
    update_summary(tmp_path, alarms=alarms)
    notable = notable_rollouts(tmp_path, "view")
    assert listed(notable) == {
        "Alarm of step 99": [],
        "Alarm of step 3": ["train-2-0-1", "train-3-0-1"],
        "Best": ["train-6-0-1", "train-7-0-1", "train-8-0-1"],
        "Worst": ["train-6-0-0", "train-7-0-0", "train-8-0-0"],
        "Most surprising": ["train-6-0-0", "train-7-0-0", "train-8-0-0"],
    }
    assert [section.text for section in notable.sections[:2]] == ["not written", "first"]
    assert [record["step"] for record in notable.records] == [2, 3, 6, 7, 8, 6, 7, 8]


def test_the_culprits_of_a_crash_come_first(tmp_path):
    write_step(tmp_path, 4, [*group("a", 0.0, 1.0), *group("b", 0.0, 1.0)])
    crash = {"step": 4, "stage": "update", "error": "loss nan", "culprits": ["b-0", "a-1"]}
    (tmp_path / "crash.json").write_text(json.dumps(crash))
    notable = notable_rollouts(tmp_path, "view")
    assert listed(notable)["Culprits of step 4"] == ["b-0", "a-1"]
    assert notable.sections[0].text == "loss nan"


def test_the_page_opens_with_them_and_leads_to_each(tmp_path: Path):
    write_step(tmp_path, 1, group("a", 0.0, 1.0))
    text = "the share of '</script>' rose"
    update_summary(tmp_path, alarms=[{"step": 1, "text": text, "rollouts": [[1, "a-1"]]}])
    notable = notable_rollouts(tmp_path, "view")
    page = tmp_path / "page.html"
    page.write_text(render(notable.records, decode, sections=notable.sections), encoding="utf-8")
    dom = dump(page, "", tmp_path / "profile")
    assert '<h3 class="error">Alarm of step 1</h3>' in dom
    assert "the share of '&lt;/script&gt;' rose" in dom
    assert '<td><a href="#0">a-1</a>' in dom and '<a href="#1">a-0</a>' in dom
    dom = dump(page, "1", tmp_path / "profile")
    assert "Alarm of step 1" not in dom.partition("<script")[0] and "rollout a-0" in dom
    # The page of a step opens with its first rollout.
    page.write_text(render(notable.records, decode), encoding="utf-8")
    assert "Rollouts to look at</h2>" not in dump(page, "", tmp_path / "profile")


def test_the_records_of_the_page_are_json(tmp_path):
    write_step(tmp_path, 1, group("a", 0.0, None))
    for record in notable_rollouts(tmp_path, "view").records:
        assert json.loads(json.dumps(record)) == record
        assert record["group_reward"] == 0.0 and record["logprob"] == -0.5
