"""A mixture of sources, each with tools and rewards of its own: one step, whole runs, resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agenttrain.cli import main
from agenttrain.commands.sweep.config import objective_problems
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.evaluation import Best, Evaluation, from_json, summarise, to_json
from agenttrain.rollout.collector import Collected, collect, step_metrics
from agenttrain.rollout.request import BatchRequest
from agenttrain.runs.setup import Components, prepare
from agenttrain.settings.checks import check_for_verb, validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.names import depends_on_clock, metric_row
from agenttrain.types import ConfigError, Rollout, Task

pytestmark = pytest.mark.timeout(1200)  # whole runs

MIX = [
    *("data=mix", "tools=[]", "reward=[]"),
    *("+data@data.sources.shop=shop", "data.sources.shop.curriculum.enabled=true"),
    *("data.sources.shop.weight=2", "data.sources.shop.eval.group_by=hops"),
    "+tools@data.sources.shop.tools.sql=sql",
    "+tools@data.sources.shop.tools.final_answer=final_answer",
    "+reward@data.sources.shop.reward.exact_match=exact_match",
    *("+data@data.sources.sums=calculator", "data.sources.sums.eval.questions=3"),
    "+tools@data.sources.sums.tools.add=add",
    "+tools@data.sources.sums.tools.final_answer=final_answer",
    "+reward@data.sources.sums.reward.right=exact_match",
]
"""Two parts of shop, one of sums; the reward of sums has another name."""
NO_QUESTIONS = [f"data.sources.{name}.eval.questions=0" for name in ("shop", "sums")]
BEST = "checkpoint.keep_best=true"
TINY = ["debug=tiny", "tracker=none", "eval.group_by=null", "optimizer.schedule=constant"]


def composed(*overrides: str) -> RunConfig:
    with hydra_session(Source()):
        return compose_run(open_keys(overrides), Source()).config


def problems(*overrides: str, verb: str = "train") -> str:
    with pytest.raises(ConfigError) as error:
        config = composed(*MIX, *overrides)
        validate(config)
        check_for_verb(verb, config, overrides)
    return str(error.value)


def test_each_task_has_the_tools_and_rewards_of_its_source():
    components = Components(composed(*MIX, *TINY))
    tasks = components.tasks.train.tasks(0, 3)
    assert sorted(task.source for task in tasks) == ["shop", "shop", "sums"]
    names = {
        task.source: [schema["function"]["name"] for schema in components.schemas(task)]
        for task in tasks
    }
    assert names == {"shop": ["sql", "final_answer"], "sums": ["add", "final_answer"]}
    calls = {
        task.source: '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "'
        f"{task.columns['answer'] if task.source == 'sums' else 'nobody'}"
        '"}}\n</tool_call>'
        for task in tasks
    }
    source_of = {f"train-1-{place}-0": task.source for place, task in enumerate(tasks)}
    engine = ScriptedEngine(
        lambda ids, session, turn: calls[source_of[session]],
        encode=lambda text: components.tokenizer.encode(text, add_special_tokens=False),
    )
    collector = components.collector(engine)
    request = BatchRequest(tasks=tasks, samples=1, sampling=Sampling(), seed_path=(0, "train", 1))
    collected = asyncio.run(collect(collector, request))
    rewards = {r.task.source: (r.rewards, r.stop_reason) for r in collected.rollouts}
    assert rewards == {
        "shop": ({"exact_match": 0.0}, "stop_tool"),
        "sums": ({"right": 1.0}, "stop_tool"),
    }
    metrics = step_metrics(collector.metric_names, collected, {"rollout": 1.0})
    assert metrics["source/shop/tasks"] == 2 and metrics["source/sums/tasks"] == 1
    assert metrics["source/shop/reward"] == 0 and metrics["source/sums/reward"] == 1
    assert metrics["rewards/right/mean"] == 1 and metrics["tools/add/calls"] == 0
    assert all(metric_row(name) is not None for name in metrics)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["stop_tools=[submit]"], "stop_tools=[submit]"),
        (["data.sources.sums.stop_tools=[sql]"], "data.sources.sums.stop_tools=[sql]"),
        (["+tools.mine._target_=agenttrain.tools.builtin.calculator.add"], "tools.mine"),
        (["+reward.mine._target_=agenttrain.rewards.builtin.tools.tool_success"], "reward.mine"),
        (["data.sources.shop.tools.sql.timeout_s=0"], "data.sources.shop.tools.sql.timeout_s=0"),
        (["data.sources.shop.reward.exact_match.weight=a"], "data.sources.shop.reward."),
        (["data.sources.shop.train.splt=tune"], "data.sources.shop.train.splt=tune"),
        (["data.sources.sums.count=16"], "data.sources.sums.count=16"),
        (["agent=endpoint", "agent.command=[a]"], "agent=endpoint"),
        (["eval.tools=[sql]"], "eval.tools=[sql]"),
        (["data.train._target_=mine.rows"], "data.train="),
        (["algorithm=reinforce_pp", "algorithm.scale=none"], "algorithm.advantage=batch"),
        (["algorithm.scale=batch"], "algorithm.scale=batch"),
        ([*NO_QUESTIONS, "eval.every=5"], "eval.every=5"),
        ([*NO_QUESTIONS, "eval.every=5", "eval.questions=0", BEST], BEST),
        (
            [
                *("algorithm.rewards=normalize_each", "algorithm.scale=none"),
                "data.sources.sums.reward.right.weight=2",
                "+reward@data.sources.shop.reward.right=exact_match",
            ],
            "data.sources.sums.reward.right.weight=2",
        ),
    ],
)
def test_a_mistake_names_the_key_of_its_source(overrides, key):
    assert problems(*overrides).startswith(key)


OWN = ["+data@data.sources.own=own", "data.sources.own.train._target_=builtins.list"]


def test_a_source_without_test_rows_does_not_stop_an_evaluation():
    check_for_verb("eval", composed(*MIX, *OWN), ())
    with pytest.raises(ConfigError, match=r"^data\.sources: .*data\.sources\.own\.test\."):
        check_for_verb("eval", composed("data=mix", *OWN), ())


def test_the_same_rows_for_both_splits_are_refused_with_the_keys_of_their_source(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "hi"}\n')
    mine = ["+data@data.sources.mine=file", f"data.sources.mine.path={file}"]
    mine += ["+tools@data.sources.mine.tools.final_answer=final_answer"]
    mine += ["+reward@data.sources.mine.reward.exact_match=exact_match"]
    assert problems(*mine).endswith("data.sources.mine.eval.questions=0")
    validate(composed(*MIX, *mine, "data.sources.mine.eval.questions=0"))


@pytest.mark.slow
def test_a_column_that_only_some_sources_have_is_refused_with_the_rows_that_lack_it(tmp_path):
    mine = [*few(tmp_path), "data.sources.few.test_fraction=0.5", "eval.group_by=hops"]
    mine += ["data.sources.sums.eval.questions=0"]  # whose rows lack it too
    with pytest.raises(ValueError, match=r"^eval\.group_by=hops: .*data\.sources\.few\.test"):
        prepare(composed(*MIX, *TINY, *mine))


def test_the_questions_of_one_source_make_an_evaluation():
    config = composed(*MIX, "eval.questions=0", "sweep.objective=eval/reward")
    validate(config)
    assert list(objective_problems("train", config)) == []  # sums has 3 questions
    config.data.sources["sums"].eval.questions = None
    assert len(list(objective_problems("train", config))) == 1


ROWS = ["data=file", "data.path=tests/fixtures/none.jsonl"]


def test_typed_rows_take_the_place_of_an_experiments_sources():
    data = composed("experiment=shop_mix", *ROWS).data
    assert not data.sources and data.train["path"] == "tests/fixtures/none.jsonl"
    own = composed("experiment=shop_mix", "data=own", "data.train._target_=mine.rows").data
    assert not own.sources and own.train == {"_target_": "mine.rows"}
    assert list(composed("experiment=shop_mix", "data=mix").data.sources) == ["lookups", "chains"]
    with pytest.raises(ConfigError, match=r"^data\.train="):  # sources that are typed too
        composed("experiment=shop_mix", *ROWS, "data.sources.chains.weight=3")


@pytest.mark.parametrize("verb", ["sft", "play", "tools"])
def test_a_verb_that_knows_one_source_wants_one(verb):
    assert "data.only=shop" in problems(verb=verb)
    only = composed(*MIX, "data.only=shop")
    assert list(only.tools) == ["sql", "final_answer"] and not only.data.sources
    assert only.eval.group_by == "hops" and list(only.reward) == ["exact_match"]
    validate(only)


@pytest.mark.parametrize("group", ["file", "hub", "rollouts", "spider"])
def test_a_group_of_rows_reads_the_path_of_its_source(group):
    mine = [f"+data@data.sources.mine={group}", "data.sources.mine.path=here"]
    rows = composed(*MIX, *mine).data.sources["mine"]
    assert rows.train["path"] == "here" and rows.path == "here"


def scored(source: str, rewards: list[float], **columns: str) -> list[Rollout]:
    """A group of a question of a source."""
    task = Task(task_id="q", messages=(), columns=columns, source=source)
    rollouts = [Rollout(task=task, rollout_id=str(i)) for i in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.reward = reward
    return rollouts


def evaluation(**rewards: list[float]) -> Evaluation:
    """An evaluation of a source's questions, each with one sample."""
    groups = [scored(source, [reward]) for source, own in rewards.items() for reward in own]
    return summarise("sampled", Collected(groups=groups), None, dict.fromkeys(rewards))


