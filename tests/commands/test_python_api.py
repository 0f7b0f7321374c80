"""`agenttrain.train`: settings as Python values, and runs started by Python code."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import yaml
from code_blocks import ROOT

from agenttrain import ConfigError, RunFailed, train
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.python_values import as_overrides
from agenttrain.utils.event_loop import without_running_loop

SMALL = ("debug=tiny", "tracker=none", "hydra.run.dir=run")


class Level(IntEnum):
    high = 3


def triple(number: int) -> int:
    """Multiply a number by three.

    Args:
        number: Any number.
    """
    return 3 * number


class Counter:
    """An environment with one tool."""

    def up(self) -> str:
        """Count up."""
        return "1"


def used_a_tool(rollout, answer) -> float:
    return float(any(m["role"] == "tool" for m in rollout.trajectories[-1].messages))


def fails(rollout, answer) -> float:
    raise RuntimeError("no score today")


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({"steps": 20, "optimizer": {"lr": 1e-4, "warmup_steps": 0}},
         ["steps=20", "optimizer.lr=0.0001", "optimizer.warmup_steps=0"]),
        ({"steps": np.int64(20), "optimizer": {"lr": np.float64(1e-4)}, "seed": Level.high},
         ["steps=20", "optimizer.lr=0.0001", "seed=3"]),
        ({"rollout": {"stop_ids": [np.int32(7)]}, "algorithm": {"kl": {"beta": np.float32(0.5)}}},
         ["rollout.stop_ids=[7]", "algorithm.kl.beta=0.5"]),
        ({"model": "calculator", "engine": {"max_context": None}},
         ["model=calculator", "engine.max_context=null"]),
        ({"tools": ["sql", triple]},
         ["tools=[sql]", f"tools.triple._target_={__name__}.triple"]),
        ({"tools": [triple]}, ["tools=[]", f"tools.triple._target_={__name__}.triple"]),
        ({"tools": {"three": {"_target_": triple, "timeout_s": 2.0}}},
         [f"tools.three._target_={__name__}.triple", "tools.three.timeout_s=2.0"]),
        ({"environment": [Counter]}, [f"environment.Counter._target_={__name__}.Counter"]),
        ({"data": {"train": rows}}, ["data=own", f"data.train._target_={__name__}.rows"]),
        ({"data": {"test": {"_target_": rows, "n": 3}}},
         ["data=own", f"data.test._target_={__name__}.rows", "data.test.n=3"]),
        ({"data": {"sources": {"a": {"tools": [triple], "reward": []}}}},
         ["data.sources.a.tools=null", f"data.sources.a.tools.triple._target_={__name__}.triple",
          "data.sources.a.reward=null", "data.sources.a.reward={}"]),
        ({"data": {"sources": {"a": {"train": {"_target_": rows, "n": 3}, "weight": 2}}}},
         ["data=mix", "data.sources.a.train=null", "data.sources.a.test=null",
          f"data.sources.a.train._target_={__name__}.rows", "data.sources.a.train.n=3",
          "data.sources.a.weight=2"]),
        ({"stop_tools": ["a", "b"], "eval": {"tools": ()}}, ["stop_tools=[a,b]", "eval.tools=[]"]),
        ({"rollout": {"stop": ["a, b", "it's", "1", "true", ""]}},
         [r"rollout.stop=['a, b','it\'s','1','true','']"]),
        ({"resume": Path("my run=1"), "trust": True}, ["resume=my run=1", "trust=true"]),
        ({"servers": {"args": {}}, "data": {"path": Path("a/b.jsonl")}},
         ["servers.args={}", "data.path=a/b.jsonl"]),
    ],
)  # fmt: skip
def test_settings_are_the_overrides_that_one_would_type(settings, overrides):
    assert list(as_overrides(settings)) == overrides


def test_a_list_replaces_the_section_of_a_source():
    words = ["data=mix", "+data@data.sources.a=shop", "+tools@data.sources.a.tools.sql=sql"]
    for tools, names in (([triple], ["triple"]), ([], []), ({"t": triple}, ["sql", "t"])):
        typed = as_overrides({"data": {"sources": {"a": {"tools": tools}}}})
        with hydra_session(Source()):
            config = compose_run(open_keys([*words, *typed]), Source()).config
        assert list(config.data.sources["a"].tools) == names


@pytest.mark.parametrize("words", [["experiment=shop_mix"], ["experiment=none", "data=mix"]])
def test_rows_of_a_function_replace_those_of_a_source(words):
    """The experiment's have arguments that a function of the user's lacks."""
    typed = as_overrides({"data": {"sources": {"chains": {"train": {"_target_": rows, "n": 3}}}}})
    with hydra_session(Source()):
        data = compose_run(open_keys([*words, *typed]), Source()).config.data
    assert data.sources["chains"].train == {"_target_": f"{__name__}.rows", "n": 3}
    assert data.sources["chains"].test == {} == data.train
    others = [source for name, source in data.sources.items() if name != "chains"]
    assert all(source.test for source in others)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tools": [lambda x: x]}, "tools"),
        ({"tools": {"three": Counter()}}, "tools.three"),
        ({"reward": {"mine": {"_target_": functools.partial(triple, 1)}}}, "reward.mine._target_"),
        ({"tools": [triple, triple]}, "tools"),
        ({"data": {"sources": {"a": {"tools": ["sql", triple]}}}}, "data.sources.a.tools"),
        ({"data": {"sources": {"a": {"reward": ["exact_match"]}}}}, "data.sources.a.reward"),
        ({"seed": object()}, "seed"),
    ],
)
def test_what_config_yaml_cannot_name_is_refused_with_its_key(settings, key):
    with pytest.raises(ConfigError) as refused:
        list(as_overrides(settings))
    assert str(refused.value).startswith((f"{key}=", f"{key}:"))


def test_a_name_that_means_something_else_by_now_is_refused():
    def other() -> None: ...

    other.__qualname__ = "triple"
    with pytest.raises(ConfigError, match=r"tools=.*\.triple: that name means something else"):
        list(as_overrides({"tools": [other]}))


@pytest.mark.parametrize(
    ("words", "settings", "key"),
    [
        ((), {"sterps": 3}, "sterps=3"),
        (("--cfg", "job"), {}, "--cfg"),
        (("-m",), {"seed": 1}, "-m"),
        (("nonsense",), {}, "nonsense"),
    ],
)
def test_mistakes_are_config_errors(place, words, settings, key):
    with pytest.raises(ConfigError) as refused:
        train(*words, **settings)
    assert str(refused.value).startswith(key)
    assert not list(place.iterdir())


def test_several_processes_are_started_from_the_command_line(place):
    with pytest.raises(ConfigError, match=r"^distributed=ddp:"):
        train(*SMALL, distributed={"processes": 2, "name": "ddp"})


def test_a_loop_that_runs_waits_for_the_block_and_goes_on():
    order = []

    async def inner() -> None:
        order.append("inner")

    async def outer() -> None:
        asyncio.get_running_loop().call_soon(order.append, "waited")
        with without_running_loop():
            asyncio.run(inner())
        task = asyncio.current_task()
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        order.append("outer")

    asyncio.run(outer())
    assert order == ["inner", "waited", "outer"]


@pytest.mark.slow
def test_a_run_in_a_running_event_loop_is_evaluated_loaded_and_resumed(place):
    async def cell() -> None:
        """As a notebook's cells: synchronous calls inside its loop, one after the other."""
        run = train(
            *SMALL,
            experiment="none",
            model="calculator",
            tools=["calculator", triple],
            reward=[used_a_tool],
            data={"train": rows, "test": rows},
        )
        assert (run.status, run.folder) == ("finished", place / "run")
        saved = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert saved["tools"]["triple"] == {"_target_": f"{__name__}.triple"}
        assert saved["data"]["train"] == {"_target_": f"{__name__}.rows"}
        assert [row["step"] for row in run.metrics] == [1, 2]

        scored = run.evaluate("hydra.run.dir=scored", tracker="none", eval={"questions": 2})
        assert scored.summary["eval"]["after"]["questions"] == 2
        assert scored.metrics == []

        model, tokenizer = run.load_policy()
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "1 + 1?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        length = ids["input_ids"].shape[1]
        assert model.generate(**ids, max_new_tokens=3).shape[1] in range(length + 1, length + 4)
        with pytest.raises(ConfigError, match="has no such checkpoint"):
            run.load_policy(step=7)

        resumed = train(resume=run.folder, steps=3)
        assert [row["step"] for row in resumed.metrics] == [1, 2, 3]

    asyncio.run(cell())


