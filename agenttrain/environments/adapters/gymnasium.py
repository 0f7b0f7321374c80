"""`Gymnasium`: an environment of the package gymnasium, played by calls of `step` or by texts.

    environment=gymnasium environment.gymnasium.id=FrozenLake-v1

The model reads observations as text, and writes actions as JSON values. `parameters_of` describes a
space of actions, and `action_from` turns a value into an action.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from agenttrain.environments.adapters.observations import observation_text
from agenttrain.types import Message, Rollout, ToolFailure, ToolUnavailable, TurnReward
from agenttrain.utils.data_fields import Data, DataWhere, names_no_module
from agenttrain.utils.text_templates import TextTemplate

MAX_ACTION_NUMBERS = 64
"""Maximum count of numbers that a model has to write for one action."""
MAX_OBSERVATION_NUMBERS = 1024
"""Maximum count of numbers in an observation that is shown as text."""
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
ACTION_BY, REWARDS = ("tool", "text"), ("episode", "turns")
PROMPT = """\
You are in the environment {{ id }}. {{ how }}

{{ observation }}"""
"""Default of `prompt`."""


class Gymnasium:
    """One environment of Gymnasium. Its instance is reset and used again.

    `id` is a registered name, with the module that registers it if that is none of Gymnasium's
    (`my_package:Maze-v0`), and `kwargs` are arguments for it. `actions` names the actions of a
    Discrete space. `action_by` is `tool` (a call of `step`) or `text` (the answer is the action).
    With `render` the observation is the environment's drawing as text; by default it is, if the
    environment can draw. `rewards` is `episode` (the sum of the steps' rewards is the environment's
    reward) or `turns` (each reward goes to its turn, for the reward function `turn_rewards`).
    `prompt` is a text with columns of the row and `id`, `how` (what an action is) and
    `observation`.

    A row's column `seed` is the episode's seed. Without one the rollouts of a task share a seed.
    """

    pooled = True  # instances are used again after a reset

    def __init__(
        self,
        *,
        id: Annotated[str, DataWhere(names_no_module)],
        kwargs: Mapping[str, Any] | None = None,
        actions: Data[Sequence[str] | None] = None,
        action_by: Data[str] = "tool",
        render: Data[bool | None] = None,
        rewards: Data[str] = "episode",
        prompt: Data[str] = PROMPT,
    ) -> None:
        # The environment, its actions with their names, and the other settings.
        self._env = _make(id, kwargs, render)
        self._space, self._names = self._env.action_space, actions
        self._id, self._by_text, self._by_turn = id, action_by == "text", rewards == "turns"
        self._prompt = TextTemplate(prompt, "prompt")
        # The episode: its last observation, and the sum of its rewards.
        self._observation = ""
        self._return = 0.0
        self.done = self.truncated = False

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Raise ValueError for arguments that cannot work. Makes the environment once."""
        for name, values in (("action_by", ACTION_BY), ("rewards", REWARDS)):
            if arguments.get(name, values[0]) not in values:
                raise ValueError(f"{name}={arguments[name]}: must be {' or '.join(values)}")
        TextTemplate(arguments.get("prompt", PROMPT), "prompt")
        cls.tools(**arguments)

    @classmethod
    def tools(cls, **arguments: Any) -> list[dict[str, Any]]:
        """Return the schema of `step`, or no tool if actions are texts. Raises ValueError."""
        if not isinstance(arguments.get("id"), str):
            raise ValueError(
                "id: has no value; name an environment of Gymnasium, e.g. FrozenLake-v1"
            )
        environment, env_id = cls(**arguments), arguments["id"]
        try:
            # Also if actions are texts and need no schema: it raises ValueError for a space that
            # cannot be expressed, and for names that do not fit it.
            action = parameters_of(environment._space, environment._names)
            size = _size(environment._env.observation_space)
            if environment._env.render_mode is None and size > MAX_OBSERVATION_NUMBERS:
                raise ValueError(
                    f"its observation {environment._env.observation_space} has {size} numbers, "
                    "which no model reads; wrap it into texts and register that"
                )
        except ValueError as error:
            # An error about `actions` begins with it. The others are about the environment.
            is_about_actions = str(error).startswith("actions=")
            raise ValueError(str(error) if is_about_actions else f"id={env_id}: {error}") from None
        finally:
            environment.close()
        if environment._by_text:
            return []
        description = f"Take one step in {env_id}; the reply is what you observe then."
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        function = {"name": "step", "description": description, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, row: Mapping[str, Any], group_seed: int) -> str:
        """Begin an episode, and return the prompt."""
        seed = row.get("seed", group_seed)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"the row's seed={seed!r}: must be a whole number of 0 or more")
        # Many environments take no seed of 2**31 or more.
        observation, _ = self._env.reset(seed=seed % 2**31)
        self._return, self.done, self.truncated = 0.0, False, False
        self._show(observation)
        how = "Answer with" if self._by_text else "Each call of `step` takes"
        options = f": {', '.join(self._names)}" if self._names else f" of {self._space}"
        fields = {
            "id": self._id,
            "how": f"{how} one action{options}.",
            "observation": self._observation,
        }
        return self._prompt.fill({**row, **fields})

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | TurnReward:
        """Take the step that a call of `step` asks for."""
        return self._step(arguments["action"])

    def user(self, message: Message) -> str | TurnReward | None:
        """Take the action that an answer names, or reply that it names none."""
        if not self._by_text:
            return None
        try:
            return self._step(action_in(message["content"], self._space, self._names))
        except ToolFailure as failure:
            return str(failure)

    def state(self) -> str:
        """Return the observation, which is all that the model sees."""
        return self._observation

    def reward(self, rollout: Rollout) -> float | None:
        """Return the sum of the episode's rewards, or None if the turns have them."""
        return None if self._by_turn else self._return

    def close(self) -> None:
        """Free the environment's memory, windows and the like."""
        self._env.close()

    def _step(self, value: Any) -> str | TurnReward:
        """Take an action, a JSON value; return the observation, for rewards=turns with a reward."""
        action = action_from(self._space, value, self._names)
        if not self._space.contains(action):
            raise ToolFailure(f"{value!r:.80} is not an action of {self._space}")
        try:
            observation, reward, terminated, truncated, _ = self._env.step(action)
            self._show(observation)
        except Exception as error:
            raise ToolUnavailable(f"{self._id}: {type(error).__name__}: {error}") from error
        self._return += float(reward)
        self.done = bool(terminated or truncated)
        self.truncated = bool(truncated and not terminated)
        text = self._observation
        if self.done:
            end = "was cut off by its limit of steps" if self.truncated else "is over"
            text = f"{text}\nThe episode {end}."
        return TurnReward(float(reward), text) if self._by_turn else text

    def _show(self, observation: Any) -> None:
        """Set the text that the model sees."""
        if self._env.render_mode is not None:
            self._observation = brackets_for_colours(self._env.render())
        else:
            self._observation = observation_text(observation)


