"""An engine from a module outside the package: the one that the docs show."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from code_blocks import file_on

from agenttrain.cli import main
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.types import ConfigError
from agenttrain.utils.signing import KEY_FILE

TRACE = '\nfrom pathlib import Path\n\nPath(__file__).with_name("imported").touch()\n'
OUTSIDE = "engine._target_=my_engine.SPEC"
RUN = ("debug=tiny", "steps=1", "eval.questions=0", "tracker=none", "tracker.rollouts=all", OUTSIDE)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with `my_engine.py`, which leaves a trace when it is imported."""
    (tmp_path / "my_engine.py").write_text(
        file_on("contribute/add-an-engine.md", "my_engine.py") + TRACE
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch) -> None:
    """Undo that `my_engine` was imported, as a new process would."""
    Path("imported").unlink(missing_ok=True)
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_samples_with_it_and_its_folder_is_read_without_it(
    folder, monkeypatch, capsys
) -> None:
    assert main([*RUN, "engine.most_tokens=5", "hydra.run.dir=run"]) == 0
    lines = Path("run/rollouts/step-000001.jsonl").read_text().splitlines()
    trajectories = [t for line in lines for t in json.loads(line)["trajectories"]]
    sampled = [s for t in trajectories for s in t["spans"] if s["origin"] == "sampled"]
    assert max(span["end"] - span["start"] for span in sampled) == 5
    engine = yaml.safe_load(Path("run/config.yaml").read_text())["engine"]
    assert engine == {
        "_target_": "my_engine.SPEC",
        "max_context": None,
        "max_rows": 128,
        "most_tokens": 5,
    }

    forget(monkeypatch)
    assert main(["view", "run", "to=page.html"]) == 0
    assert main(["replay", "run"]) == 0
    assert not Path("imported").exists()

    # A run of the user's own may go on with it; somebody else's names it first.
    assert main(["check", "resume=run", "steps=2"]) == 0
    assert Path("imported").exists()
    forget(monkeypatch)
    monkeypatch.setenv(KEY_FILE, str(folder / "another_key"))
    capsys.readouterr()
    for verb in (["resume=run"], ["eval", "run=run"], ["plan", "resume=run"]):
        assert main([*verb, "steps=2"] if verb[0] != "eval" else verb) == 2
        assert "engine._target_=my_engine.SPEC\n" in capsys.readouterr().err
    assert not Path("imported").exists()
    assert main(["check", "resume=run", "steps=2", "engine=transformers"]) == 0
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("engine.most_token=3", "engine.most_token=3: unknown key (did you mean 'engine.most_toke"),
        ("engine.most_tokens=0", "engine.most_tokens=0: must be at least 1"),
        (
            "engine.memory_share=0.4",
            "engine._target_=my_engine.SPEC has no such key; it belongs to",
        ),
        ("engine._target_=my_engine.Field", "engine._target_=my_engine.Field: is no EngineSpec"),
        (
            "algorithm.router_replay=rollout",
            "engine=my_engine.SPEC does not return the experts by which it samples; set engine=",
        ),
        ("weight_sync.tolerance=0.1", "engine=my_engine.SPEC samples from the policy itself"),
    ],
)
def test_its_own_class_and_abilities_refuse_settings(folder, capsys, setting, expected) -> None:
    assert main(["check", OUTSIDE, setting]) == 2
    assert expected in capsys.readouterr().err


def test_an_evaluation_needs_no_engine_that_records_experts(folder, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    with hydra_session(Source()):
        words = open_keys([OUTSIDE, "algorithm.router_replay=rollout"])
        composed = compose_run(words, Source())
    with pytest.raises(ConfigError, match=r"^algorithm\.router_replay=rollout: "):
        admit_engine(replace(composed, config=copy.deepcopy(composed.config)), "train")
    admit_engine(composed, "eval")


def test_play_takes_it(folder) -> None:
    assert main(["check", "play", OUTSIDE]) == 0


def test_another_engine_beside_it_is_refused(folder, capsys) -> None:
    assert main(["check", "engine=vllm", OUTSIDE]) == 2
    assert capsys.readouterr().err == (
        "agenttrain: engine._target_=my_engine.SPEC: engine=vllm is chosen beside it; leave "
        "engine=vllm out, or where a file chooses it add engine=transformers\n"
    )
    assert not Path("imported").exists()


def test_plan_shows_what_it_says_that_it_takes(folder, capsys) -> None:
    assert main(["plan", OUTSIDE, "engine.max_rows=4", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    (item,) = [part for part in parts if part["name"] == "keys and values"]
    assert item["why"] == "4 rollouts, no growth"


def test_a_spec_whose_settings_are_none(folder, capsys) -> None:
    source = Path("my_engine.py").read_text()
    Path("my_engine.py").write_text(f"{source}\nSPEC = EngineSpec(settings=dict, build=print)\n")
    assert main(["check", OUTSIDE]) == 2
    expected = f"{OUTSIDE}: its settings=dict is no class of settings; derive a pydantic dataclass"
    assert expected in capsys.readouterr().err


def test_a_memory_estimate_that_raises_is_named(folder, capsys) -> None:
    source = Path("my_engine.py").read_text()
    broken = "SPEC = EngineSpec(settings=SPEC.settings, build=print, memory=lambda *_: 1 / 0)"
    Path("my_engine.py").write_text(f"{source}\n{broken}\n")
    assert main(["plan", OUTSIDE]) == 2
    expected = f"{OUTSIDE}: its memory() raised ZeroDivisionError: division by zero"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--cfg", "job", OUTSIDE],
        ["check", OUTSIDE, "steps=0"],
        ["check", OUTSIDE, "engine.max_rows=0"],
        ["check", OUTSIDE, "tools.sql._target_=nowhere.tool"],
        ["sft", OUTSIDE, "steps=0"],
        ["data", OUTSIDE],
    ],
    ids=" ".join,
)
def test_it_is_imported_where_a_valid_run_samples_only(folder, words) -> None:
    main(words)
    assert not Path("imported").exists()


@pytest.mark.timeout(600)
def test_an_engine_that_cannot_take_the_weights_it_asks_for_is_refused(folder, capsys) -> None:
    module = folder / "my_engine.py"
    declared = "deterministic=True)"
    assert declared in module.read_text()
    module.write_text(module.read_text().replace(declared, "own_weights=True)"))
    # Its engine has the weights of the policy that it is no longer given.
    module.write_text(module.read_text().replace("(inputs.policy, limits)", "(_model(), limits)"))
    with module.open("a") as file:
        file.write(MODEL)
    assert main([*RUN, "hydra.run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert "engine=my_engine.SPEC: its SPEC has own_weights=True" in error
    assert "ShortEngine lacks a method of agenttrain.engines.base.Separate; add it" in error


MODEL = """

def _model():
    from transformers import AutoModelForCausalLM

    from agenttrain.utils.model_path import model_folder

    return AutoModelForCausalLM.from_pretrained(model_folder("bundled:shop"))
"""
