"""The adapter of Gymnasium, with the package and its toy texts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from adapter_kit import arun, environments, run, step, texts
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain import cli
from agenttrain.environments.adapters.gymnasium import (
    Gymnasium,
    action_from,
    action_in,
    brackets_for_colours,
    parameters_of,
)
from agenttrain.environments.adapters.observations import observation_text
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.tools.arguments import ArgumentSchema
from agenttrain.types import ConfigError, StopReason, ToolError, ToolFailure
from agenttrain.utils.files import conf_folder, parse_yaml

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
CROSSING = ("down", "down", "right", "right", "down", "right")
"""The way over FrozenLake's 4x4 map: SFFF, FHFH, FFFH, HFFG."""


class Echo(gymnasium.Env[str, str]):
    """Says the last text again, until it is "bye"; fails at "crash"."""

    action_space = spaces.Text(8, charset="abcdefghijklmnopqrstuvwxyz")
    observation_space = spaces.Text(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("the engine is on fire")
        return action, len(action) / 8, action == "bye", False, {}


def register(name: str, action: spaces.Space[Any], seen: spaces.Space[Any]) -> None:
    """Register an environment like Echo, with other spaces."""
    own = type(name, (Echo,), {"action_space": action, "observation_space": seen})
    gymnasium.register(name, entry_point=own, max_episode_steps=3)


TWO = spaces.Discrete(2)
register("TestEcho-v0", Echo.action_space, Echo.observation_space)
register("TestPixels-v0", TWO, spaces.Box(0, 255, shape=(32, 32, 3), dtype=np.uint8))
register("TestNumbers-v0", spaces.Box(0.0, 1.0, shape=(100,)), TWO)
register("TestSequence-v0", spaces.Sequence(TWO), TWO)


def test_frozen_lake_by_calls_of_step():
    done = run(*(step(f'"{way}"') for way in CROSSING), worlds=environments(Gymnasium, **LAKE))
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == 1.0
    (prompt,) = texts(done, "user")
    assert prompt.splitlines() == [
        "You are in the environment FrozenLake-v1. "
        "Each call of `step` takes one action: left, down, right, up.",
        "",
        "[S]FFF",
        "FHFH",
        "FFFH",
        "HFFG",
    ]
    replies = texts(done, "tool")
    assert replies[0].splitlines() == ["  (Down)", *GRID_AFTER_DOWN]
    assert replies[-1].endswith("HFF[G]\nThe episode is over.")


GRID_AFTER_DOWN = ["SFFF", "[F]HFH", "FFFH", "HFFG"]


def test_a_hole_ends_the_episode_without_reward():
    done = run(step('"down"'), step('"right"'), worlds=environments(Gymnasium, **LAKE))
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == 0.0


def test_an_episode_cut_off_by_its_limit_is_told_apart():
    lake = {**LAKE, "kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    done = run(step('"down"'), step('"up"'), worlds=environments(Gymnasium, **lake))
    assert done.stop_reason is StopReason.environment_truncated
    assert texts(done, "tool")[-1].endswith("The episode was cut off by its limit of steps.")
    # Reaching the goal with the last allowed step is an end, not a cut.
    lake["kwargs"] = {"is_slippery": False, "max_episode_steps": 6}
    done = run(*(step(f'"{way}"') for way in CROSSING), worlds=environments(Gymnasium, **lake))
    assert done.stop_reason is StopReason.environment_done


def test_each_turn_has_its_steps_reward():
    cliff = {"id": "CliffWalking-v1", "rewards": "turns"}
    # Up and down again: -1 each. Right of the start is the cliff.
    walk = (step("0"), step("2"), step("1"), "Enough.<|im_end|>")
    done = run(*walk, worlds=environments(Gymnasium, **cliff))
    assert done.trajectories[0].turn_rewards == {0: -1.0, 1: -1.0, 2: -100.0}
    assert done.environment_reward is None
    total = run(*walk, worlds=environments(Gymnasium, id="CliffWalking-v1"))
    assert total.trajectories[0].turn_rewards == {}
    assert total.environment_reward == -102.0


def test_the_rows_seed_decides_else_that_of_the_group():
    def hand(**keywords: Any) -> str:
        worlds = environments(Gymnasium, id="Blackjack-v1", prompt="{{ observation }}")
        return texts(run("I watch.<|im_end|>", worlds=worlds, **keywords), "user")[0]

    dealt = {hand(group_seed=seed) for seed in range(8)}
    assert len(dealt) > 4
    assert {hand(row={"seed": 7}, group_seed=seed) for seed in range(4)} == {hand(row={"seed": 7})}
    expected, _ = gymnasium.make("Blackjack-v1").reset(seed=7)
    assert json.loads(hand(row={"seed": 7})) == [int(number) for number in expected]


def test_a_seed_that_is_none_is_an_error_of_the_row():
    worlds = environments(Gymnasium, **LAKE)
    done = run("Hm.<|im_end|>", worlds=worlds, row={"seed": "seven"})
    assert done.stop_reason is StopReason.error
    assert "seed='seven': must be a whole number" in str(done.error)


def test_actions_by_text():
    worlds = environments(Gymnasium, **LAKE, action_by="text")
    assert worlds.tool_names == ()
    done = run(
        "Right is a hole later. I go down.<|im_end|>",
        "Where am I?<|im_end|>",
        "RIGHT<|im_end|>",
        worlds=worlds,
    )
    prompt, first, second, last = texts(done, "user")
    assert "Answer with one action: left, down, right, up." in prompt
    assert first.splitlines()[1:] == GRID_AFTER_DOWN
    assert second == "There is no action in your answer. Answer with one of: left, down, right, up."
    assert last.endswith("The episode is over.")
    assert done.stop_reason is StopReason.environment_done


def test_a_text_game():
    worlds = environments(Gymnasium, id="TestEcho-v0", action_by="text", rewards="turns")
    done = run("hi<|im_end|>", "Not a word!<|im_end|>", " bye <|im_end|>", worlds=worlds)
    assert texts(done, "user")[1:3] == [
        "hi",
        "'Not a word!' is not an action of Text(1, 8, charset=abcdefghijklmnopqrstuvwxyz)",
    ]
    assert done.trajectories[0].turn_rewards == {0: 0.25, 2: 0.375}
    assert done.stop_reason is StopReason.environment_done


def test_a_text_as_an_argument_and_an_action_out_of_the_space():
    worlds = environments(Gymnasium, id="TestEcho-v0")
    done = run(step('"abc"'), step('"ABC"'), step('"much too long"'), step('"bye"'), worlds=worlds)
    assert [result.error for result in done.tool_results] == [
        None,
        ToolError.exception,
        ToolError.invalid_arguments,
        None,
    ]
    assert done.environment_reward == 3 / 8 + 3 / 8


def test_an_environment_that_breaks_is_never_a_zero():
    for by, answer in (("tool", step('"crash"')), ("text", "crash<|im_end|>")):
        done = run(answer, worlds=environments(Gymnasium, id="TestEcho-v0", action_by=by))
        assert done.stop_reason is StopReason.error
        assert done.environment_reward is None
        assert "TestEcho-v0: RuntimeError: the engine is on fire" in str(done.error)


def test_instances_are_used_again_and_begin_anew():
    worlds = environments(Gymnasium, **LAKE)
    kind = worlds.kinds["world"]

    async def work() -> None:
        for number in range(3):
            done = await arun(
                step('"down"'), step('"right"'), worlds=worlds, rollout_id=str(number)
            )
            assert done.environment_reward == 0.0
            assert texts(done, "user")[0].splitlines()[-4:] == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
            assert (len(kind.idle), kind.live) == (1, 1)
        await asyncio.gather(
            *(
                arun(step('"down"'), step('"right"'), worlds=worlds, rollout_id=f"g{n}")
                for n in "abc"
            )
        )
        assert kind.live == 3
        await worlds.aclose()
        assert kind.live == 0

    asyncio.run(work())


SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.Text(5, min_length=2),
    spaces.Box(-1.0, 1.0, shape=(2, 3), dtype=np.float64),
    spaces.Box(0, 9, shape=(), dtype=np.int64),
    spaces.MultiBinary(3),
    spaces.MultiDiscrete([2, 5]),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, shape=(2,), dtype=np.float64))),
    spaces.Dict({"gear": spaces.Discrete(6), "wheel": spaces.Box(-1.0, 1.0, (1,), np.float64)}),
]


