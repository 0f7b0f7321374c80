"""Objectives as an open door: bundled ones by name, one of the user's by `_target_`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml

from agenttrain.algorithms.config import AlgorithmConfig, load_objective
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.objectives import config as objectives
from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import all_objectives, build_objective, objective
from agenttrain.cli import main
from agenttrain.settings.checks import check_for_verb
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder

OWN = """
import torch  # a user's module may: nothing imports it before it is asked for
from dataclasses import dataclass

from pydantic import Field
from pydantic.dataclasses import dataclass as settings

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import objective

print("own_objectives is imported")

@settings
class BandSettings:
    width: float = Field(0.1, gt=0)
    soft: bool = False

@objective(metrics={"band/inside": "Share of tokens inside the band."})
def band(inputs: ObjectiveInputs, settings: BandSettings) -> ObjectiveOutput:
    inside_S = inputs.log_ratio_S.detach().abs() <= settings.width
    return ObjectiveOutput(
        loss_S=-inside_S.float() * inputs.advantages_S * inputs.logprobs_S,
        metrics={"band/inside": inside_S},
    )

@dataclass
class Nothing:
    pass

def plain(inputs, settings: Nothing):
    return ObjectiveOutput(loss_S=-inputs.advantages_S * inputs.logprobs_S)

def mean(inputs, settings: Nothing):
    return ObjectiveOutput(loss_S=-(inputs.advantages_S * inputs.logprobs_S).mean())

@objective(single_update=True)
def once(inputs: ObjectiveInputs, settings: Nothing) -> ObjectiveOutput:
    return plain(inputs, settings)

def unannotated(inputs, settings): ...
"""
TINY = ("debug=tiny", "tracker=none", "algorithm.group_size=4")


def own(name: str, *settings: str) -> list[str]:
    return [
        "algorithm/objective=own",
        f"algorithm.objective._target_=own_objectives.{name}",
        *(f"algorithm.objective.{setting}" for setting in settings),
    ]


class Agenttrain:
    """The command in the user's folder, as in a process that has not imported the module yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        self.monkeypatch.delitem(sys.modules, "own_objectives", raising=False)
        with self.monkeypatch.context() as patch:
            patch.setattr(objectives, "REGISTRY", dict(all_objectives()))
            code = main([*arguments])
        self.out, self.err = self.capsys.readouterr()
        return code


