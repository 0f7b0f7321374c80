"""Evaluation with scripted answers: reward, pass@k, groups, stop reasons, what is left out."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import parts
import pytest
from parts import LIMITS, ids, toolbox

from agenttrain.config.schema import EvalConfig
from agenttrain.engine.base import EngineError
from agenttrain.engine.scripted import ScriptedEngine
from agenttrain.evaluate import evaluate, from_json, to_json
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collect import Collector
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import Task

TASKS = [
    Task(task_id=f"t{i}", messages=({"role": "user", "content": "?"},), columns={"kind": kind})
    for i, kind in enumerate("aab")
]


def says_yes(rollout) -> float:
    """1 for the answer `yes`."""
    return float(rollout.messages[-1]["content"] == "yes")


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
    assert sampled.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    # a: (1 + 1/2) / 2, b: 0
    assert {k: v.mean for k, v in sampled.by_group.items()} == {"a": 0.75, "b": 0.0}
    assert sampled.stop_reasons == {"completed": 1.0}
    assert (greedy.reward.mean, greedy.questions, greedy.pass_at) == (1.0, 3, {1: 1.0})


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
    assert {(s.sampling.temperature, s.sampling.top_p) for s in engine.sent} == {
        (0.7, 0.9),
        (0.0, 1.0),
    }


class _Failing(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session):
        if session.endswith("sampled-0-0") or session.endswith("greedy-2-0"):
            raise EngineError("out of memory")
        return await super().generate(token_ids, sampling, session=session)


def test_failures_that_are_not_the_models_are_left_out_and_told():
    sampled, greedy = run(_Failing(answers))
    # task 0 has one sample left, a success; the others are 1/2 and 0
    assert sampled.reward.mean == pytest.approx(0.5)
    assert sampled.stop_reasons["error"] == pytest.approx(1 / 6)
    # pass@2 over the tasks with two samples: 1 and 0
    assert sampled.pass_at[2] == pytest.approx(0.5)
    assert (greedy.reward.n, greedy.stop_reasons["error"]) == (2, pytest.approx(1 / 3))
    assert math.isnan(greedy.by_group["b"].mean)


def test_what_could_not_be_measured_is_told():
    rubric = Rubric({"none": lambda rollout: None})
    config = EvalConfig(samples=2, greedy=False)
    unscored = replace(collector(ScriptedEngine(answers)), rubric=rubric)
    (sampled,) = asyncio.run(evaluate(unscored, TASKS, config, seed=0))
    assert (sampled.reward.n, sampled.questions) == (0, 3)
    assert math.isnan(sampled.pass_at[1])
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
    assert [(s.label, s.reward, s.by_group) for s in back] == [
        (e.label, e.reward, e.by_group) for e in evaluations
    ]
    assert from_json({}) == []


def test_nothing_measured_is_null_in_json_and_nan_again(tmp_path):
    update_summary(tmp_path, eval=to_json(run(_Failing(answers))))
    assert "NaN" not in (tmp_path / "summary.json").read_text()
    greedy = from_json(read_summary(tmp_path)["eval"])[1]
    assert math.isnan(greedy.by_group["b"].mean)