def _make(env_id: str, kwargs: Mapping[str, Any] | None, render: bool | None) -> Any:
    """Make an environment. It draws text if `render` is true, or None and it can draw.

    Raises ValueError that begins with the argument that does not fit.
    """
    try:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator
    except ImportError as error:
        raise ValueError(
            f"id={env_id}: needs the package gymnasium ({error}); pip install "
            "'agenttrain[gymnasium]'"
        ) from error
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs={kwargs}: must be arguments with names, e.g. {{map_name: 8x8}}")
    try:
        module, _, name = env_id.rpartition(":")
        if module:
            __import__(module)
        creator = gymnasium.spec(name).entry_point
        creator = load_env_creator(creator) if isinstance(creator, str) else creator
        # "ansi" is Gymnasium's render mode for text.
        can_draw = "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ())
        if render and not can_draw:
            raise ValueError("render=true: it cannot draw itself as text; leave render out")
        mode = {"render_mode": "ansi"} if can_draw and render is not False else {}
        return gymnasium.make(name, disable_env_checker=True, **mode, **(kwargs or {}))
    except ValueError:  # ours, or one of the environment that says what is wrong
        raise
    except TypeError as error:
        raise ValueError(f"kwargs={dict(kwargs or {})}: {env_id}: {error}") from error
    except Exception as error:  # raised by the environment's code, or by packages that it needs
        raise ValueError(f"id={env_id}: {type(error).__name__}: {error}") from error