@pytest.fixture
def agenttrain(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Agenttrain:
    return Agenttrain(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of the user's."""
    (tmp_path / "own_objectives.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    return tmp_path


@pytest.mark.slow
def test_a_run_trains_with_an_objective_from_outside_the_package(
    agenttrain: Agenttrain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTTRAIN_KEY", str(folder / "key"))
    assert agenttrain(*TINY, *own("band", "width=0.5"), "hydra.run.dir=run") == 0
    written = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert written["algorithm"]["objective"] == {
        "_target_": "own_objectives.band",
        "width": 0.5,
        "soft": False,
    }
    steps = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().split("\n")[:2]
    ]
    assert all("band/inside" in step for step in steps)
    # The run is the user's own: it goes on without being asked, and with the same words.
    assert agenttrain("resume=run", "steps=3") == 0
    words = [*TINY, *own("band", "width=0.5"), "steps=3", "resume=auto", "hydra.run.dir=run"]
    assert agenttrain(*words) == 0
    assert "finished after 3 steps" in agenttrain.out
    # What reads its rollouts asks nothing of the objective, nor does anything of the module.
    for words in (["view", "run", "step=1", "to=page.html"], ["--help"], ["replay", "run"]):
        assert agenttrain(*words) == 0
        assert "own_objectives is imported" not in agenttrain.out
    # To somebody else it is a stranger's code.
    monkeypatch.setenv("AGENTTRAIN_KEY", str(folder / "another_key"))
    assert agenttrain("resume=run", "steps=4") == 2
    assert "algorithm.objective._target_=own_objectives.band" in agenttrain.err
    assert "own_objectives is imported" not in agenttrain.out
    assert agenttrain("eval", "run=run", "hydra.run.dir=evaluation") == 0
    assert "own_objectives is imported" not in agenttrain.out


REFUSED = {
    "a wrong value": (own("band", "width=-1"), "algorithm.objective.width=-1: must be more than 0"),
    "a wrong key": (
        own("band", "widht=1"),
        "algorithm.objective.widht=1: no key of own_objectives.band (did you mean 'width'?); its "
        "keys are: width, soft",
    ),
    "another objective's key": (
        own("band", "tau_pos=1"),
        "no key of own_objectives.band; sapo has it: algorithm/objective=sapo",
    ),
    "a name that is not there": (
        own("bend"),
        "own_objectives has no 'bend' (did you mean 'band'?)",
    ),
    "no settings": (
        own("unannotated"),
        "the second parameter of an objective is annotated with its settings",
    ),
    "several updates": (
        [*own("once"), "algorithm.num_epochs=2"],
        "algorithm.num_epochs=2: algorithm.objective=own_objectives.once has no ratio",
    ),
    "an error elsewhere comes first": ([*own("band", "width=-1"), "steps=0"], "steps=0: must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_in_it_is_refused(case: str, agenttrain: Agenttrain) -> None:
    words, expected = REFUSED[case]
    assert agenttrain("check", *TINY, *words) == 2
    assert expected in agenttrain.err
    imported = "own_objectives is imported" in agenttrain.out
    assert imported is (case != "an error elsewhere comes first")


def test_a_name_that_is_taken_is_refused(agenttrain: Agenttrain, folder: Path) -> None:
    file = folder / "own_objectives.py"
    file.write_text(file.read_text().replace("def band(", "def clip("))
    assert agenttrain("check", *TINY, *own("clip")) == 2
    assert (
        "algorithm.objective._target_=own_objectives.clip: importing it failed: ValueError: two "
        "objectives have the name clip: agenttrain.algorithms.objectives.clip.clip and "
        "own_objectives.clip; rename the second"
    ) in agenttrain.err


def test_a_loss_that_is_no_loss_of_tokens_starts_no_run(
    agenttrain: Agenttrain, folder: Path
) -> None:
    assert agenttrain(*TINY, *own("mean"), "hydra.run.dir=run") == 2
    assert (
        "algorithm.objective._target_=own_objectives.mean: called with three made-up tokens it "
        "returned a loss_S of shape []; return the loss of each sampled token"
    ) in agenttrain.err
    assert not (folder / "run").exists()


def test_a_loss_of_another_shape_in_an_update_is_an_error() -> None:
    two = torch.tensor([-1.0, -2.0])
    inputs = LossInputs(
        logprobs_S=two,
        behaviour_S=two,
        sequence_S=torch.tensor([0, 0]),
        advantages_S=torch.tensor([1.0, 1.0]),
        weights_B=torch.tensor([0.5]),
    )
    with pytest.raises(ValueError, match=r"mean_of_two returned a loss_S of shape \[\];"):
        policy_loss(inputs, AlgorithmConfig(objective=build_objective(mean_of_two)))


@dataclass
class BandSettings:
    width: float = 0.1
    soft: bool = False


def band_loss(inputs: ObjectiveInputs, settings: BandSettings) -> ObjectiveOutput:
    inside_S = (inputs.log_ratio_S.detach().abs() <= settings.width).float()
    return ObjectiveOutput(loss_S=-inside_S * inputs.advantages_S * inputs.logprobs_S)


def mean_of_two(inputs: ObjectiveInputs, settings: BandSettings) -> ObjectiveOutput:
    loss_S = -inputs.advantages_S * inputs.logprobs_S
    return ObjectiveOutput(loss_S=loss_S.mean() if len(loss_S) == 2 else loss_S)


def test_a_function_is_built_with_its_settings() -> None:
    made = build_objective(band_loss, width=1)
    assert str(made) == f"{__name__}.band_loss(width=1.0, soft=false)"
    output = made(
        ObjectiveInputs(
            logprobs_S=torch.tensor([-1.0, -2.0]),
            behaviour_S=torch.tensor([-1.5, -4.0]),
            advantages_S=torch.tensor([2.0, 2.0]),
            sequence_S=torch.tensor([0, 0]),
            sequences=1,
        )
    )
    assert output.loss_S.tolist() == [2.0, 0.0]  # log ratios 0.5 and 2
    with pytest.raises(ValueError, match=r"objective\.widht=1: no key of .*did you mean 'width'"):
        build_objective(band_loss, widht=1)


@cache
def composed() -> RunConfig:
    with hydra_session(Source()):
        return compose_run([], Source()).config


def with_objective(target: str) -> RunConfig:
    """The default run with another objective."""
    return replace(composed(), algorithm=AlgorithmConfig(objective={"_target_": target}))


@pytest.fixture
def problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The error on the objective `objective` of a module with this source."""
    module = f"own_{next(NUMBERS)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(objectives, "REGISTRY", dict(all_objectives()))

    def of(source: str) -> str:
        (tmp_path / f"{module}.py").write_text(HEAD + source)
        config = with_objective(f"{module}.objective_")
        with pytest.raises(ConfigError) as caught:
            check_for_verb("train", config)
        text = str(caught.value).replace(str(tmp_path / f"{module}.py"), "own.py")
        assert text.startswith(f"algorithm.objective._target_={module}.objective_: ")
        return text.partition(": ")[2]

    return of


NUMBERS = count()
HEAD = """
from __future__ import annotations
from dataclasses import dataclass
from agenttrain import ObjectiveInputs as In, ObjectiveOutput as Out, objective
@dataclass
class My:
    width: float = 1.0
"""
FORM = "def objective_(inputs: ObjectiveInputs, settings: MySettings)"
UNFIT = {
    "a class": (
        "class objective_:\n    def __init__(self, inputs, settings: My): ...",
        f"objective_: is a class; name a function: {FORM}",
    ),
    "async": (
        "async def objective_(inputs, settings: My): ...",
        f"objective_: is an async function; write it without async: {FORM}",
    ),
    "swapped": (
        "def objective_(settings: My, inputs: In): ...",
        f"objective_: its parameters are swapped; the inputs come first: {FORM}",
    ),
    "a third parameter": (
        "def objective_(inputs, settings: My, scale): ...",
        "objective_: is called as objective_(inputs, settings): missing a required argument: "
        "'scale'; make anything else a field of My",
    ),
    "a field that is never set": (
        "@dataclass\nclass Named:\n    name: str = 'a'\n"
        "def objective_(inputs, settings: Named): ...",
        "objective_: Named.name could never be set, because algorithm.objective.name chooses the "
        "objective; rename the field",
    ),
    "a field of an unknown type": (
        "@dataclass\nclass Odd:\n    x: Nowhere = 1\ndef objective_(inputs, settings: Odd): ...",
        "Odd cannot be checked: ",
    ),
    "a list of metrics": (
        "@objective(metrics=['a'])\ndef objective_(inputs, settings: My): ...",
        "importing it failed: ValueError: objective_: metrics=[a]: expected name -> meaning, e.g. "
        "metrics={'objective_/share': 'Share of tokens …'} (own.py:8)",
    ),
    "no parentheses": (
        "@objective\ndef objective_(inputs, settings: My): ...",
        "importing it failed: ValueError: objective_: @objective is called; write @objective() "
        "(own.py:8)",
    ),
    "a metric of the run": (
        "@objective(metrics={'loss': 'x'})\ndef objective_(inputs, settings: My): ...",
        "loss is a metric of every run; call it my/loss",
    ),
}
CALLED = {
    "an exception": (
        "inputs.ratio('tokn')",
        "raised ValueError: ratio=tokn: expected one of: token, sequence_mean, sequence_sum (did "
        "you mean 'token'?) (own.py:9)",
    ),
    "no output": ("inputs.logprobs_S", "returned a Tensor; return ObjectiveOutput(loss_S=…)"),
    "no tensor": ("Out(loss_S=0.5)", "returned a loss_S of type float; return the loss of each"),
    "no gradient": (
        "Out(loss_S=-inputs.logprobs_S.detach())",
        "returned a loss_S without a gradient; compute it from inputs.logprobs_S",
    ),
    "not finite": (
        # log(p of the policy / p of the behaviour) is 0 at the first token
        "Out(loss_S=inputs.logprobs_S / inputs.log_ratio_S)",
        "returned loss_S=[-inf,",
    ),
    "an undeclared metric": (
        "Out(loss_S=-inputs.logprobs_S, metrics={'a/b': inputs.advantages_S})",
        "returned the metrics [a/b], and its decorator declares []",
    ),
    "a metric with a gradient": (
        "Out(loss_S=-inputs.logprobs_S, metrics={'a/b': inputs.logprobs_S})",
        "returned metrics['a/b'] with a gradient; add .detach()",
    ),
    "a metric that is a number": (
        "Out(loss_S=-inputs.logprobs_S, metrics={'a/b': 0.5})",
        "returned metrics['a/b'] as float; return a tensor",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_function_that_is_no_objective(case: str, problem: Callable[[str], str]) -> None:
    source, expected = UNFIT[case]
    assert problem(source).startswith(expected)


@pytest.mark.parametrize("case", CALLED)
def test_an_objective_is_called_before_anything_starts(
    case: str, problem: Callable[[str], str]
) -> None:
    result, expected = CALLED[case]
    text = problem(f"def objective_(inputs, settings: My):\n    return {result}")
    assert f"called with three made-up tokens it {expected}" in text


@pytest.mark.parametrize("ratio", ["token", 0.5, "sequence_mean"])
def test_a_setting_of_that_name_counts_if_it_is_a_level(ratio: object) -> None:
    config = AlgorithmConfig(
        objective={"_target_": f"{__name__}.levelled", "ratio": ratio},
        kl={"beta": 0.1, "bias_correction": True},
    )
    if ratio == "sequence_mean":
        with pytest.raises(ConfigError, match=r"algorithm\.objective\.ratio=sequence_mean is not;"):
            load_objective(config)
    else:
        load_objective(config)


@dataclass
class Levelled:
    ratio: str | float = "token"


def levelled(inputs: ObjectiveInputs, settings: Levelled) -> ObjectiveOutput:
    return ObjectiveOutput(loss_S=-inputs.ratio(str(settings.ratio)) * inputs.advantages_S)


def test_a_fit_objective_is_complete_after_its_check() -> None:
    config = with_objective(f"{__name__}.band_loss")
    check_for_verb("train", config)
    assert str(config.algorithm.objective) == f"{__name__}.band_loss(width=0.1, soft=false)"


def test_one_file_of_a_folder_of_the_users_chooses_it(folder: Path) -> None:
    group = folder / "my_conf" / "algorithm" / "objective"
    group.mkdir(parents=True)
    (group / "band.yaml").write_text("_target_: own_objectives.band\nwidth: 0.5\n")
    source = Source(extra=str(folder / "my_conf"))
    assert "band" in source.groups()["algorithm/objective"]
    with hydra_session(source):
        words = open_keys(["algorithm=rloo", "algorithm/objective=band"])
        settings = compose_run(words, source).config.algorithm
    assert settings.objective.section == {"_target_": "own_objectives.band", "width": 0.5}


def test_every_bundled_objective_is_an_option_and_the_other_way_round() -> None:
    files = sorted((conf_folder() / "algorithm" / "objective").glob("*.yaml"))
    names = {yaml.safe_load(file.read_text()).get("name") for file in files} - {None}
    assert names == {file.stem for file in files} & names == set(all_objectives())


PRESETS = sorted(file.stem for file in (conf_folder() / "algorithm").glob("*.yaml"))
OPTIONS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in sorted((conf_folder() / "algorithm" / "objective").glob("*.yaml"))
    if file.stem != "own"
}


@pytest.mark.parametrize(("place", "preset"), list(enumerate(PRESETS)))
def test_an_objective_over_a_preset_has_no_key_of_the_presets_own(place: int, preset: str) -> None:
    """A preset selects its objective and does not write its keys, which would stay."""
    options = [*OPTIONS.items()] * 2
    with hydra_session(Source()):
        # Two of them, which differ: each option has its turn.
        for option, section in options[place % len(OPTIONS) :][:2]:
            words = [f"algorithm={preset}", f"algorithm/objective={option}"]
            if preset == "gigpo" and build_objective(**section).registered.whole_sequence:
                words += ["algorithm/credit=rollout"]
            if section["name"] == "reinforce":
                words.append("algorithm.behaviour=engine")
            composed = compose_run(words, Source())
            expected = build_objective(**section)
            assert composed.config.algorithm.objective == expected
            assert composed.plain["algorithm"]["objective"] == expected.section
            assert composed.config.algorithm.name == preset


def test_two_objectives_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two objectives have the name clip: .*\.clip\.clip and "):

        @objective()
        def clip(inputs: ObjectiveInputs, settings: BandSettings) -> ObjectiveOutput: ...


def test_inputs_sum_over_sequences() -> None:
    inputs = ObjectiveInputs(
        logprobs_S=torch.tensor([-1.0, -2.0, -5.0]),
        behaviour_S=torch.tensor([-1.5, -1.0, -5.0]),
        advantages_S=torch.tensor([0.5, 0.5, -1.0]),
        sequence_S=torch.tensor([0, 0, 2]),
        sequences=3,
    )
    assert inputs.log_ratio_S.tolist() == [0.5, -1.0, 0.0]
    assert inputs.sum(inputs.log_ratio_S).tolist() == [-0.5, 0.0, 0.0]
    assert inputs.mean(inputs.log_ratio_S).tolist() == [-0.25, 0.0, 0.0]
    assert inputs.advantages_B.tolist() == [0.5, 0.0, -1.0]


def test_the_ratio_of_a_level_by_its_name() -> None:
    inputs = ObjectiveInputs(
        logprobs_S=torch.tensor([-1.0, -2.0], dtype=torch.float64),
        behaviour_S=torch.tensor([-1.1, -2.3], dtype=torch.float64),
        advantages_S=torch.ones(2),
        sequence_S=torch.tensor([0, 0]),
        sequences=1,
    )
    # Log ratios .1 and .3: their mean is .2, their sum .4.
    expected = {"token": [0.1, 0.3], "sequence_mean": [0.2, 0.2], "sequence_sum": [0.4, 0.4]}
    for level, logs in expected.items():
        assert inputs.ratio(level).tolist() == pytest.approx([math.exp(log) for log in logs])
    with pytest.raises(ValueError, match=r"ratio=mean: expected one of: token, sequence_mean, seq"):
        inputs.ratio("mean")


def test_an_old_key_in_a_file_of_the_users_is_answered(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("name: mine\nbeta: 0.3\n")
    source = Source(extra=str(tmp_path))
    with pytest.raises(ConfigError) as caught, hydra_session(source):
        compose_run(["algorithm=mine"], source)
    assert str(caught.value) == (
        "algorithm.beta (in algorithm/mine.yaml): is algorithm.kl.beta now"
    )