def written(value: Any) -> Any:
    """An action as a model would write it."""
    if isinstance(value, dict):
        return {name: written(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [written(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@given(st.sampled_from(SPACES), st.integers(0, 2**31 - 1))
@settings(max_examples=60)
def test_every_action_of_a_space_can_be_written(space: spaces.Space[Any], seed: int):
    space.seed(seed)
    action = space.sample()
    parameters = {"properties": {"action": parameters_of(space)}, "required": ["action"]}
    text = json.dumps({"action": written(action)})
    read = ArgumentSchema({"type": "object", **parameters}).read(json.loads(text))
    made = action_from(space, read["action"])
    assert space.contains(made)
    assert written(made) == written(action)


def test_schemas_of_spaces():
    assert parameters_of(spaces.Discrete(3, start=5)) == {
        "type": "integer",
        "minimum": 5,
        "maximum": 7,
    }
    assert parameters_of(spaces.Discrete(2), ["stick", "hit"]) == {
        "type": "string",
        "enum": ["stick", "hit"],
    }
    assert parameters_of(spaces.Box(-1.0, 1.0, shape=(2,), dtype=np.float32)) == {
        "type": "array",
        "items": {"type": "number", "minimum": -1.0, "maximum": 1.0},
        "minItems": 2,
        "maxItems": 2,
    }
    # Bounds that differ, or that are infinite, are the environment's to check.
    assert parameters_of(
        spaces.Box(np.array([0.0, 1.0]), np.array([1.0, 2.0]), dtype=np.float64)
    ) == {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 2,
    }


def test_actions_in_texts():
    names = ["left", "down", "right", "up"]
    four = spaces.Discrete(4)
    assert action_in("Down is a hole. I go right.", four, names) == "right"
    assert action_in("upright", spaces.Discrete(1), ["upright"]) == "upright"
    assert action_in("First 2, no: 3!", four) == 3
    assert action_in("[1, 0, 1]", spaces.MultiBinary(3)) == [1, 0, 1]
    for text, space, given_names in (
        ("upright", four, names),
        ("none", four, None),
        ("1, 0", spaces.MultiBinary(2), None),
    ):
        with pytest.raises(ToolFailure, match="There is no action in your answer"):
            action_in(text, space, given_names)


def test_observations_as_text():
    assert observation_text(np.int64(3)) == "3"
    assert observation_text("you see a door") == "you see a door"
    observation = {"position": np.array([0.123456, -2.0]), "door": np.int64(1), "say": "hm"}
    assert observation_text(observation) == "position: [0.1235, -2.0]\ndoor: 1\nsay: hm"
    assert observation_text((np.int64(1), True, None)) == "[1, true, null]"
    taxi = gymnasium.make("Taxi-v4", render_mode="ansi")
    taxi.reset(seed=1)
    assert brackets_for_colours(taxi.render()).splitlines() == [
        "+---------+",
        "|[R]: | : :G|",
        "| : | : : |",
        "| : :[ ]: : |",
        "| | : | : |",
        "|Y| : |[B]: |",
        "+---------+",
        "[R] magenta, [ ] yellow, [B] blue",
    ]
    # 39 and 49 bring back the terminal's own colours; an empty code ends all styles.
    assert brackets_for_colours("\x1b[39mS\x1b[0mF\x1b[;41mG\x1b[0m") == "[S]F[G]\n[S], [G] red"


def checked(*overrides: str) -> None:
    own = ["experiment=none", "data=seeds", "tools=[]", "reward=[]", *overrides]
    with hydra_session(Source()):
        config = compose_run(open_keys(own), Source()).config
    validate(config)


@pytest.mark.parametrize("preset", ["frozen_lake", "cliff_walking", "taxi", "blackjack"])
def test_presets_are_environments_of_the_package(preset: str):
    section = parse_yaml((conf_folder() / f"environment/{preset}.yaml").read_text())
    arguments = {name: value for name, value in section.items() if name != "_target_"}
    Gymnasium.check(**arguments)
    (schema,) = Gymnasium.tools(**arguments)
    action = schema["function"]["parameters"]["properties"]["action"]
    assert action == {"type": "string", "enum": arguments["actions"]}


def test_the_settings_of_a_run():
    checked("environment=frozen_lake", "algorithm=gigpo", "environment.gymnasium.rewards=turns")
    key = "environment.gymnasium"
    with pytest.raises(ConfigError, match=f"{key}.id: has no value; set it: {key}.id=…"):
        checked("environment=gymnasium")
    with pytest.raises(ConfigError, match=f"{key}.id=FrozenLak-v1: .*Did you mean: `FrozenLake`"):
        checked("environment=gymnasium", f"{key}.id=FrozenLak-v1")
    with pytest.raises(ConfigError, match=f"{key}.idd=1: .*did you mean 'id'"):
        checked("environment=taxi", f"{key}.idd=1")


TAXI = {"id": "Taxi-v4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "id: has no value"),
        ({"id": "FrozenLake-v9"}, "id=FrozenLake-v9: .*doesn't exist"),
        ({"id": "no_package:Maze-v0"}, "No module named 'no_package'"),
        ({"id": "TestPixels-v0"}, "has 3072 numbers, which no model reads"),
        ({"id": "TestNumbers-v0"}, "has 100 numbers, which no model writes"),
        ({"id": "TestSequence-v0"}, "cannot be written as JSON; wrap it into"),
        ({**TAXI, "actions": ["a"]}, r"^actions=\[a\]: must name each action of Discrete\(6\)"),
        ({**TAXI, "action_by": "voice"}, "^action_by=voice: must be tool or text"),
        ({**TAXI, "rewards": "all"}, "^rewards=all: must be episode or turns"),
        ({**TAXI, "kwargs": {"fuel": 1}}, "^kwargs=.*unexpected keyword argument 'fuel'"),
        ({**TAXI, "kwargs": 3}, "^kwargs=3: must be arguments with names"),
        ({"id": "Blackjack-v1", "render": True}, "^render=true: it cannot draw itself as text"),
        ({**TAXI, "prompt": "{{ if"}, "^prompt: is no template"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Gymnasium.check(**arguments)


def test_without_the_package_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"^id=Taxi-v4: .*pip install 'agenttrain\[gymnasium\]'"):
        Gymnasium.check(**TAXI)


@pytest.mark.slow
def test_a_run_learns_from_seeds_alone(tmp_path: Path):
    own = ["experiment=none", "data=seeds", "tools=[]", "reward=[]", "environment=frozen_lake"]
    short = ["debug=tiny", "steps=1", "eval.questions=0", "tracker=none"]
    assert cli.main([*own, *short, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    lines = (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(set(record["rewards"]) == {"environment"} for record in records)
    assert all(record["columns"].keys() == {"seed"} for record in records)