@pytest.mark.slow
def test_a_run_that_fails_is_an_error_with_its_folder(place):
    with pytest.raises(RunFailed, match=r"run: RewardError: .*no score today"):
        train(*SMALL, reward=[fails])


@pytest.mark.slow
def test_ctrl_c_returns_the_run_with_a_checkpoint(place):
    def interrupt() -> None:
        """Interrupt the run once it has done two steps."""
        metrics = place / "run" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    run = train(*SMALL, steps=10_000, eval={"questions": 0}, checkpoint={"every": None})
    assert run.status == "preempted"
    steps = len(run.metrics)
    assert run.summary["latest_checkpoint"] == f"checkpoints/step-{steps:06d}"
    assert signal.getsignal(signal.SIGINT) is before
    assert train(resume=run.folder, steps=steps + 1).status == "finished"


PROGRAM = """
from agenttrain import ConfigError, train

def triple(number: int) -> int:
    \"\"\"Multiply a number by three.\"\"\"
    return 3 * number

def refusal(*words, **settings):
    try:
        train("tracker=none", *words, **settings)
    except ConfigError as error:
        return str(error).partition(":")[0]

print(refusal("steps=many"))
print(refusal(tools={"triple": {"_target_": triple, "isolation": "process"}}))
print(refusal("rollout.process=own", tools=[triple]))
print(refusal(tracker={"own": {"mine": {"_target_": triple}}}))
import sys
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_code_of_the_program_itself_is_refused_where_another_process_needs_it(place):
    Path("program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, env=environment
    )
    triple = "tools.triple._target_=__main__.triple"
    own = "tracker.own.mine._target_=__main__.triple"
    assert done.stdout.splitlines() == ["steps=many", triple, triple, own, "False"], done.stderr