def test_an_evaluation_has_the_scores_of_each_source():
    groups = [
        scored("a", [1.0, 0.0], kind="x"),
        scored("a", [1.0, 1.0], kind="y"),
        scored("b", [0.0, 0.0]),
    ]
    result = summarise("sampled", Collected(groups=groups), None, {"a": "kind", "b": None})
    metrics = result.metrics()
    assert metrics["reward"] == 0.5 and metrics["source/a/reward"] == 0.75
    assert metrics["source/a/group/x"] == 0.5 and metrics["source/a/pass@2"] == 1
    assert metrics["source/b/reward"] == 0 and "source/b/group/x" not in metrics
    (read,) = from_json(json.loads(json.dumps(to_json([result]))))
    assert str(read.by_source) == str(result.by_source)  # NaN differs from itself


def test_the_best_evaluation_of_each_source_is_kept():
    best = Best()
    assert best.consider(1, [evaluation(a=[0.5], b=[0.5])])
    assert best.sources_at(1) == ["", "a", "b"] and best.are_all_at(1)
    assert best.consider(2, [evaluation(a=[0.75], b=[0.0])])  # only of source a
    assert best.sources_at(1) == ["", "b"] and best.sources_at(2) == ["a"] and best.step == 1
    assert not best.consider(3, [evaluation(a=[0.75], b=[0.25])])
    assert best.consider(4, [evaluation(a=[0.5], b=[1.0])])
    assert best.sources_at(4) == ["", "b"] and best.sources_at(2) == ["a"]
    resumed = Best(json.loads(json.dumps(best.record)))
    assert resumed.sources_at(2) == ["a"] and resumed.step == 4


