"""Which tasks are drawn: by hand, by simulation, and through a run that is resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.cli import main
from agenttrain.data.bundled.shop import row as shop_row
from agenttrain.data.config import CurriculumConfig
from agenttrain.data.curriculum import Curriculum, Result
from agenttrain.data.tasks import GeneratedRows, TaskSource
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.names import depends_on_clock
from agenttrain.types import ConfigError, Rollout, Task
from agenttrain.utils.sections import validated

pytestmark = pytest.mark.timeout(1200)  # whole runs


def source(rows: int, *, shuffle: bool = False) -> TaskSource:
    return TaskSource([{"prompt": str(i)} for i in range(rows)], shuffle=shuffle, seed=3)


def curriculum(rows: int, seed: int = 0, **changes: Any) -> Curriculum:
    return Curriculum(source(rows), CurriculumConfig(enabled=True, **changes), seed=seed)


def names(tasks: list[Task]) -> list[str]:
    return [task.task_id for task in tasks]


def test_new_rows_come_in_the_order_of_the_source():
    assert names(curriculum(50, explore=1.0).tasks(0, 8)) == [str(i) for i in range(8)]
    shuffled = source(50, shuffle=True)
    mine = Curriculum(shuffled, CurriculumConfig(enabled=True), seed=0)
    assert names(mine.tasks(0, 8)) == names(shuffled.tasks(0, 8))


def test_rows_without_end_need_no_list_of_them():
    endless = TaskSource(GeneratedRows(lambda index: {"prompt": str(index)}))
    mine = Curriculum(endless, CurriculumConfig(enabled=True), seed=0)
    assert names(mine.tasks(0, 3)) == ["0", "1", "2"]
    mine.learn(3, [("0", 1, 2), ("1", 0, 2), ("2", 2, 2)])
    assert mine.metrics() == {
        "curriculum/band": 1,
        "curriculum/easy": 1,
        "curriculum/hard": 1,
        "curriculum/unmeasured": 0,
        "curriculum/success": 0.5,
    }


def test_steps_that_are_drawn_before_the_results_of_earlier_ones():
    """Two steps ahead: new rows go on, results come to the oldest step, and state keeps it all."""
    mine = curriculum(50, explore=1.0)
    assert names(mine.tasks(0, 2)) == ["0", "1"]
    mine.close(2)
    mine.close(2)  # is closed already
    assert names(mine.tasks(2, 2)) == ["2", "3"]
    mine.close(4)
    assert names(mine.tasks(0, 2)) == ["0", "1"] and names(mine.tasks(2, 2)) == ["2", "3"]
    mine.learn(2, [("0", 1, 2), ("1", 2, 2)])
    assert (mine.metrics()["curriculum/band"], mine.metrics()["curriculum/new"]) == (1, 46)
    with pytest.raises(ValueError, match="belongs to an earlier step"):
        mine.tasks(0, 2)
    again = curriculum(50, explore=1.0)
    again.load_state_dict(json.loads(json.dumps(mine.state_dict())))
    for one in (mine, again):
        assert names(one.tasks(2, 2)) == ["2", "3"]
        assert names(one.tasks(4, 2)) == ["4", "5"]
        one.learn(4, [("2", 0, 2)])
        one.learn(6, [])
        assert "ahead" not in one.state_dict()
    assert again.state_dict() == mine.state_dict()


def test_rows_of_steps_without_results_come_again_if_there_are_no_others():
    mine = curriculum(3, explore=1.0)
    assert names(mine.tasks(0, 3)) == ["0", "1", "2"]
    mine.close(3)
    assert sorted(names(mine.tasks(3, 3))) == ["0", "1", "2"]


def test_measures_by_hand():
    mine = curriculum(4, explore=1.0, memory=0.75)
    mine.tasks(0, 3)
    # Two groups of task 0, 1 of 4 and 3 of 4; task 1 has no reward.
    mine.learn(3, [("0", 1, 4), ("0", 3, 4), ("2", 0, 4)])
    assert mine.state_dict()["rows"] == [[0, 0.5, 1], [1, None, 1], [2, 0.0, 1]]
    assert mine.state_dict()["fresh"] == 3
    assert mine.metrics()["curriculum/new"] == 1
    # All four rows are drawn: 3 is new, and task 0 now succeeds 4 times of 4.
    assert sorted(names(mine.tasks(3, 4))) == ["0", "1", "2", "3"]
    mine.learn(7, [("0", 4, 4), ("1", 1, 2), ("3", 0, 2)])
    # 0.75 * 0.5 + 0.25 * 1 = 0.625; the first measure of task 1 is 1/2; task 2 keeps its own.
    assert mine.state_dict()["rows"] == [[0, 0.625, 2], [1, 0.5, 2], [2, 0.0, 2], [3, 0.0, 2]]


def test_tasks_of_an_earlier_step_are_gone():
    mine = curriculum(9)
    mine.tasks(0, 2)
    mine.learn(2, [])
    with pytest.raises(ValueError, match="task 1 belongs to an earlier step"):
        mine.tasks(1, 1)


def test_what_counts_as_success():
    task = Task(task_id="t", messages=())
    group = [Rollout(task=task, rollout_id="a", reward=r) for r in (0.5, 0.4, None, 1.0)]
    unscored = [Rollout(task=task, rollout_id="b")]
    assert curriculum(1).results([group, unscored]) == [("t", 1, 3)]
    assert curriculum(1, success=0.5).results([group, unscored]) == [("t", 2, 3)]


def learnt(mine: Curriculum, steps: int, size: int, rate: dict[str, float]) -> Counter[str]:
    """How often each task is drawn in some steps; its groups of 10 succeed at its rate."""
    counts: Counter[str] = Counter()
    cursor = mine.state_dict()["start"]
    for _ in range(steps):
        drawn = names(mine.tasks(cursor, size))
        counts.update(drawn)
        cursor += size
        results: list[Result] = [(name, round(10 * rate[name]), 10) for name in drawn]
        mine.learn(cursor, results)
    return counts


def test_tasks_in_the_band_are_drawn_more_and_none_is_lost():
    """30 rows: 10 never succeed, 10 always, 10 every other time; all are known after 15 steps."""
    rate = {str(i): (0.0, 1.0, 0.5)[i % 3] for i in range(30)}
    mine = curriculum(30, floor=0.1, revisit=10_000)
    learnt(mine, 40, 4, rate)
    counts = learnt(mine, 500, 4, rate)
    band = [counts[str(i)] for i in range(2, 30, 3)]
    rest = [counts[str(i)] for i in range(30) if i % 3 != 2]
    # First draws of a step fall on the band with 10 / (10 + 20 * 0.1) = 5 of 6; later ones less,
    # since none is drawn twice: of 2,000 draws about 1,650 fall on its 10 tasks.
    assert 1500 < sum(band) < 1800
    assert min(band) > 4 * max(rest)
    assert min(rest) > 0


def test_old_measures_are_looked_at_again():
    rate = {str(i): 0.0 for i in range(20)} | {"7": 0.5}
    seldom, often = (curriculum(20, floor=1e-3, revisit=steps) for steps in (10_000, 8))
    for mine in (seldom, often):
        learnt(mine, 30, 2, rate)
    assert learnt(seldom, 100, 2, rate)["7"] > 90
    counts = learnt(often, 100, 2, rate)
    # Those that have become stale share a place with each other and with task 7.
    assert min(counts.values()) > 2


def simulated(size: int, **changes: Any) -> tuple[int, int]:
    """Rollouts until all learnable tasks are learnt: with a curriculum, and in the rows' order.

    Of 100 tasks 60 cannot be learnt and 20 are solved from the start. 20 succeed in half of the
    rollouts and are learnt after 6 groups.
    """

    def rate(name: str, seen: Counter[str]) -> float:
        place = int(name) % 5
        if place < 3:
            return 0.0
        return 1.0 if place == 3 or seen[name] >= 6 else 0.5

    found = []
    for sampler in (curriculum(100, **changes), source(100)):
        seen: Counter[str] = Counter()
        cursor = 0
        while any(seen[str(i)] < 6 for i in range(4, 100, 5)):
            drawn = names(sampler.tasks(cursor, size))
            results = [(name, round(4 * rate(name, seen)), 4) for name in drawn]
            seen.update(drawn)
            cursor += size
            if isinstance(sampler, Curriculum):
                sampler.learn(cursor, results)
        found.append(4 * cursor)
    return found[0], found[1]


def test_the_target_is_reached_in_fewer_rollouts():
    ours, uniform = simulated(8)
    # In the rows' order the 6th visit of row 99 is draw 600, in steps of 8 that are 75 steps.
    assert uniform == 4 * 600
    # Every row once is 100 draws; 5 more of 20 tasks are 100 again if none is wasted.
    assert 4 * 200 <= ours < 4 * 400


@given(
    rows=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    solved=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    seed=st.integers(0, 3),
)
@settings(max_examples=60)
def test_a_resumed_curriculum_draws_the_same(rows, sizes, solved, seed):
    mine = curriculum(rows, seed)
    cursor = 0
    for size in sizes:
        again = curriculum(rows, seed)
        again.load_state_dict(json.loads(json.dumps(mine.state_dict())))
        drawn = names(mine.tasks(cursor, size))
        # Another process asks for its own part only, and in another order.
        half = size // 2
        later = names(again.tasks(cursor + half, size - half))
        assert names(again.tasks(cursor, half)) + later == drawn
        # No row twice in a step, unless there are no more.
        assert len(set(drawn)) == min(size, rows)
        cursor += size
        results = [(name, solved[int(name)], 4) for name in drawn]
        mine.learn(cursor, results)
        again.learn(cursor, results)
        assert again.state_dict() == mine.state_dict()


REFUSED = [
    ({"low": 0.3}, "low=0.3: has no effect without data.curriculum.enabled=true"),
    ({"enabled": True, "low": 0.9}, "low=0.9: needs 0 <= low <= high <= 1"),
    ({"enabled": True, "floor": 0.0}, "floor=0.0: must be more than 0"),
    ({"enabled": True, "explore": 1.5}, "explore=1.5: must be at most 1"),
    ({"enabled": True, "memory": 1.0}, "memory=1.0: must be below 1"),
    ({"enabled": True, "revisit": 0}, "revisit=0: must be at least 1"),
]


@pytest.mark.parametrize(("settings", "problem"), REFUSED)
def test_settings_without_a_meaning_are_refused(settings, problem):
    with pytest.raises(ConfigError) as caught:
        validated(CurriculumConfig, settings, "data.curriculum")
    assert str(caught.value).startswith(f"data.curriculum.{problem}")


def test_a_setting_is_refused_before_anything_is_loaded(capsys):
    assert main(["data.curriculum.enabled=true", "data.curriculum.high=nan"]) == 2
    assert "must be a finite number" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "eval"])
def test_no_other_verb_draws_tasks_so(verb, capsys):
    assert main([verb, "data.curriculum.enabled=true"]) == 2
    assert "has no effect in agenttrain" in capsys.readouterr().err


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]


@pytest.mark.slow
def test_a_run_that_is_resumed_draws_what_it_would_have(tmp_path):
    """With groups that are replaced, so that steps draw different numbers of tasks."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(shop_row("train", i, 0)) + "\n" for i in range(6)))
    arguments = ["data=file", f"data.train.path={file}", f"data.test.path={file}"]
    arguments += ["debug=tiny", "eval.questions=0", "tracker=none", "data.curriculum.enabled=true"]
    arguments += ["algorithm.dynamic_sampling=1", "data.shuffle=true"]
    # The linear schedule ends with the steps.
    arguments += ["optimizer.schedule=constant"]
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert main([*arguments, "steps=3", f"hydra.run.dir={whole}"]) == 0
    assert main([*arguments, "steps=1", f"hydra.run.dir={halved}"]) == 0
    assert main([f"resume={halved}", "steps=3"]) == 0
    assert rows_of(halved) == rows_of(whole)
    assert "curriculum/hard" in rows_of(whole)[0]
    states = [
        json.loads((run / "checkpoints" / "latest" / "state.json").read_text())["curriculum"]
        for run in (whole, halved)
    ]
    assert states[0] == states[1]
    assert states[0]["start"] == sum(row["data/tasks"] for row in rows_of(whole))


def test_rows_without_end_cannot_be_shuffled():
    with pytest.raises(ConfigError) as caught, hydra_session(Source()):
        validate(compose_run(["data.shuffle=true"], Source()).config)
    assert "data.shuffle=true: rows without end have no shuffled order" in str(caught.value)
