"""Recorded rollouts find their tasks again in the data."""

from __future__ import annotations

from agenttrain.commands.recorded import find_tasks
from agenttrain.data.tasks import GeneratedRows, TaskSource

ROWS = [
    {"task_id": "a", "prompt": "1+1?", "answer": "2"},
    {"task_id": "b", "prompt": "1+2?", "answer": "3"},
    {"task_id": "a", "prompt": "2+2?", "answer": "4"},
]


def record(rollout_id: str, task_id: str, *texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {
        "rollout_id": rollout_id,
        "task_id": task_id,
        "trajectories": [{"messages": messages}],
    }


def test_rows_of_one_name_are_told_apart_by_their_prompts():
    records = [
        record("r0", "a", "2+2?", "4"),
        record("r1", "a", "1+1?", "2"),
        record("r2", "a", "1+1?", "3"),
        record("r3", "b", "9+9?", "18"),
    ]
    found = find_tasks(records, TaskSource(ROWS, shuffle=True, seed=3), drawn=100)
    assert {name: task.columns["answer"] for name, task in found.items()} == {
        "r0": "4",
        "r1": "2",
        "r2": "2",
    }


def test_no_further_row_is_asked_for_than_a_run_can_have_drawn():
    asked = []

    def row(index: int) -> dict[str, object]:
        asked.append(index)
        return {"task_id": str(index), "prompt": f"{index}?"}

    source = TaskSource(GeneratedRows(row))
    assert list(find_tasks([record("r", "2", "2?")], source, drawn=10)) == ["r"]
    assert asked == [0, 1, 2]
    assert find_tasks([record("r", "12", "12?")], source, drawn=10) == {}
    assert asked[3:] == list(range(10))