def parameters_of(space: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of a space's actions. `names` are those of a Discrete space.

    Example: Discrete(4) -> ``{"type": "integer", "minimum": 0, "maximum": 3}``. Raises ValueError
    for a space that cannot be expressed.
    """
    kind = type(space).__name__
    if names is not None:
        if kind != "Discrete" or len(names) != space.n or len(set(names)) != len(names):
            raise ValueError(
                f"actions=[{', '.join(map(str, names))}]: must name each action of {space} once, "
                "in their order"
            )
        return {"type": "string", "enum": [str(name) for name in names]}
    if kind == "Discrete":
        minimum = int(space.start)
        return {"type": "integer", "minimum": minimum, "maximum": minimum + int(space.n) - 1}
    if kind == "Text":
        return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    if _size(space) > MAX_ACTION_NUMBERS:
        raise ValueError(
            f"its action {space} has {_size(space)} numbers, which no model writes (at most "
            f"{MAX_ACTION_NUMBERS}); wrap it into a smaller space and register that"
        )
    if kind == "Box":
        is_integer = np.issubdtype(space.dtype, np.integer)
        number: dict[str, Any] = {"type": "integer" if is_integer else "number"}
        # One schema for all numbers of the array: it has bounds only if all numbers share them.
        low, high = np.unique(space.low), np.unique(space.high)
        if len(low) == len(high) == 1 and np.isfinite([low[0], high[0]]).all():
            number |= {"minimum": low[0].item(), "maximum": high[0].item()}
        return _nest(number, space.shape)
    if kind == "MultiBinary":
        return _nest({"type": "integer", "minimum": 0, "maximum": 1}, space.shape)
    if kind == "MultiDiscrete":
        return _nest({"type": "integer"}, space.shape)
    if kind == "Tuple":
        parts = [parameters_of(part) for part in space.spaces]
        length = {"minItems": len(parts), "maxItems": len(parts)}
        return {"type": "array", "prefixItems": parts, **length}
    if kind == "Dict":
        properties = {str(name): parameters_of(part) for name, part in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    raise ValueError(
        f"its action {space} cannot be written as JSON; wrap it into Discrete, Box, Text, Multi…, "
        "Tuple or Dict and register that"
    )


def _nest(item: dict[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """Return the schema of a nested array of this shape, whose elements have the schema `item`."""
    for length in reversed(shape):
        item = {"type": "array", "items": item, "minItems": length, "maxItems": length}
    return item


def _size(space: Any) -> int:
    """Return the count of numbers in a value of a space; a part of unknown size counts as one."""
    parts = getattr(space, "spaces", ())
    if parts:
        return sum(map(_size, parts.values() if isinstance(parts, Mapping) else parts))
    return int(np.prod(space.shape)) if getattr(space, "shape", None) else 1


def action_from(space: Any, value: Any, names: Sequence[str] | None = None) -> Any:
    """Return the action that a JSON value stands for; it may be out of the space's bounds.

    Example: ``action_from(Discrete(4), "down", ["left", "down", "right", "up"])`` is 1. Raises
    ToolFailure for a value of another shape.
    """
    kind = type(space).__name__
    try:
        if names is not None:
            return int(space.start) + list(names).index(value)
        if kind == "Text":
            return value
        if kind == "Discrete":
            return int(value)
        if kind == "Tuple":
            parts = zip(space.spaces, value, strict=True)
            return tuple(action_from(part, item) for part, item in parts)
        if kind == "Dict":
            return {name: action_from(part, value[name]) for name, part in space.spaces.items()}
        return np.array(value, dtype=space.dtype).reshape(space.shape)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        choices = ", ".join(names) if names else space
        raise ToolFailure(f"{value!r:.80} is not an action: it must be one of {choices}") from error


def action_in(text: str, space: Any, names: Sequence[str] | None = None) -> Any:
    """Return the JSON value of the action that an answer names; of several, the last.

    Example: ``"Down is a hole. I go right."`` -> ``"right"`` with the names left, down, right, up.
    The whole answer is the action of a Text space. Raises ToolFailure if there is none.
    """
    kind = type(space).__name__
    if kind == "Text":
        return text.strip()
    options = list(names or ())
    if kind == "Discrete":
        # The longest first: "up left" is not read as "up".
        words = "|".join(map(re.escape, sorted(options, key=len, reverse=True))) or r"-?\d+"
        matches = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
        if matches and not options:
            return int(matches[-1])
        if matches:
            return next(name for name in options if name.lower() == matches[-1].lower())
    else:
        try:
            return json.loads(text)
        except ValueError:
            pass
    choices = ", ".join(options) if options else space
    raise ToolFailure(f"There is no action in your answer. Answer with one of: {choices}.")


def brackets_for_colours(drawing: Any) -> str:
    """Return a terminal drawing as text: coloured characters stand in brackets.

    With several colours a legend follows. Example: ``"\\x1b[41mS\\x1b[0mFF"`` -> ``"[S]FF"``.
    """
    legend: dict[str, tuple[str, ...]] = {}
    """Entry of the legend, ``"[S] red"`` -> its colours, ``("red",)``."""

    def mark(match: re.Match[str]) -> str:
        """Return coloured characters in brackets, and add them to the legend."""
        # match[1] is "41" or "1;31". 30 to 37 are colours of the text, 40 to 47 of its background:
        # the last digit is the colour. Other codes are styles, such as 1 for bold, or bring back
        # the terminal's own colour.
        colour_codes = [code for code in match[1].split(";") if re.fullmatch("[34][0-7]", code)]
        colours = [COLOURS[int(code) % 10] for code in colour_codes]
        text = f"[{match[2]}]"
        legend[" ".join([text, *colours])] = tuple(colours)
        return text

    text = COLOURED.sub(mark, str(drawing)).strip("\n")
    has_several_colours = len(set(legend.values())) > 1
    return f"{text}\n{', '.join(legend)}" if has_several_colours else text
