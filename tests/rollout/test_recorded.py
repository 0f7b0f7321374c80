"""Recorded rollouts as rows: which are selected, and in which ids they are learned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import parts
import pytest

from agenttrain.data.build import build_tasks
from agenttrain.data.config import DataConfig
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.demonstration import BadDemonstration, Demonstrator
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.recorded import RolloutRows
from agenttrain.rollout.request import RolloutContext
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.rollouts import write_step
from agenttrain.types import (
    Completion,
    Finish,
    Origin,
    Rollout,
    RowTool,
    StopReason,
    Task,
)

ROWS = "agenttrain.rollout.recorded.RolloutRows"
CALL = parts.ids(parts.call("add", '{"a": 3, "b": 4}'))
#            "T"              "h"              "e"              <|im_end|>
SPELLED = (*parts.ids("T"), *parts.ids("h"), *parts.ids("e"), *parts.ids("<|im_end|>"))
"""The text "The" as three tokens. Nothing but the record says that it was sampled so."""


def recorded(task: Task = parts.TASK) -> Rollout:
    """A rollout of a call and the answer `SPELLED`."""
    engine = ScriptedEngine(lambda ids, session, turn: (CALL, SPELLED)[turn])
    context = RolloutContext(
        engine=engine, chat=parts.chat(), toolbox=parts.toolbox(), limits=parts.LIMITS
    )
    done = asyncio.run(run_rollout(RolloutRequest(task=task), context))
    done.rewards, done.reward = {"exact_match": 1.0}, 1.0
    return done


def written(folder: Path, *rollouts: Rollout, arrays_above: int | None = None) -> str:
    write_step(folder, 1, rollouts, arrays_above=arrays_above)
    return str(folder / "rollouts" / "step-000001.jsonl")


def learned(path: str, tools: Toolbox | None = None, **data: object) -> Rollout:
    """The rollout that is learned of the only row of a file."""
    config = DataConfig(train={"_target_": ROWS, "path": path}, **data)
    (task,) = build_tasks(config, seed=0).train.tasks(0, 1)
    demonstrator = Demonstrator(
        chat=parts.chat(), toolbox=tools or parts.toolbox(), limits=parts.LIMITS
    )
    return demonstrator(task, "0/t")


def spans(rollout: Rollout) -> list[tuple[str, list[int]]]:
    return [
        (str(span.origin), list(span.token_ids))
        for trajectory in rollout.trajectories
        for span in trajectory.spans
    ]


def sampled(rollout: Rollout) -> list[tuple[int, ...]]:
    return [span.token_ids for one in rollout.trajectories for span in one.sampled_spans()]


def test_a_rollout_is_learned_in_exactly_its_ids(tmp_path: Path) -> None:
    original = recorded()
    again = learned(written(tmp_path, original))
    assert parts.ids("The<|im_end|>") != SPELLED
    assert sampled(again) == [CALL, SPELLED]
    assert spans(again) == spans(original)
    assert again.trajectories[0].loss_mask == original.trajectories[0].loss_mask
    assert again.trajectories[0].rollout_logprobs == original.trajectories[0].rollout_logprobs
    assert again.trajectories[0].messages == original.trajectories[0].messages
    assert (again.rollout_id, again.reward, again.rewards) == ("0/t", None, {})
    assert again.task.columns == {}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


def test_another_prompt_is_this_runs_and_the_sampled_ids_stay(tmp_path: Path) -> None:
    """With a tool more, and with a system message, the context is rendered anew."""
    path = written(tmp_path, recorded())
    more = parts.toolbox(parts.add, parts.final_answer, multiply)
    for again, tools in (
        (learned(path, more), more),
        (learned(path, system="Be brief."), parts.toolbox()),
    ):
        assert sampled(again) == [CALL, SPELLED]
        main = again.trajectories[0]
        prompt = main.messages[: main.prompt_messages]
        rendered = parts.chat().prompt_ids(prompt, tools.schemas(None))
        assert list(main.token_ids[: main.prompt_length]) == rendered
        assert main.token_ids != recorded().trajectories[0].token_ids


def edited(path: str, change: Callable[[dict], None]) -> str:
    """The file with its only record changed."""
    record = json.loads(Path(path).read_text())
    change(record)
    Path(path).write_text(json.dumps(record) + "\n")
    return path


def test_ids_of_another_tokenizer_are_not_learned(tmp_path: Path) -> None:
    """Each id is one more than here, as in a vocabulary with a further token in front."""

    def move(record: dict) -> None:
        record["trajectories"][0]["token_ids"] = [
            token_id + 1 for token_id in record["trajectories"][0]["token_ids"]
        ]

    again = learned(edited(written(tmp_path, recorded()), move))
    assert sampled(again) == [CALL, parts.ids("The<|im_end|>")]
    assert again.trajectories[0].messages == recorded().trajectories[0].messages


def test_a_reply_that_this_template_renders_otherwise_is_rendered_anew(tmp_path: Path) -> None:
    """The ids after the first turn decide: here the recorded ones lack the newline."""
    original = recorded()

    def shorten(record: dict) -> None:
        (trajectory,) = record["trajectories"]
        first = next(s for s in trajectory["spans"] if s["origin"] == "template")
        del trajectory["token_ids"][first["start"]], trajectory["logprobs"][first["start"]]
        for span in trajectory["spans"]:
            for end in ("start", "end"):
                span[end] -= span[end] > first["start"]

    again = learned(edited(written(tmp_path, original), shorten))
    assert spans(again) == spans(original)


def test_all_trajectories_are_learned_and_only_as_they_were(tmp_path: Path) -> None:
    original = recorded()
    main = original.trajectories[0]
    side = original.branch(0, main.prompt_length, role="summary")
    side.messages = [*main.messages[:1], {"role": "assistant", "content": "The"}]
    side.prompt_messages = 1
    completion = Completion(
        token_ids=SPELLED, logprobs=(-1.0,) * 4, finish=Finish.stop, versions=((0, 4),)
    )
    side.append_sampled(completion, side.token_ids)
    path = written(tmp_path, original)
    again = learned(path)
    assert sampled(again) == [CALL, SPELLED, SPELLED]
    assert spans(again) == spans(original)
    assert again.trajectories[1].parent == (0, main.prompt_length)
    with pytest.raises(BadDemonstration, match="its 2 trajectories can only be learned as they"):
        learned(path, parts.toolbox(parts.add, parts.final_answer, multiply))


def test_calls_of_missing_tools_are_learned_as_recorded_or_named(tmp_path: Path) -> None:
    """A call of a tool that does not exist was answered by an error, and is part of the record."""
    wrong = parts.call("subtract", '{"a": 3, "b": 4}')
    original = parts.rollout(wrong, "7<|im_end|>")
    path = written(tmp_path, original)
    assert spans(learned(path)) == spans(original)
    with pytest.raises(BadDemonstration) as caught:
        learned(path, parts.toolbox(parts.add))
    assert "turn 0: it calls the tool 'subtract', which the model is not shown" in str(caught.value)
    assert "the tools of this run give another prompt" in str(caught.value)


def test_a_rows_own_tools_are_recorded(tmp_path: Path) -> None:
    own = RowTool(
        name="plus",
        description="Add.",
        parameters=parts.toolbox().schemas(None)[0]["function"]["parameters"],
        executor="add",
    )
    task = Task(task_id="t", messages=parts.TASK.messages, tools=("add", own))
    path = written(tmp_path, recorded(task))
    assert spans(learned(path)) == spans(recorded(task))
    (line,) = Path(path).read_text().splitlines()
    assert json.loads(line)["tools"] == [
        "add",
        {
            "name": "plus",
            "description": "Add.",
            "parameters": own.parameters,
            "executor": "add",
        },
    ]


def attempts() -> list[Rollout]:
    """Rewards 1, 0.5, none; and rewards of 1 that ended by an error and by the token limit."""
    rollouts = [recorded() for _ in range(5)]
    ends = [StopReason.completed] * 3 + [StopReason.error, StopReason.max_tokens]
    for number, (rollout, reward, end) in enumerate(
        zip(rollouts, (1.0, 0.5, None, 1.0, 1.0), ends, strict=True)
    ):
        rollout.rollout_id, rollout.reward, rollout.stop_reason = f"r-{number}", reward, end
    return rollouts


def test_rollouts_are_selected_by_their_reward_and_their_end(tmp_path: Path) -> None:
    path = written(tmp_path, *attempts())

    def ids(**arguments: object) -> list[str]:
        rows = RolloutRows(path, **arguments)
        return [rows[index]["rollout"]["rollout_id"] for index in range(len(rows))]

    assert ids() == ["r-0", "r-1", "r-2"]
    assert ids(limit=2) == ["r-0", "r-1"]
    assert ids(min_reward=0.5) == ["r-0", "r-1"]
    assert ids(min_reward=1) == ["r-0"]
    assert RolloutRows(path, min_reward=1).note == (
        "1 of 5 rollouts; left out: 1 with a reward below 1, 1 without a reward, 1 ended by error, "
        "1 ended by max_tokens"
    )
    where = "rollout.rewards.exact_match == `1` && length(rollout.tool_calls) == `1`"
    config = DataConfig(train={"_target_": ROWS, "path": path}, where=where)
    assert len(build_tasks(config, seed=0).train) == 3


def test_rollouts_of_one_question_stay_on_one_side(tmp_path: Path) -> None:
    examples = (
        {"role": "user", "content": "what is 1 + 1?"},
        {"role": "assistant", "content": "2"},
    )

    def asked(number: int) -> Rollout:
        question = {"role": "user", "content": f"what is {number // 8} + 4?"}
        return recorded(Task(task_id=str(number // 8), messages=(*examples, question)))

    path = written(tmp_path, *(asked(number) for number in range(64)))
    config = DataConfig(train={"_target_": ROWS, "path": path}, test_fraction=0.5)
    splits = build_tasks(config, seed=0)
    train, test = (
        {task.task_id for task in source.tasks(0, len(source))}
        for source in (splits.train, splits.test)
    )
    assert train and test and not train & test
    assert len(splits.train) + len(splits.test) == 64


def test_files_that_hold_nothing_to_learn_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, *attempts())
    with pytest.raises(ValueError, match=r"^min_reward=2: leaves none of 5 rollouts: 2 with a rew"):
        RolloutRows(path, min_reward=2)
    unrewarded = recorded()
    unrewarded.reward = None
    with pytest.raises(ValueError, match=r"^min_reward=1: none of the 1 rollouts has a reward"):
        RolloutRows(written(tmp_path / "none", unrewarded), min_reward=1)
    with pytest.raises(ValueError, match=r"^min_reward=True: must be a number"):
        RolloutRows(path, min_reward=True)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "2+2?"}\n')
    with pytest.raises(ValueError, match="line 1: is no rollout that a run recorded"):
        RolloutRows([path, str(other)])
    other.write_text('{"prompt": \n')
    with pytest.raises(ValueError, match="line 1: column 12: is not JSON"):
        RolloutRows(str(other))
    table = tmp_path / "rows.csv"
    table.write_text("prompt\n2+2?\n")
    with pytest.raises(ValueError, match="rows are read by data=file"):
        RolloutRows(str(table))


def test_rows_of_a_step_open_its_file_of_arrays_once(tmp_path: Path) -> None:
    """It lists the arrays of all rollouts: opening it for each row would be quadratic."""
    rollouts = attempts()
    rows = RolloutRows(written(tmp_path, *rollouts))
    expected = [rows[index] for index in range(len(rows))]
    rows = RolloutRows(written(tmp_path, *rollouts, arrays_above=0))
    (arrays,) = (tmp_path / "rollouts").glob("*.npz")
    arrays.unlink()
    assert [rows[index] for index in range(len(rows))] == expected


@pytest.mark.parametrize("name", [["a"], {}, "..", ""])
def test_a_file_of_arrays_has_a_name(tmp_path: Path, name: object) -> None:
    path = edited(
        written(tmp_path, recorded(), arrays_above=0),
        lambda record: record.update(arrays=name),
    )
    with pytest.raises(ValueError, match=r"^path=.*, line 1: .*: is missing"):
        RolloutRows(path)


@pytest.mark.parametrize("arrays_above", [None, 0])
def test_a_broken_record_is_a_bad_row(tmp_path: Path, arrays_above: int | None) -> None:
    path = edited(
        written(tmp_path, recorded(), arrays_above=arrays_above),
        lambda record: record["trajectories"][0].pop("spans"),
    )
    with pytest.raises(BadDemonstration, match="is no complete record of a rollout"):
        learned(path)


def test_origins_of_the_learned_context(tmp_path: Path) -> None:
    """A prompt, a call, its reply between template text, and the answer."""
    origins = [origin for origin, _ in spans(learned(written(tmp_path, recorded())))]
    assert origins == [
        *(Origin.prompt, Origin.sampled, Origin.template, Origin.tool),
        *(Origin.template, Origin.sampled),
    ]
