"""Whose task comes next in a mixture of sources: shares, ends, curricula, and what is saved."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.data.config import AtEnd, CurriculumConfig, DataConfig, SourceConfig
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.mixture import MixedSource, Mixture, Questions, shares_of
from agenttrain.data.tasks import GeneratedRows, TaskSource
from agenttrain.types import ConfigError, Rollout, Task
from agenttrain.utils.sections import validated

STEPS = 1000


def endless(name: str) -> TaskSource:
    return TaskSource(GeneratedRows(lambda index: {"prompt": f"{name} {index}"}), source=name)


def finite(name: str, rows: int) -> TaskSource:
    return TaskSource([{"prompt": f"{name} {i}"} for i in range(rows)], source=name)


def mixture(weights: dict[str, int], seed: int = 0) -> Mixture:
    total = sum(weights.values())
    sources = {
        name: MixedSource(tasks=endless(name), share=Fraction(weight, total))
        for name, weight in weights.items()
    }
    return Mixture(sources, seed=seed)


def drawn(tasks: list[Task]) -> list[tuple[str, str]]:
    return [(task.source, task.task_id) for task in tasks]


@settings(max_examples=6)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    tasks=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_after_every_step_each_source_has_its_share(weights, tasks, seed):
    mine = mixture({f"s{i}": weight for i, weight in enumerate(weights)}, seed)
    total, counts = sum(weights), Counter[str]()
    for step in range(1, STEPS + 1):
        in_step = Counter(task.source for task in mine.tasks((step - 1) * tasks, tasks))
        counts += in_step
        mine.learn(step * tasks, [])
        for i, weight in enumerate(weights):
            # Rounded up or down, and exact where it is a whole number.
            share = Fraction(step * tasks * weight, total)
            assert abs(counts[f"s{i}"] - share) < 1
            if tasks * weight % total == 0:
                assert in_step[f"s{i}"] == tasks * weight // total


def test_sources_come_in_turn_and_each_in_its_own_order():
    names = drawn(mixture({"a": 2, "b": 1}).tasks(0, 6))
    assert names == [("a", "0"), ("b", "0"), ("a", "1"), ("a", "2"), ("b", "1"), ("a", "3")]
    firsts = {mixture({"a": 1, "b": 1}, seed).tasks(0, 1)[0].source for seed in range(8)}
    assert firsts == {"a", "b"}  # the seed decides between equals


def test_the_tasks_do_not_depend_on_how_they_are_asked_for():
    at_once, in_parts = mixture({"a": 5, "b": 3, "c": 1}), mixture({"a": 5, "b": 3, "c": 1})
    whole = drawn(at_once.tasks(0, 40))
    assert drawn([*in_parts.tasks(0, 7), *in_parts.tasks(7, 33)]) == whole
    assert drawn(in_parts.tasks(3, 5)) == whole[3:8]  # a step that is repeated
    in_parts.learn(10, [])
    assert drawn(in_parts.tasks(10, 30)) == whole[10:]
    with pytest.raises(ValueError, match="earlier step"):
        in_parts.tasks(9, 1)


def test_the_saved_state_has_each_sources_cursor_and_goes_on_alike():
    before = mixture({"a": 2, "b": 1})
    before.tasks(0, 9)  # more than the step needs: they are drawn again
    before.learn(4, [])
    state = json.loads(json.dumps(before.state_dict()))
    assert {name: saved["cursor"] for name, saved in state["sources"].items()} == {"a": 3, "b": 1}
    after = mixture({"a": 2, "b": 1})
    after.load_state_dict(state)
    assert drawn(after.tasks(4, 20)) == drawn(before.tasks(4, 20))


def test_a_source_that_ends_is_repeated_or_dropped():
    share = Fraction(1, 2)
    repeated = Mixture(
        {
            "a": MixedSource(tasks=endless("a"), share=share),
            "b": MixedSource(tasks=finite("b", 2), share=share),
        },
        seed=0,
    )
    ids = [task_id for source, task_id in drawn(repeated.tasks(0, 10)) if source == "b"]
    assert ids == ["0", "1", "0", "1", "0"]
    repeated.learn(10, [])
    assert repeated.metrics() == {"source/b/epoch": 2.5}

    third = Fraction(1, 3)
    dropped = Mixture(
        {
            "a": MixedSource(tasks=endless("a"), share=third),
            "b": MixedSource(tasks=finite("b", 2), share=third, at_end=AtEnd.drop),
            "c": MixedSource(tasks=endless("c"), share=third),
        },
        seed=0,
    )
    counts = Counter(task.source for task in dropped.tasks(0, 6))
    assert counts == {"a": 2, "b": 2, "c": 2}
    assert Counter(task.source for task in dropped.tasks(6, 10)) == {"a": 5, "c": 5}
    dropped.learn(9, [])
    again = Mixture(dropped._sources, seed=0)
    again.load_state_dict(json.loads(json.dumps(dropped.state_dict())))
    assert drawn(again.tasks(9, 10)) == drawn(dropped.tasks(9, 10))


def test_a_sources_curriculum_learns_from_its_own_groups_only():
    rows = finite("b", 20)
    config = CurriculumConfig(enabled=True, explore=1.0)
    curriculum = Curriculum(rows, config, seed=0)
    mine = Mixture(
        {
            "a": MixedSource(tasks=endless("a"), share=Fraction(3, 4)),
            "b": MixedSource(tasks=rows, share=Fraction(1, 4), curriculum=curriculum),
        },
        seed=0,
    )
    tasks = mine.tasks(0, 4)
    groups = [
        [Rollout(task=task, rollout_id=f"{n}-{i}") for i in range(2)]
        for n, task in enumerate(tasks)
    ]
    for group in groups:
        group[0].reward, group[1].reward = 1.0, 0.0
    results = mine.results(groups)
    assert [(name, result.successes, result.rewards) for name, result in results] == [("b", 1, 2)]
    mine.learn(4, results)
    metrics = mine.metrics()
    assert metrics["source/b/curriculum/band"] == 1
    assert metrics["source/b/curriculum/success"] == 0.5
    mine.tasks(4, 2)  # a step without a task of b changes nothing of it
    if "b" not in {task.source for task in mine.tasks(4, 2)}:
        mine.learn(6, [])
        assert mine.metrics()["source/b/curriculum/band"] == 1


def test_counts_are_exact_and_weights_share_the_rest():
    sources = {"a": SourceConfig(train=ROWS, count=4)}
    sources |= {name: SourceConfig(train=ROWS, weight=w) for name, w in (("b", 1), ("c", 2))}
    shares = shares_of(sources, 16)
    assert shares == {"a": Fraction(1, 4), "b": Fraction(1, 4), "c": Fraction(1, 2)}
    tenths = {name: SourceConfig(train=ROWS, weight=w) for name, w in (("a", 0.1), ("b", 0.3))}
    assert shares_of(tenths, 8) == {"a": Fraction(1, 4), "b": Fraction(3, 4)}


def test_the_questions_of_an_evaluation_are_the_first_of_each_source():
    questions = Questions({"a": (endless("a"), 2), "b": (finite("b", 1), 5), "c": (None, 5)})
    assert len(questions) == 3
    assert drawn(questions.tasks(0, 3)) == [("a", "0"), ("a", "1"), ("b", "0")]


ROWS = {"_target_": "agenttrain.data.bundled.shop.row", "split": "train", "seed": 0}


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"train": ROWS, "weight": 0}, "data.sources.shop.weight=0"),
        ({"train": ROWS, "weight": 1, "count": 1}, "data.sources.shop.weight=1"),
        ({"train": ROWS, "wieght": 1}, "data.sources.shop.wieght=1"),
        ({"train": ROWS, "shuffle": True}, "data.sources.shop.shuffle=true"),
        ({"train": ROWS, "at_end": "drop"}, "data.sources.shop.at_end=drop"),
        ({"train": ROWS, "at_end": "stop"}, "data.sources.shop.at_end=stop"),
        ({"train": ROWS, "sources": {"a": {"train": ROWS}}}, "data.sources.shop.sources="),
        ({"train": ROWS, "curriculum": {"low": 0.3}}, "data.sources.shop.curriculum.low=0.3"),
        ({"train": ROWS, "eval": {"questions": -1}}, "data.sources.shop.eval.questions=-1"),
        ({"weight": 1}, "data.sources.shop.train"),
        (3, "data.sources.shop=3"),
    ],
)
def test_a_wrong_key_of_a_source_is_named(source: Any, key: str):
    with pytest.raises(ConfigError) as error:
        validated(DataConfig, {"train": {}, "test": {}, "sources": {"shop": source}}, "data")
    assert str(error.value).startswith(key)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"train": {}}, "data.sources={}"),
        ({"train": {}, "sources": {"9a": {"train": ROWS}}}, "data.sources.9a"),
        ({"train": {}, "sources": {"a": {"train": ROWS}}, "where": "x"}, "data.where=x"),
        ({"train": ROWS, "sources": {"a": {"train": ROWS}}}, "data.train="),
        ({"train": {}, "sources": {"a": {"train": ROWS}}, "only": "b"}, "data.only=b"),
        ({"train": ROWS, "only": "b"}, "data.only=b"),
    ],
)
def test_keys_beside_the_sources_are_refused(data: Any, key: str):
    with pytest.raises(ConfigError) as error:
        validated(DataConfig, data, "data")
    assert str(error.value).startswith(key)
