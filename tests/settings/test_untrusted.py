"""Every value of a stranger's settings is named, unless its field says that it is data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from inspect import isclass, signature
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from agenttrain.settings import untrusted
from agenttrain.settings.components import SETTINGS_BESIDE
from agenttrain.settings.compose import Source, compose_raw, hydra_session
from agenttrain.settings.run_config import RunConfig, choices
from agenttrain.settings.untrusted import bundled_targets, resolvers, untrusted_values
from agenttrain.utils.data_fields import Data, is_data
from agenttrain.utils.locate import locate
from agenttrain.utils.sections import sections_below

UNDECLARED = {
    "AgentConfig": {"command", "_target_", "env", "host", "install", "read"},
    "AlgorithmConfig": {"objective"},
    "DataConfig": {"train", "test", "image_urls", "sources"},
    "DistributedConfig": {"rendezvous"},
    "MLflowSettings": {"uri"},
    "RoleConfig": {"args"},
    "RunConfig": {"tools", "environment", "user", "reward", "engine", "resume"},
    "RuntimeConfig": {
        *(
            "_target_",
            "options",
            "image",
            "pull",
            "network",
            "hosts",
            "env",
            "capabilities",
            "trust",
        ),
        "keep_processes",
    },
    "ServersConfig": {"args", "admin_urls", "url"},
    "SlurmConfig": {"setup", "directives", "srun"},
    "SweepConfig": {"runs"},
    "TrackerConfig": {"own"},
    "TrackioSettings": {"space", "server_url"},
    "WandBSettings": {"entity"},
    "WeightSyncConfig": {"folder"},
}
"""All fields whose every value is code, a command, an address or a place that is written, and the
sections that are walked by their choice."""
CONDITIONAL = {
    ("RolloutConfig", "compaction"): ("summary", "evil.Compaction"),
    ("ToolSettings", "retry_on"): (["builtins.OSError"], ["builtins.OSError", "evil.Error"]),
    ("EnvironmentSettings", "retry_on"): ([], ["evil.builtins.OSError"]),
}
"""Fields that are data for the first value only."""


def settings_classes(cls: type) -> Iterator[type]:
    yield cls
    for hint in get_type_hints(cls).values():
        if is_dataclass(hint) and isclass(hint):
            yield from settings_classes(hint)


ALL = {
    cls.__name__: cls
    for root in (
        RunConfig,
        *SETTINGS_BESIDE.values(),
        *untrusted.NAMED_COMPONENTS.values(),
        *(cls for cls in untrusted.COMPONENTS.values() if cls is not None),
        *(cls for named in choices().values() for cls in named.values()),
    )
    for cls in settings_classes(root)
}


@pytest.mark.parametrize("name", ALL)
def test_every_field_is_declared_as_data_or_listed_here(name: str) -> None:
    hints = get_type_hints(ALL[name], include_extras=True)
    undeclared = {
        field.name
        for field in fields(ALL[name])
        if not (field.name in sections_below(ALL[name]) or is_data(hints[field.name], "any"))
    }
    conditional = {key for cls, key in CONDITIONAL if cls == name}
    assert undeclared == UNDECLARED.get(name, set()) | conditional


@pytest.mark.parametrize(("place", "values"), CONDITIONAL.items())
def test_a_field_may_be_data_for_some_values_only(place: Any, values: Any) -> None:
    hint = get_type_hints(ALL[place[0]], include_extras=True)[place[1]]
    assert [is_data(hint, value) for value in values] == [True, False]


@pytest.mark.parametrize("target", bundled_targets())
def test_the_annotations_of_every_bundled_component_can_be_read(target: str) -> None:
    hints, _ = untrusted._parameters(target)
    function = locate(target, key="_target_")
    assert {"return", *signature(function).parameters} >= set(hints) - {"return"}


NOT_DATA = {
    "Sql": {"connect"},
    "Crop": {"look"},
    "McpServer": {"command", "url", "env", "headers"},
    "interpreter": {"sandbox", "packages"},
    "Gymnasium": {"id", "kwargs"},
    "OpenEnv": {"url"},
    "Verifiers": {"id", "python", "args"},
    "VerifiersRows": {"arguments"},
    "ReasoningGym": {"python", "config"},
    "SqlResult": {"connect"},
    "customer": {"task", "spoken", "seed"},  # a user function: not filled by the settings either
    "LlmUser": {"url", "api_key_env", "extra"},
    "Judge": {"url", "api_key_env", "extra"},
    "Ranking": {"url", "api_key_env", "extra"},
}


def test_the_arguments_of_bundled_components_that_are_not_data() -> None:
    filled = ("index", "rollout", "answer", "a", "b", "expression")  # not by the settings
    undeclared = {
        target.rpartition(".")[2]: {
            name
            for name in signature(locate(target, key="_target_")).parameters
            if name not in filled and not is_data(untrusted._parameters(target)[0].get(name), "a:b")
        }
        for target in bundled_targets()
    }
    assert {name: names for name, names in undeclared.items() if names} == NOT_DATA


def test_a_source_of_a_mixture_is_trusted_as_a_run_of_one_source_is() -> None:
    plain_rows = {"_target_": "agenttrain.data.bundled.shop.row", "split": "train", "seed": 3}
    sql = {
        "_target_": "agenttrain.tools.builtin.sql.Sql",
        "connect": "agenttrain.data.bundled.shop.connect",
        "timeout_s": 2.0,
    }
    mine = {"_target_": "evil.rows", "n": 3}
    sources = {
        "shop": {"weight": 2.0, "train": plain_rows, "tools": {"sql": sql}, "system": "Be brief."},
        "mine": {"train": mine, "reward": {"good": {"_target_": "evil.good", "weight": 0.5}}},
    }
    values = untrusted_values({"data": {"train": {}, "test": {}, "sources": sources}})
    assert [value.key for value in values] == [
        "data.sources.mine.train._target_",
        "data.sources.mine.train.n",
        "data.sources.mine.reward.good._target_",
    ]


def test_a_new_field_is_untrusted_until_its_class_says_otherwise() -> None:
    @dataclass
    class Settings:
        plugin: str = ""
        note: Data[str] = ""

    Settings.__annotations__ = {"plugin": str, "note": Data[str]}
    values = untrusted._values_of_class(
        Settings, {"plugin": "evil", "note": "a", "other": 1}, ("s",)
    )
    assert [value.key for value in values] == ["s.plugin", "s.other"]


def keys(**settings: Any) -> list[str]:
    return [value.key for value in untrusted_values(settings)]


JUDGE = "agenttrain.rewards.builtin.judge.Judge"
GYM = "agenttrain.environments.adapters.gymnasium.Gymnasium"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"servers": {"args": {"worker-cls": "evil.Worker"}}}, ["servers.args.worker-cls"]),
        (
            {"roles": {"judge": {"model": "m", "args": {"trust-remote-code": True}}}},
            ["roles.judge.args.trust-remote-code"],
        ),
        ({"servers": {"admin_urls": ["http://evil:1"]}}, ["servers.admin_urls"]),
        ({"environment": {"g": {"_target_": GYM, "id": "evil:Env-v0"}}}, ["environment.g.id"]),
        ({"environment": {"g": {"_target_": GYM, "id": "Taxi-v3"}}}, []),
        (
            {"reward": {"j": {"_target_": JUDGE, "url": "http://h/v1", "prompt": "?"}}},
            ["reward.j.url"],
        ),
        ({"reward": {"j": {"_target_": JUDGE, "url": "role:judge", "weight": 2}}}, []),
        ({"reward": {"environment": {"weight": 2}}}, []),
        (
            {"reward": {"mine": {"_target_": "my.f", "weight": 2, "path": "a"}}},
            ["reward.mine._target_", "reward.mine.path"],
        ),
        (
            {"engine": {"_target_": "my.SPEC", "max_rows": 3, "flag": 1}},
            ["engine._target_", "engine.flag"],
        ),
        ({"engine": {"name": "vllm", "max_rows": 3}}, []),
        (
            {"algorithm": {"objective": {"_target_": "my.f", "width": 1}}},
            ["algorithm.objective._target_", "algorithm.objective.width"],
        ),
        ({"algorithm": {"objective": {"name": "clip", "low": 0.1}}}, []),
        (
            {"data": {"train": {"_target_": "my.rows"}, "image_urls": True}},
            ["data.train._target_", "data.image_urls"],
        ),
        (
            {"tracker": {"own": {"mine": {"_target_": "my.T"}}, "wandb": {"entity": "evil"}}},
            ["tracker.own.mine._target_", "tracker.wandb.entity"],
        ),
        ({"agent": {"command": "touch ran"}}, ["agent.command"]),
        (
            {"runtime": {"name": "podman", "image": "evil", "trust": True, "network": "open"}},
            ["runtime.image", "runtime.trust", "runtime.network"],
        ),
        (
            {"slurm": {"setup": ["touch ran"], "srun": ["--task-prolog=evil"]}},
            ["slurm.setup", "slurm.srun"],
        ),
        (
            {"tools": {"x": "evil"}, "user": {"_target_": "my.User", "max_turns": 3}},
            ["tools.x", "user._target_"],
        ),
    ],
)
def test_values_that_are_not_data_are_named(settings: Any, expected: list[str]) -> None:
    assert keys(**settings) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("${oc.env:SECRET}", True),
        ("http://h/${oc.env:SECRET,''}", True),
        ("${a.${b}:c}", True),
        ("${ oc.decode:1 }", True),
        ("${data.path}", False),
        ("{{ answer }} $HOME", False),
    ],
)
def test_a_resolver_is_named_and_a_reference_to_another_setting_is_not(text, named) -> None:
    values = list(resolvers({"reward": {"judge": {"stop": ["a", text]}}}))
    assert [value.path for value in values] == ([("reward", "judge", "stop", "1")] if named else [])


@pytest.mark.parametrize(
    "experiment",
    [
        *("shop", "code", "retrieval", "recipes/alphabet_sort", "recipes/gsm8k_python"),
        *("recipes/search", "recipes/sql", "recipes/wordle", "recipes/service_desk"),
    ],
)
def test_the_bundled_experiments_ask_nothing(experiment: str) -> None:
    with hydra_session(Source()):
        settings = OmegaConf.to_container(compose_raw([f"experiment={experiment}"], Source()))
    assert untrusted_values(settings) == []  # type: ignore[arg-type]
