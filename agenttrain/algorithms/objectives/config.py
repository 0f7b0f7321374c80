"""The registry of objectives, and the section `algorithm.objective`, which chooses one.

An objective is one function and one settings class, in one file of this folder or in a module of
the user's that the section names:

    {name: clip, low: 0.2, high: 0.28}
    {_target_: my_pkg.objectives.band, width: 3}

A module of the user's is imported when its objective is first used, never by composition.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from functools import cache, cached_property
from importlib import import_module
from inspect import isclass, iscoroutinefunction, isroutine, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from agenttrain.types import ConfigError
from agenttrain.utils.locate import locate
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import (
    InvalidSettings,
    choice,
    field_names,
    owners_of,
    shown,
    validated,
)

KEY = "algorithm.objective"
DEFAULT = "clip"
"""Name of the objective of a section that chooses none."""
CHOOSING = ("name", "_target_")
"""Keys of the section that choose the objective; the others are its settings."""
Function = TypeVar("Function", bound=Callable[..., Any])


class Ratio(StrEnum):
    """Level on which policy and behaviour probabilities are compared."""

    token = "token"
    sequence_mean = "sequence_mean"
    """Geometric mean over a trajectory's tokens (GSPO)."""
    sequence_sum = "sequence_sum"
    """The whole trajectory (RLOO)."""


