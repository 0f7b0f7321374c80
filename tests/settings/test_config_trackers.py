"""Trackers on the command line: any of them, with settings of their own, and errors."""

from __future__ import annotations

import pytest

from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Composed, Source, compose_run, hydra_session
from agenttrain.settings.compose import open_keys as opened
from agenttrain.tracking import config as tracking
from agenttrain.types import ConfigError


def compose(*overrides: str) -> Composed:
    with hydra_session(Source()):
        return compose_run(opened(overrides), Source())


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        validate(compose(*overrides).config)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("seed=0", ["trackio"]),
        ("tracker=trackio", ["trackio"]),
        ("tracker=wandb", ["wandb"]),
        ("tracker=[mlflow,tensorboard]", ["tensorboard", "mlflow"]),
        (
            "tracker=[trackio,wandb,tensorboard,mlflow]",
            ["trackio", "wandb", "tensorboard", "mlflow"],
        ),
        ("tracker=none", []),
        ("tracker=[]", []),
    ],
)
def test_any_of_the_trackers(override: str, names: list[str]) -> None:
    composed = compose(override)
    assert [section.name for section in composed.config.tracker.sections()] == names
    assert composed.plain["tracker"]["rollouts"] == "all"
    validate(composed.config)


def test_a_tracker_has_its_own_settings_and_those_of_all() -> None:
    settings = ("tracker.wandb.project=agents", "tracker.wandb.system=false")
    (section,) = compose("tracker=wandb", *settings, "tracker.rollouts=3").config.tracker.sections()
    assert section.settings == {"project": "agents", "entity": None, "mode": "auto"}
    assert (section.key, section.system, section.finish_s) == ("tracker.wandb", False, 15.0)


def test_a_tracker_of_ones_own() -> None:
    target = "tracker.own.mine._target_=own_trackers.Recorded"
    settings = ("tracker.own.mine.file=mine.jsonl", "tracker.own.mine.finish_s=5")
    config = compose("tracker=none", target, *settings).config
    validate(config)
    (section,) = config.tracker.sections()
    assert (section.name, section.target) == ("own-mine", "own_trackers.Recorded")
    assert (section.settings, section.finish_s) == ({"file": "mine.jsonl"}, 5)
    assert "tracker.own.mine.fil=a: own_trackers.Recorded has no such argument (did you mean" in (
        problems(target, "tracker.own.mine.fil=a")
    )
    assert "has no start, log" in problems("tracker.own.mine._target_=json.JSONDecoder")
    assert "tracker.own.mine.finish_s=0: must be more than 0" in problems(
        target, "tracker.own.mine.finish_s=0"
    )


def test_settings_without_effect_and_secrets_are_refused() -> None:
    assert "tracker.wandb.project=x: has no effect without the tracker; add tracker=[wandb]" in (
        problems("tracker.wandb.project=x")
    )
    assert "put it into the environment variable TRACKIO_WRITE_TOKEN" in problems(
        "'tracker.trackio.server_url=\"http://host?write_token=abc\"'".strip("'")
    )
    store = "'tracker.mlflow.uri=\"https://me:secret@host\"'".strip("'")
    refused = problems("tracker=mlflow", store)
    assert refused.startswith("tracker.mlflow.uri=https://***@host: holds a password")
    assert "MLFLOW_TRACKING_PASSWORD" in refused
    server = "'tracker.trackio.server_url=\"https://me:secret@host\"'".strip("'")
    assert problems(server).startswith("tracker.trackio.server_url=https://***@host: holds a pass")
    both = ("tracker.trackio.space=a/b", "tracker.trackio.server_url='http://host'")
    assert "leave one of them out" in problems(*both)


def test_a_missing_library_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = tracking.find_spec
    monkeypatch.setattr(tracking, "find_spec", lambda n: None if n == "mlflow" else find(n))
    assert problems("tracker=[trackio,mlflow]") == (
        "tracker=mlflow: needs mlflow, which is not installed; pip install 'agenttrain[mlflow]', "
        "or leave mlflow out"
    )
