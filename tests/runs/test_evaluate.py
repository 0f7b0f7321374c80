"""Evaluation with scripted answers: reward, pass@k, groups, stop reasons, what is left out."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import parts
import pytest
from parts import LIMITS, ids, toolbox

from agenttrain.engines.base import EngineError
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.evaluation import Best, evaluate, from_json, restricted, to_json
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collector import Collector
from agenttrain.rollout.config import EvalConfig
from agenttrain.tracking.metrics import Estimate, Scores
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import RowTool, Task

TASKS = [
    Task(task_id=f"t{i}", messages=({"role": "user", "content": "?"},), columns={"kind": kind})
    for i, kind in enumerate("aab")
]


def says_yes(rollout) -> float:
    """1 for the answer `yes`."""
    return float(rollout.trajectories[0].messages[-1]["content"] == "yes")


def collector(engine):
    rubric = Rubric({"yes": says_yes})
    return Collector(
        engine=engine, chat=parts.chat(), toolbox=toolbox(), rubric=rubric, limits=LIMITS
    )


def answers(token_ids, session, turn):
    """Sampled: task 0 yes and yes, task 1 yes and no, task 2 no and no. Greedy: always yes."""
    _, label, task, sample = session.split("-")
    right = label == "greedy" or int(task) + int(sample) < 2
    return ids("yes<|im_end|>" if right else "no<|im_end|>")


def run(engine, **settings):
    config = EvalConfig(**{"samples": 2, "group_by": "kind", **settings})
    return asyncio.run(evaluate(collector(engine), TASKS, config, seed=0))


def test_reward_pass_at_k_and_groups():
    sampled, greedy = run(ScriptedEngine(answers))
    # task means 1, 1/2, 0
    assert sampled.reward.mean == pytest.approx(0.5)
    assert sampled.reward.n == 3
    # pass@1: the same means; pass@2: tasks 0 and 1 of 3
    assert {k: e.mean for k, e in sampled.pass_at.items()} == {
        1: pytest.approx(0.5),
        2: pytest.approx(2 / 3),
    }
    # pass@2 is 0 or 1 for each task: Wilson's interval of 2 of 3. With z2 = 1.96^2 = 3.8415:
    # (2/3 + z2/6 ± 1.96 sqrt(2/9/3 + z2/36)) / (1 + z2/3) = (1.30691 ± 0.83357) / 2.28049
    assert sampled.pass_at[2].low == pytest.approx(0.20765, abs=1e-4)
    assert sampled.pass_at[2].high == pytest.approx(0.93851, abs=1e-4)
    # pass@1 is 1, 1/2, 0: normal over tasks, 1/2 ± 1.96 * (1/2) / sqrt(3) = 1/2 ± .566, cut at
    # 0 and 1, between which all of them lie
    assert (sampled.pass_at[1].low, sampled.pass_at[1].high) == (0.0, 1.0)
    # a: (1 + 1/2) / 2, b: 0
    assert {k: v.mean for k, v in sampled.by_group.items()} == {"a": 0.75, "b": 0.0}
    assert sampled.stop_reasons == {"completed": 1.0}
    assert (greedy.reward.mean, greedy.questions, greedy.pass_at[1].mean) == (1.0, 3, 1.0)
    assert list(greedy.pass_at) == [1]


def test_two_evaluations_meet_the_same_noise():
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine(answers)
        run(engine)
        seeds.append([(sent.session, sent.sampling.seed) for sent in engine.sent])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 9


def test_greedy_is_at_temperature_0_and_sampled_as_configured():
    engine = ScriptedEngine(answers)
    run(engine, temperature=0.7, top_p=0.9)
    assert not any(sent.sampling.routes for sent in engine.sent)  # nothing is trained on
    assert {(s.sampling.temperature, s.sampling.top_p) for s in engine.sent} == {
        (0.7, 0.9),
        (0.0, 1.0),
    }


class _Failing(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session, **others):
        if session.endswith("sampled-0-0") or session.endswith("greedy-2-0"):
            raise EngineError("out of memory")
        return await super().generate(token_ids, sampling, session=session, **others)


def test_failures_that_are_not_the_models_are_left_out_and_told():
    sampled, greedy = run(_Failing(answers))
    # task 0 has one sample left, a success; the others are 1/2 and 0
    assert sampled.reward.mean == pytest.approx(0.5)
    assert sampled.stop_reasons["error"] == pytest.approx(1 / 6)
    # pass@2 over the tasks with two samples: 1 and 0
    assert sampled.pass_at[2].mean == pytest.approx(0.5)
    assert (sampled.dropped, sampled.unscored) == (1, 0)
    assert (greedy.reward.n, greedy.stop_reasons["error"]) == (2, pytest.approx(1 / 3))
    assert math.isnan(greedy.by_group["b"].mean)


def test_what_could_not_be_measured_is_told():
    rubric = Rubric({"none": lambda rollout: None})
    config = EvalConfig(samples=2, greedy=False)
    unscored = replace(collector(ScriptedEngine(answers)), rubric=rubric)
    (sampled,) = asyncio.run(evaluate(unscored, TASKS, config, seed=0))
    assert (sampled.reward.n, sampled.questions) == (0, 3)
    assert math.isnan(sampled.pass_at[1].mean)
    # What was not measured is no metric; how many rollouts that were is one.
    assert sampled.metrics() == {
        "stop/completed": 1.0,
        "rollout/dropped": 0,
        "rollout/unscored": 6,
        "data/overlong": 0,
    }
    long = Task(task_id="long", messages=({"role": "user", "content": "word " * 400},))
    engine = ScriptedEngine(answers, max_context=200)
    tasks = [*TASKS, long]
    (sampled,) = asyncio.run(evaluate(collector(engine), tasks, config, seed=0))
    assert (sampled.overlong, sampled.questions) == (1, 3)
    assert sampled.metrics()["data/overlong"] == 1


def test_what_summary_json_keeps_comes_back(tmp_path):
    evaluations = run(ScriptedEngine(answers))
    update_summary(tmp_path, eval=to_json(evaluations))
    stored = read_summary(tmp_path)["eval"]
    assert stored["reward"] == pytest.approx(0.5)
    assert stored["reward_greedy"] == stored["pass@1_greedy"] == 1.0
    assert stored["questions"] == 3
    back = from_json(stored)
    assert [(s.label, s.reward, s.pass_at, s.by_group) for s in back] == [
        (e.label, e.reward, e.pass_at, e.by_group) for e in evaluations
    ]
    assert from_json({}) == []


def test_nothing_measured_is_null_in_json_and_nan_again(tmp_path):
    update_summary(tmp_path, eval=to_json(run(_Failing(answers))))
    assert "NaN" not in (tmp_path / "summary.json").read_text()
    greedy = from_json(read_summary(tmp_path)["eval"])[1]
    assert math.isnan(greedy.by_group["b"].mean)


def test_a_reward_that_is_no_number_ends_no_evaluation(capsys):
    """Task 0 gets NaN, task 1 scores 1 and 0, task 2 scores 0 twice: (1/2 + 0) / 2."""

    def spoilt(rollout) -> float:
        return math.nan if rollout.task.task_id == "t0" else says_yes(rollout)

    config = EvalConfig(samples=2, greedy=False)
    mine = replace(collector(ScriptedEngine(answers)), rubric=Rubric({"spoilt": spoilt}))
    (sampled,) = asyncio.run(evaluate(mine, TASKS, config, seed=0))
    assert (sampled.reward.mean, sampled.reward.n) == (0.25, 2)
    assert (sampled.unscored, sampled.dropped, sampled.questions) == (2, 2, 3)
    assert all(map(math.isfinite, sampled.metrics().values()))
    assert "it returned nan" in str(sampled.rollouts[0].error)
    told = capsys.readouterr().err
    assert "sampled evaluation: 2 of 6 rollouts have no reward" in told and "nan" in told
    nothing = replace(mine, rubric=Rubric({"nothing": lambda rollout: math.inf}))
    (sampled,) = asyncio.run(evaluate(nothing, TASKS, config, seed=0))
    assert (sampled.reward.n, sampled.unscored) == (0, 6)
    assert not Best().consider(3, [sampled])
    # In training it is an error, and the function may still raise in an evaluation.
    with pytest.raises(RewardError, match="it returned nan"):
        asyncio.run(mine.rubric.score(sampled.rollouts))
    broken = replace(mine, rubric=Rubric({"broken": lambda rollout: 1 / 0}))
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        asyncio.run(evaluate(broken, TASKS, config, seed=0))


def test_evaluation_has_limits_and_tools_of_its_own():
    engine = ScriptedEngine(answers)
    run(engine, tools=["add"], max_turn_tokens=7)
    assert {sent.sampling.max_tokens for sent in engine.sent} == {7}
    prompts = {parts.chat().decode(sent.token_ids) for sent in engine.sent}
    assert all("add" in text and "final_answer" not in text for text in prompts)
    engine = ScriptedEngine(answers)
    run(engine)
    assert {sent.sampling.max_tokens for sent in engine.sent} == {200}
    assert all("final_answer" in parts.chat().decode(sent.token_ids) for sent in engine.sent)


def test_a_rows_own_tools_are_restricted_by_what_runs_them():
    own = RowTool(name="plus", description="Add.", parameters={"type": "object"}, executor="add")
    task = replace(TASKS[0], tools=("final_answer", own))
    declared = ("add", "final_answer")
    assert restricted(task, None, declared) is task
    assert restricted(task, ["add"], declared).tools == (own,)
    assert restricted(TASKS[0], ["final_answer", "of another row"], declared).tools == (
        "final_answer",
    )


def measured(reward: float) -> Scores:
    estimate = Estimate(mean=reward, low=0.0, high=1.0, n=3)
    return Scores(label="sampled", questions=3, reward=estimate, pass_at={}, by_group={})


def test_the_best_evaluation_is_the_first_of_equals_and_never_nan():
    best = Best()
    looks = [(10, math.nan), (20, 0.25), (30, 0.5), (40, 0.5), (50, math.nan), (60, 0.1)]
    assert [best.consider(step, [measured(reward)]) for step, reward in looks] == [
        *(False, True, True, False, False, False),
    ]
    assert best.record == {"step": 30, "reward": 0.5, "low": 0.0, "high": 1.0, "n": 3}
    assert best.step == 30 and Best().step is None