def run(folder: Path, *overrides: str) -> None:
    assert main([*overrides, f"hydra.run.dir={folder}"]) == 0


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in metrics]


def few(tmp_path: Path) -> list[str]:
    """A third source of three rows, which is dropped after them."""
    file = tmp_path / "rows.jsonl"
    prompts = [{"prompt": f"what is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, prompts)))
    return [
        *(f"data.sources.few.train.path={file}", "data.sources.few.at_end=drop"),
        "data.sources.few.train._target_=agenttrain.data.files.FileRows",
        "+tools@data.sources.few.tools.final_answer=final_answer",
        "+reward@data.sources.few.reward.exact_match=exact_match",
    ]


@pytest.mark.slow
def test_a_resumed_mixture_equals_an_uninterrupted_one(tmp_path):
    words = [*MIX, *few(tmp_path), *TINY, "tasks_per_step=4", "eval.every=2"]
    words += ["checkpoint.keep=1", "checkpoint.keep_best=true", "algorithm.oversample=1.5"]
    run(tmp_path / "whole", *words, "steps=4")
    run(tmp_path / "resumed", *words, "steps=2")
    assert main([f"resume={tmp_path / 'resumed'}", "steps=4"]) == 0
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    resumed, whole = (
        load_file(tmp_path / name / "checkpoints/latest/model.safetensors")
        for name in ("resumed", "whole")
    )
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)

    state = json.loads((tmp_path / "whole/checkpoints/latest/state.json").read_text())
    cursors = {name: s["cursor"] for name, s in state["curriculum"]["sources"].items()}
    # 24 tasks in four steps of 6: few is dropped after three, the others share the rest.
    assert cursors["few"] == 3 and sum(cursors.values()) == state["cursor"] == 24
    assert abs(cursors["shop"] - 14) <= 1
    of_sources = [n for n in rows(tmp_path / "whole")[-1] if n.startswith("source/")]
    assert "source/few/epoch" in of_sources and "source/shop/curriculum/band" in of_sources
    assert all(metric_row(name) is not None for name in of_sources)
    links = sorted(link.name for link in (tmp_path / "whole/checkpoints").glob("best*"))
    assert links == ["best", "best-shop", "best-sums"]  # few has no test rows
    after = json.loads((tmp_path / "whole/summary.json").read_text())["eval"]["after"]
    (sampled,) = (scores for scores in after["scores"] if scores["label"] == "sampled")
    questions = {name: own["questions"] for name, own in sampled["sources"].items()}
    assert questions == {"shop": 4, "sums": 3, "few": 0}
    written = (tmp_path / "whole/rollouts/step-000001.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"] for line in written} == {"shop", "sums", "few"}


