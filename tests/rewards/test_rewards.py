"""Rollouts -> rewards: ours, TRL's, weights, and what ends a run."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from agenttrain.rewards.builtin.answers import ExactMatch
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import Rubric, build_rubric
from agenttrain.types import (
    Completion,
    Finish,
    Origin,
    Rollout,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
)

HERE = __name__
QUESTION = {"role": "user", "content": "?"}


def rollout(*results: ToolResult, text: str = "", number: int = 0, **columns: object) -> Rollout:
    task = Task(task_id=f"task-{number}", messages=(QUESTION,), columns=columns)
    made = Rollout(task=task, rollout_id=f"rollout-{number}", tool_results=list(results))
    (trajectory,) = made.trajectories
    trajectory.messages = [QUESTION, {"role": "assistant", "content": text}]
    trajectory.prompt_messages = 1
    return made


def result(name: str, error: ToolError | None = None, **arguments: object) -> ToolResult:
    call = ToolCall(id="c", name=name, arguments=arguments)
    return ToolResult(call=call, content="ok", error=error)


def score(rubric: Rubric, *rollouts: Rollout) -> list[float | None]:
    asyncio.run(rubric.score(rollouts))
    return [rollout.reward for rollout in rollouts]


def length(rollout: Rollout) -> float:
    return len(rollout.trajectories[0].messages[-1]["content"])


def level_is(rollout: Rollout, level: int, wanted: int = 2) -> float | None:
    return None if level == 0 else float(level == wanted)


async def slow_level(rollout: Rollout, *, level: int) -> float:
    await asyncio.sleep(0)
    return level / 10


def count_columns(rollout: Rollout, **columns: object) -> float:
    return len(columns)


def trl_lengths(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def test_weighted_sum_over_the_functions_that_apply():
    rubric = Rubric({"level": level_is, "slow": slow_level}, {"level": 2.0, "slow": -1.0})
    rows = [rollout(level=level, number=level) for level in (2, 1, 0)]
    # 2*1 - 0.2; 2*0 - 0.1; level does not apply: -0.0
    assert score(rubric, *rows) == pytest.approx([1.8, -0.1, 0.0])
    assert [row.rewards for row in rows] == [
        {"level": 1.0, "slow": 0.2},
        {"level": 0.0, "slow": 0.1},
        {"level": None, "slow": 0.0},
    ]


def test_no_function_applies():
    row = rollout(level=0)
    assert score(Rubric({"level": level_is}), row) == [None]
    assert row.rewards == {"level": None}


def test_no_rollouts():
    assert score(Rubric({"level": level_is, "trl": trl_lengths})) == []


def test_only_named_columns_are_passed_and_all_to_open_functions():
    rubric = Rubric({"level": level_is, "count": count_columns})
    assert score(rubric, rollout(level=2, answer="x", extra=1)) == [1.0 + 3.0]


def test_a_column_called_rollout_does_not_get_in_the_way():
    assert score(Rubric({"count": count_columns}), rollout(rollout="mine", level=2)) == [1.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        (None, None),
    ],
)
def test_what_counts_as_a_number(value, expected):
    row = rollout()
    assert score(Rubric({"f": lambda rollout: value}), row) == [expected]
    assert type(row.reward) is type(expected)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "1.0", [1.0], 1 + 2j, torch.ones(2), object()]
)
def test_what_is_no_reward_names_function_and_rollout(value):
    rows = [rollout(number=0, level=1), rollout(number=1, level=2)]
    rubric = Rubric({"fine": level_is, "odd": lambda rollout, level: 1.0 if level == 1 else value})
    with pytest.raises(RewardError, match="reward 'odd' on rollout 'rollout-1' of task 'task-1'"):
        score(rubric, *rows)
    assert [row.rewards for row in rows] == [{}, {}]


def raises(rollout: Rollout, level: int) -> float:
    raise SystemExit("bye")


async def raises_later(rollout: Rollout, level: int) -> float:
    raise ZeroDivisionError("never")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward 'f' on rollout 'rollout-7' of task 'task-7': SystemExit: bye"),
        (raises_later, "'rollout-7' of task 'task-7': ZeroDivisionError: never"),
    ],
)
def test_an_exception_names_function_and_rollout(function, message):
    with pytest.raises(RewardError, match=message):
        score(Rubric({"f": function}), rollout(number=7, level=1))


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match=r"needs the column 'level', and the row has \['lvl'\]"):
        score(Rubric({"f": level_is}), rollout(lvl=3))


def test_sync_functions_leave_the_event_loop_free():
    go = threading.Event()

    def waits(rollout: Rollout) -> float:
        return float(go.wait(20))

    async def main() -> float | None:
        row = rollout()
        scoring = asyncio.create_task(Rubric({"waits": waits}).score([row]))
        await asyncio.sleep(0)
        go.set()  # never reached if the function ran on the loop
        await scoring
        return row.reward

    assert asyncio.run(main()) == 1.0


def test_sync_functions_see_the_rollouts_in_order():
    seen = []

    def first_is_best(rollout: Rollout) -> float:
        seen.append(rollout.rollout_id)
        return 1 / len(seen)

    rows = [rollout(number=number) for number in range(4)]
    assert score(Rubric({"f": first_is_best}), *rows) == [1, 1 / 2, 1 / 3, 1 / 4]
    assert seen == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]


def test_async_functions_score_at_once():
    async def main() -> list[float | None]:
        both = asyncio.Event()

        async def pair(rollout: Rollout, number: int) -> float:
            if number == 1:
                both.set()
            await both.wait()  # the first ends only after the second began
            return number

        rows = [rollout(number=n) for n in range(2)]
        for row, number in zip(rows, range(2), strict=True):
            row.task = Task(task_id="t", messages=(), columns={"number": number})
        await Rubric({"pair": pair}).score(rows)
        return [row.reward for row in rows]

    assert asyncio.run(main()) == [0.0, 1.0]


def test_trl_functions_as_they_are():
    seen = {}

    def trl_reward(prompts, completions, completion_ids, answer, log_metric, **kwargs):
        seen.update(
            prompts=prompts, completions=completions, ids=completion_ids, answer=answer, **kwargs
        )
        log_metric("m", 1.0)
        return [1.0, None]

    rows = [rollout(text="a", number=0, answer="x", hint=1), rollout(text="bb", number=1)]
    rows[0].trajectories[0].append_context([5, 6], Origin.prompt)
    #                        a <end>
    completion = Completion(
        token_ids=(8, 2), logprobs=(-0.1, -0.2), finish=Finish.stop, versions=((0, 2),)
    )
    rows[0].trajectories[0].append_sampled(completion, [5, 6])
    assert score(Rubric({"trl": trl_reward, "size": trl_lengths}), *rows) == [2.0, 2.0]
    assert seen["prompts"] == [[QUESTION], [QUESTION]]
    assert [c[0]["content"] for c in seen["completions"]] == ["a", "bb"]
    assert seen["ids"] == [[8, 2], []]
    assert (seen["answer"], seen["hint"]) == (["x", None], [1, None])
    assert seen["trainer_state"] is None


def test_an_async_trl_function():
    async def trl_reward(prompts, completions, **kwargs):
        await asyncio.sleep(0)
        return [0.5 for _ in prompts]

    assert score(Rubric({"trl": trl_reward}), rollout(), rollout()) == [0.5, 0.5]


@pytest.mark.parametrize("values", [[1.0], None, 3.0])
def test_a_trl_function_with_too_few_values(values):
    def trl_reward(prompts, completions, **kwargs):
        return values

    with pytest.raises(RewardError, match="for 2 completions"):
        score(Rubric({"trl": trl_reward}), rollout(), rollout())


def test_a_weight_that_cannot_work():
    with pytest.raises(ValueError, match=r"lvel.weight=1.0: no such function \(did you mean 'leve"):
        Rubric({"level": level_is}, {"lvel": 1.0})
    with pytest.raises(ValueError, match=r"level.weight=nan: expected a finite number"):
        Rubric({"level": level_is}, {"level": float("nan")})


@pytest.mark.parametrize(
    ("results", "answer", "expected"),
    [
        ([result("final_answer", answer="Oslo")], "Oslo", 1.0),
        ([result("final_answer", answer=" Oslo\n")], "Oslo", 1.0),
        ([result("final_answer", answer="oslo")], "Oslo", 0.0),
        ([result("final_answer", answer=37)], "37", 1.0),
        ([result("final_answer", answer="37")], 37, 1.0),
        ([result("final_answer", answer="37.0")], 37, 0.0),
        ([], "Oslo", 0.0),
        ([result("other", answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", anser="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.malformed, answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.invalid_arguments, answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.exception, answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.limit, answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.parallel, answer="Oslo")], "Oslo", 0.0),
        ([result("final_answer", ToolError.timeout, answer="Oslo")], "Oslo", 1.0),
        (
            [result("final_answer", answer="Rome"), result("final_answer", answer="Oslo")],
            "Oslo",
            1.0,
        ),
        (
            [
                result("final_answer", answer="Oslo"),
                result("final_answer", answer="Rome"),
                result("final_answer", ToolError.malformed),
            ],
            "Oslo",
            0.0,
        ),
    ],
)
def test_exact_match(results, answer, expected):
    row = rollout(*results, answer=answer)
    assert score(Rubric({"exact_match": ExactMatch()}), row) == [expected]


def test_exact_match_settings():
    settings = {"tool": "done", "argument": "text", "column": "city", "ignore_case": True}
    function = ExactMatch(**settings)
    assert function(rollout(result("done", text="oSLO")), city="Oslo") == 1.0
    with pytest.raises(KeyError, match="needs the column 'city'"):
        function(rollout(), answer="Oslo")


def test_a_rubric_from_configuration():
    rubric = build_rubric(
        {
            "exact": {"_target_": "agenttrain.rewards.builtin.answers.ExactMatch", "weight": 2},
            "level": {"_target_": f"{HERE}.level_is", "wanted": 5},
            "size": {"_target_": f"{HERE}.trl_lengths", "weight": 0.5},
        }
    )
    assert rubric.names == ("exact", "level", "size")
    assert rubric.weights == {"exact": 2.0, "level": 1.0, "size": 0.5}
    # The bound `wanted` wins over the row's. 2*1 + 1*1 + 0.5*3
    row = rollout(result("final_answer", answer="a"), text="abc", answer="a", level=5, wanted=1)
    assert score(rubric, row) == [4.5]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({}, "there is no reward function"),
        ({"x": {"weight": 1}}, r"there is no _target_; add one, e\.g\. reward\.x\._target_="),
        (
            {"x": {"_target_": f"{HERE}.length", "weight": "1"}},
            r"reward\.x\.weight=1: expected a number",
        ),
        ({"x": {"_target_": f"{HERE}.lenght"}}, r"did you mean 'length'\?"),
        ({"x": {"_target_": f"{HERE}.length", "by": 1}}, r"unexpected keyword argument 'by'"),
        ({"x": {"_target_": f"{HERE}.QUESTION"}}, r"is not a function or a class"),
        ({"x": {"_target_": "agenttrain.rewards.builtin.answers.ExactMatch", "tol": 1}}, r"'tol'"),
    ],
)
def test_a_section_that_cannot_work(reward, message):
    with pytest.raises(ValueError, match=message):
        build_rubric(reward)