def ratio_level(level: Ratio | str) -> Ratio:
    """Return the level of this name. Raises ValueError for another one."""
    try:
        return Ratio(level)
    except ValueError:
        hint = did_you_mean(str(level), Ratio)
        raise ValueError(f"ratio={level}: expected one of: {', '.join(Ratio)}{hint}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An objective: its function and settings class, and properties of the function.

    `agenttrain/algorithms/config.py` checks other settings of the algorithm against the properties.
    The ratio is that of a token's or a sequence's probabilities, policy / behaviour.
    """

    name: str
    function: Callable[..., Any]
    settings: type
    """Dataclass: the annotation of the function's second parameter."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Its metrics, each with its meaning for the reference. A step without a gradient has them
    too."""
    single_update: bool = False
    """Has no ratio: reads no `behaviour_S`, the logprobs before the update. Only the first update
    of a step is right, so num_epochs and minibatches must be 1."""
    stopped_ratio: bool = False
    """The ratio is a weight without a gradient, so that a token's loss trains this token only. So
    tokens can be left out (top_entropy), whatever the level of the ratio."""
    whole_sequence: bool = False
    """A sequence has one loss, and needs one advantage: no credit per turn and no teacher."""
    applies_correction: bool = False
    """Multiplies its ratio by `correction_S` or `correction_B`, the ratio trainer / engine of
    `algorithm.correction`, so that `policy_loss` does not multiply the loss by it again. The
    correction's level must not be geometric."""

    @property
    def path(self) -> str:
        """Return the function's dotted path, e.g. ``my_pkg.objectives.band``."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


REGISTRY: dict[str, Registered] = {}
"""Name -> objective, of imported modules; `all_objectives` imports this folder's first."""


def objective(
    function: None = None,
    /,
    *,
    metrics: Mapping[str, str] | None = None,
    single_update: bool = False,
    stopped_ratio: bool = False,
    whole_sequence: bool = False,
    applies_correction: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as the objective of its name; the arguments are those of `Registered`.

    Example:

        @objective(metrics={"band/share": "Share of tokens in the band."})
        def band(inputs: ObjectiveInputs, settings: BandSettings) -> ObjectiveOutput: ...

    Raises ValueError for a function that cannot be called as an objective, and where another
    function has the name.
    """
    if function is not None:  # `@objective` without parentheses passes the decorated function
        name = getattr(function, "__name__", function)
        raise ValueError(f"{name}: @objective is called; write @objective()")

    def register(function: Function) -> Function:
        """Add the function to the registry; return it as it is."""
        settings, name = _settings_class(function), function.__name__
        if metrics is not None and not isinstance(metrics, Mapping):
            raise ValueError(
                f"{name}: metrics={shown(metrics)}: expected name -> meaning, e.g. "
                f"metrics={{'{name}/share': 'Share of tokens …'}}"
            )
        entry = Registered(
            name=name,
            function=function,
            settings=settings,
            metrics=metrics or {},
            single_update=single_update,
            stopped_ratio=stopped_ratio,
            whole_sequence=whole_sequence,
            applies_correction=applies_correction,
        )
        if not function.__module__.startswith(f"{__package__}."):
            all_objectives()  # a bundled name is taken, whichever module is imported first
        registered = REGISTRY.get(entry.name)
        if registered is not None and registered.path != entry.path:
            raise ValueError(
                f"two objectives have the name {entry.name}: {registered.path} and {entry.path}; "
                "rename the second"
            )
        REGISTRY[entry.name] = entry
        return function

    return register


@cache
def all_objectives() -> Mapping[str, Registered]:
    """Return the objectives of this folder, and those of modules that were imported, by name.

    The mapping grows when further modules are imported.
    """
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return REGISTRY


def _settings_class(function: Any) -> type:
    """Return the settings class of an objective: the annotation of its second parameter.

    Raises ValueError unless it is a dataclass, and for anything that is not called as
    ``function(inputs, settings)``.
    """
    name = getattr(function, "__name__", type(function).__name__)
    form = f"def {name}(inputs: ObjectiveInputs, settings: MySettings)"
    if isclass(function) or not isroutine(function):
        kind = "a class" if isclass(function) else "no function"
        raise ValueError(f"{name}: is {kind}; name a function: {form}")
    if iscoroutinefunction(function):
        raise ValueError(f"{name}: is an async function; write it without async: {form}")
    parameters = list(signature(function).parameters.values())
    annotation = parameters[1].annotation if len(parameters) > 1 else None
    if isinstance(annotation, str):  # from __future__ import annotations
        # Looked up by itself: other annotations may be names that only type checkers import.
        annotation = getattr(function, "__globals__", {}).get(annotation)
    # ObjectiveInputs is recognised by its module's name, because `base` imports this module.
    if getattr(annotation, "__module__", None) == f"{__package__}.base":
        raise ValueError(f"{name}: its parameters are swapped; the inputs come first: {form}")
    if not isclass(annotation) or not is_dataclass(annotation):
        raise ValueError(
            f"{name}: the second parameter of an objective is annotated with its settings, a "
            f"dataclass of the module: {form}"
        )
    try:
        signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{name}: is called as {name}(inputs, settings): {error}; make anything else a field "
            f"of {annotation.__name__}"
        ) from None
    # In a section the keys of CHOOSING, `name` and `_target_`, are not the objective's settings.
    if reserved := [key for key in field_names(annotation) if key in CHOOSING]:
        raise ValueError(
            f"{name}: {annotation.__name__}.{reserved[0]} could never be set, because {KEY}."
            f"{reserved[0]} chooses the objective; rename the field"
        )
    return annotation


@dataclass(frozen=True)
class Objective:
    """A chosen objective with its settings. Called with ObjectiveInputs, it computes the loss."""

    section: Mapping[str, Any]
    """The section `algorithm.objective`: `name` or `_target_`, which choose the function, and its
    settings. With `name` the settings are checked and have their defaults. With `_target_` they are
    as the user wrote them, because the module that declares them is not imported yet. For these
    `load_objective` builds another Objective, whose section is complete."""

    def __call__(self, inputs: Any) -> Any:
        """Return the ObjectiveOutput of a microbatch."""
        return self.registered.function(inputs, self.settings)

    def __str__(self) -> str:
        """Return the choice in a line: ``clip(low=0.2, high=0.28)``."""
        settings = (f"{key}={shown(value)}" for key, value in self._typed_settings.items())
        return f"{self.name}({', '.join(settings)})"

    @property
    def name(self) -> str:
        """Return the registered name, or the dotted path."""
        return str(self.section.get("name") or self.section["_target_"])

    @property
    def is_own(self) -> bool:
        """Return True if it is a function of the user's, whose module is imported when used."""
        return "_target_" in self.section

    @cached_property
    def registered(self) -> Registered:
        """Return the registry's entry of the chosen function.

        A function that was not registered gets an entry with default properties. Raises ConfigError
        if `_target_` names no function.
        """
        if not self.is_own:
            return all_objectives()[self.section["name"]]
        key, path = f"{KEY}._target_", self.section["_target_"]
        try:
            function = locate(path, key=key)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for entry in REGISTRY.values():
            if entry.function is function:
                return entry
        try:
            settings = _settings_class(function)
        except ValueError as error:
            raise ConfigError(f"{key}={path}: {error}") from error
        return Registered(name=function.__name__, function=function, settings=settings)

    @property
    def _typed_settings(self) -> dict[str, Any]:
        """The section without the keys that choose the objective."""
        return {key: value for key, value in self.section.items() if key not in CHOOSING}

    @cached_property
    def settings(self) -> Any:
        """Return the objective's checked settings; raise ConfigError with all their problems."""
        typed_settings = self._typed_settings
        names = field_names(self.registered.settings)
        problems = [
            self._unknown_key_problem(key, value)
            for key, value in typed_settings.items()
            if key not in names
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        try:
            return validated(self.registered.settings, typed_settings, KEY)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise ConfigError(
                f"{KEY}._target_={self.name}: {self.registered.settings.__name__} cannot be "
                f"checked: {str(error).splitlines()[0]}; annotate its fields with float, int, "
                "bool, str, enums, or lists of these"
            ) from error

    def _unknown_key_problem(self, key: str, value: Any) -> str:
        """Return the message about a key that is no setting of this objective."""
        names = field_names(self.registered.settings)
        settings_classes = {entry.name: entry.settings for entry in all_objectives().values()}
        if owners := owners_of(key, settings_classes):  # other objectives that have the key
            hint = (
                f"; {' and '.join(owners)} ha{'s' if len(owners) == 1 else 've'} it: "
                f"algorithm/objective={owners[0]}"
            )
        else:
            hint = did_you_mean(key, names)
        keys_text = f"its keys are: {', '.join(names)}" if names else "it has none"
        return f"{KEY}.{key}={shown(value)}: no key of {self.name}{hint}; {keys_text}"

    def plain(self) -> dict[str, Any]:
        """Return the complete section as plain data, for config.yaml."""
        selection = {key: self.section[key] for key in CHOOSING if key in self.section}
        adapter: TypeAdapter[Any] = TypeAdapter(self.registered.settings)
        return {**selection, **adapter.dump_python(self.settings, mode="json")}


def build_objective(name: str | Callable[..., Any], **settings: Any) -> Objective:
    """Return the objective of a name, or of a function, with its settings, for use from Python.

    Examples: ``AlgorithmConfig(objective=build_objective("clip", high=0.28))``; for a function of
    your module's top level ``build_objective(band, width=0.3)``. Raises InvalidSettings.
    """
    if isinstance(name, str):
        return _resolve({"name": name, **settings})
    path = f"{name.__module__}.{name.__qualname__}"
    return _complete(Objective({"_target_": path, **settings}))


def _complete(objective: Objective) -> Objective:
    """Return the objective with all settings in its section. Raises InvalidSettings."""
    try:
        return Objective(objective.plain())
    except ConfigError as error:
        raise InvalidSettings(str(error)) from error


def _resolve(section: Any) -> Objective:
    """Return the objective that a section chooses. Raises InvalidSettings."""
    if isinstance(section, Objective):
        return section
    if not isinstance(section, Mapping):
        raise InvalidSettings(
            f"{KEY}={shown(section)}: is a section; choose one with algorithm/objective="
            f"{shown(section)}, and set its keys with {KEY}.<key>=…"
        )
    if "_target_" in section:
        if "name" in section:
            raise InvalidSettings(
                f"{KEY}._target_={shown(section['_target_'])}: has no effect beside {KEY}.name="
                f"{shown(section['name'])}; add algorithm/objective=own, which has no name, or "
                "remove name from your file"
            )
        # Completing it would import the user's code: `load_objective` does so later.
        return Objective(section)
    objectives, name = all_objectives(), section.get("name", DEFAULT)
    if not isinstance(name, str) or name not in objectives:
        raise InvalidSettings(
            f"{KEY}.name={shown(name)}: no such objective{did_you_mean(str(name), objectives)}; "
            f"they are: {', '.join(sorted(objectives))}; one of your own is "
            f"algorithm/objective=own {KEY}._target_=my_pkg.my_objective"
        )
    return _complete(Objective({**section, "name": name}))


if TYPE_CHECKING:
    ObjectiveChoice = Objective
else:
    ObjectiveChoice = choice(_resolve)