@pytest.mark.slow
def test_a_mixture_runs_in_a_rollout_process(tmp_path):
    run(tmp_path / "own", *MIX, *TINY, "rollout.process=own", "tasks_per_step=3")
    run(tmp_path / "here", *MIX, *TINY, "tasks_per_step=3")
    names = [f"source/{name}/tasks" for name in ("shop", "sums")]
    for folder in ("own", "here"):
        assert [rows(tmp_path / folder)[-1][name] for name in names] == [2, 1]


OWN_SOURCES = """
def sums(n: int, first: int):
    for number in range(first, first + n):
        yield {"prompt": f"What is {number} + 1?", "answer": str(number + 1)}


def row(index: int):
    return {"episode": index}


def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: A number.
        b: Another.
    \"\"\"
    return a + b


class Guess:
    def reset(self, row) -> str:
        self.number, self.right = row["episode"] % 9 + 1, False
        return "Guess my number."

    def guess(self, number: int) -> str:
        \"\"\"Guess the number.

        Args:
            number: The guess.
        \"\"\"
        self.right = number == self.number
        return "right" if self.right else "no"

    def reward(self, rollout) -> float:
        return float(self.right)


def length(rollout) -> float:
    return float(rollout.sampled_length)
"""


@pytest.mark.slow
def test_sources_of_own_rows_are_trained_resumed_and_evaluated(tmp_path, monkeypatch):
    """A file, a function that yields rows, and one of rows without end for an environment."""
    (tmp_path / "own_sources.py").write_text(OWN_SOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows_of = "data.sources.sums"
    words = [
        *("data=mix", "experiment=none", "model=shop", "tools=[]", "reward=[]", *few(tmp_path)),
        *(f"+data@{rows_of}=own", f"{rows_of}.train._target_=own_sources.sums"),
        *(f"{rows_of}.train.n=5", f"{rows_of}.train.first=0", f"{rows_of}.curriculum.enabled=true"),
        *(f"{rows_of}.test._target_=own_sources.sums", f"{rows_of}.test.n=2"),
        *(f"{rows_of}.test.first=9", f"{rows_of}.tools.add._target_=own_sources.add"),
        f"{rows_of}.reward.length._target_=own_sources.length",
        *("+data@data.sources.game=own", "data.sources.game.train._target_=own_sources.row"),
        "data.sources.game.environment.guess._target_=own_sources.Guess",
        *(*TINY, "tasks_per_step=3", "eval.questions=2", "tracker.rollouts=all"),
    ]
    run(tmp_path / "whole", *words, "steps=3")
    run(tmp_path / "resumed", *words, "steps=2")
    assert main([f"resume={tmp_path / 'resumed'}", "steps=3"]) == 0
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    written = (tmp_path / "whole/rollouts/step-000001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in written]
    rewards = {record["source"]: list(record["rewards"]) for record in records}
    assert rewards == {"few": ["exact_match"], "sums": ["length"], "game": ["environment"]}
    assert main(["eval", f"run={tmp_path / 'whole'}", f"hydra.run.dir={tmp_path / 'eval'}"]) == 0
    scores = json.loads((tmp_path / "eval/summary.json").read_text())["eval"]["after"]["scores"]
    questions = {name: part["questions"] for name, part in scores[0]["sources"].items()}
    assert questions == {"few": 0, "sums": 2, "game": 0}
