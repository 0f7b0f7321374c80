"""Settings as pydantic dataclasses: their common options, and their errors as our messages.

A capability's `config.py` declares them:

    @dataclass(config=SETTINGS)
    class OptimizerConfig:
        lr: Number = Field(default=1e-6, gt=0)
        warmup_steps: Whole = Field(default=0, ge=0)

Bounds stand on the fields, and so does the mark that a field is data: `Data[str]`; `Whole` and
`Number` have it. Without the mark, the field needs trust in a run of somebody else. A check of
several fields of one section is a validator that calls `raise_problems`, or raises ValueError
(``name=value: …``) if the section is used at several keys. It reads no file and imports nothing,
because commands such as `view` read the settings of runs whose files are elsewhere. OmegaConf
checks names and types before pydantic sees a section of `RunConfig`. A section whose keys depend on
its `name` is annotated with the base class of its choices, which OmegaConf checks, and a validator
that calls `choose`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import DATA
from agenttrain.utils.moved import moved_key
from agenttrain.utils.names import did_you_mean

SETTINGS = ConfigDict(extra="forbid", defer_build=True)
"""Options of every settings dataclass: unknown keys are errors. Validators are built when they are
first used: a command that fails before that is a fifth of a second faster."""
LARGEST = 2**63
"""Bound of whole numbers: torch and numpy hold none beyond it."""
Whole = Annotated[int, Field(strict=True, lt=LARGEST), DATA]
"""A whole number that is data: neither 1.0, nor "1", nor true."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), DATA]
"""A finite number that is data, also a whole one; neither a text nor true."""
Flag = Annotated[bool, Field(strict=True), DATA]
"""True or false as data, and no text or number that could mean it: for sections with a `_target_`,
which OmegaConf does not check."""


def _quoted(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise PydanticCustomError("string_type", "expected a text")


Quoted = Annotated[Any, PlainValidator(_quoted, json_schema_input_type=str | None), DATA]
"""A text or None that is data. OmegaConf, which would turn an unquoted commit, 12e4, into 120000.0,
sees a value of any type."""
T = TypeVar("T")


class InvalidSettings(ValueError):
    """Complete lines ``key=value: problem; remedy`` of a section's own check."""


def raise_problems(lines: Iterable[str]) -> None:
    """Raise InvalidSettings with all lines, if there are any."""
    if problems := list(lines):
        raise InvalidSettings("\n".join(problems))


def raise_config_error(lines: Iterable[str]) -> None:
    """Raise ConfigError with all lines, if there are any."""
    if problems := list(lines):
        raise ConfigError("\n".join(problems))


def choice(resolve: Callable[[Mapping[str, Any]], object]) -> Any:
    """Return the type of a section whose keys depend on a choice that is made in it.

    OmegaConf takes a mapping with any keys. pydantic passes it to `resolve`, which returns the
    chosen component and raises pydantic's ValidationError, or ValueError, for invalid keys.
    """
    return Annotated[Any, PlainValidator(resolve)]


@dataclasses.dataclass(frozen=True, slots=True)
class MayBeNone:
    """Marks the field of a section that is None where none of its keys is set."""

    settings: type
    """The class of the section if it is not None."""


INCOMPLETE = "incomplete_section"
"""Type of the error of an optional section without the key that it needs."""


def _first_setting(section: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Return the place and the value of the first setting: ``{a: {b: 1}}`` -> ``("a", "b"), 1``."""
    name, value = next(iter(section.items()))
    if not (isinstance(value, Mapping) and value):
        return (str(name),), value
    place, value = _first_setting(value)
    return (str(name), *place), value


def _optional(settings: type[Any]) -> Any:
    """Return the annotation of a section that is None while none of its keys is set."""

    def read(section: object) -> object:
        """Return the section as a record of the class `settings`; None for an empty mapping."""
        if section is None or isinstance(section, settings):
            return section
        if not isinstance(section, Mapping):
            # Users read "algorithm.kl=5: is a section; set its keys with algorithm.kl.<key>=…".
            raise PydanticCustomError("section", "is a section")
        names = field_names(settings)
        unknown = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "unknown_key",
                    "unknown key{hint}",  # a template: pydantic fills in the context below
                    {"hint": did_you_mean(str(n), names) or f"; its keys are: {', '.join(names)}"},
                ),
                loc=(str(n),),
                input=value,
            )
            for n, value in section.items()
            if n not in names
        ]
        if unknown:
            raise ValidationError.from_exception_data(settings.__name__, unknown)
        missing = [n for n in required if n not in section]
        if section and missing:
            loc, value = _first_setting(section)
            context = {"missing": missing[0], "depth": len(loc)}
            error = PydanticCustomError(INCOMPLETE, "is incomplete", context)
            detail = InitErrorDetails(type=error, loc=loc, input=value)
            raise ValidationError.from_exception_data(settings.__name__, [detail])
        if not section:  # none of its keys is set
            return None
        return TypeAdapter(settings).validate_python(dict(section))

    required = [n for n, field in settings.__pydantic_fields__.items() if field.is_required()]
    validator = PlainValidator(read, json_schema_input_type=settings | None)
    return Annotated[Any, validator, MayBeNone(settings)]


if TYPE_CHECKING:
    from typing import Optional as OptionalSection
else:

    class OptionalSection:
        """``OptionalSection[KlConfig]``: type of a section that is None unless a key of it is set.

        Type checkers see ``KlConfig | None``. At run time OmegaConf sees a value of any type: for
        ``KlConfig | None`` with the value None it would refuse ``algorithm.kl.beta=0.1``, a key
        below None. pydantic checks the names and types of the keys.
        """

        def __class_getitem__(cls, settings: type) -> Any:
            return _optional(settings)


@cache
def sections_below(cls: type) -> Mapping[str, type]:
    """Map each section's key in a settings class to its class, also if it may be None."""
    sections: dict[str, type] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        parts = get_args(hint)
        first_part = parts[:1]  # the class of ``Annotated[Class, …]`` and of ``Class | None``
        of_optional = [part.settings for part in parts if isinstance(part, MayBeNone)]
        for candidate in (hint, *first_part, *of_optional):
            if isinstance(candidate, type) and is_dataclass(candidate):
                sections[name] = candidate
    return sections


def choose(key: str, section: Any, choices: Mapping[str, type[T]]) -> T:
    """Return the section at `key` as the settings that its `name` chooses; raises InvalidSettings.

    An object of a choice's class is returned unchanged. The message about an unknown key names the
    choices that have it.
    """
    for settings in choices.values():
        if isinstance(section, settings):
            return section
    group = key.replace(".", "/")
    if not isinstance(section, Mapping):
        raise InvalidSettings(
            f"{key}={shown(section)}: is a section; choose one with {group}={'|'.join(choices)}, "
            f"and set its keys with {key}.<key>=…"
        )
    name = str(section.get("name"))
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise InvalidSettings(f"{group}={name}: expected one of: {', '.join(choices)}{hint}")
    names = field_names(choices[name])

    def unknown_key(leaf: str, value: Any) -> Iterator[str]:
        """Yield the message about a key that the chosen settings do not have."""
        line = f"{key}.{leaf}={shown(value)}: unknown key of {group}={name}"
        if owners := [f"{group}={owner}" for owner in owners_of(leaf, choices)]:
            yield f"{line}; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
        else:
            keys = f"; its keys are: {', '.join(names)}"
            yield f"{line}{did_you_mean(leaf, names) or keys}"

    return with_known_keys(choices[name], section, key, unknown_key)


def with_known_keys(
    settings: type[T],
    section: Mapping[str, Any],
    key: str,
    unknown_key_problems: Callable[[str, Any], Iterable[str]],
) -> T:
    """Return the section at `key` as its settings; raises InvalidSettings with all its problems.

    `unknown_key_problems(name, value)` returns the messages about a key that the settings do not
    have.
    """
    names = field_names(settings)
    lines = [
        line
        for name, value in section.items()
        if name not in names
        for line in unknown_key_problems(str(name), value)
    ]
    # The known keys are validated too, so that one error has all problems.
    known_keys = {name: value for name, value in section.items() if name in names}
    try:
        result = TypeAdapter(settings).validate_python(known_keys)
    except ValidationError as error:
        lines += problem_lines(error, key)
    raise_problems(lines)
    return result


def owners_of(key: str, choices: Mapping[str, Any]) -> list[str]:
    """Return the choices whose settings have the key."""
    return [name for name, settings in choices.items() if key in field_names(settings)]


def field_names(settings: Any) -> tuple[str, ...]:
    """Return the keys of a settings class."""
    return tuple(field.name for field in fields(settings))


def split_section(
    settings: type[T], section: Mapping[str, Any], key: str = ""
) -> tuple[T, dict[str, Any]]:
    """Split a component's section into agenttrain's settings and the arguments of its `_target_`.

    Example: ``{"_target_": "my.find", "timeout_s": 2.0, "table": "a.csv"}`` of ToolSettings ->
    ``(ToolSettings(timeout_s=2.0), {"table": "a.csv"})``. Raises ConfigError as `validated` does.
    """
    names = field_names(settings)
    arguments = {n: v for n, v in section.items() if n not in (*names, "_target_")}
    return validated(settings, {n: v for n, v in section.items() if n in names}, key), arguments


def plain(value: Any) -> Any:
    """Return settings as data for YAML: mappings, lists, and enum members by their values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.value if isinstance(value, Enum) else value


def validated(settings: type[T], section: Mapping[str, Any], key: str = "") -> T:
    """Return the section at `key` as its settings; raises ConfigError with all its problems."""
    try:
        return TypeAdapter(settings).validate_python(dict(section))
    except ValidationError as error:
        raise ConfigError("\n".join(problem_lines(error, key))) from None


def problem_lines(error: ValidationError, key: str = "") -> Iterator[str]:
    """Yield pydantic's errors as ``key=value: problem; remedy``, one line each.

    Example: ``optimizer.lr=-1.0: must be more than 0``. `key` is the key of the section; the `loc`
    of an error, such as ``("lr",)``, leads on from there.
    """
    reported_pairs = set[str]()
    for detail in error.errors(include_url=False):
        cause = (detail.get("ctx") or {}).get("error")  # what a validator of ours raised
        if isinstance(cause, InvalidSettings):  # its lines are complete
            yield from str(cause).split("\n")
            continue
        names = [part for part in (key, *map(str, detail["loc"])) if part]
        place = ".".join(names)
        # A check of the whole section. Its text begins with a key of it: "lr=…: problem".
        if detail["type"] == "value_error" and not detail["loc"]:
            yield f"{place}.{cause}" if place else str(cause)
            continue
        if detail["type"] == INCOMPLETE:
            context = detail["ctx"]
            section = ".".join(names[: -context["depth"]])
            needed = f"{section}.{context['missing']}"
            yield (
                f"{place}={shown(detail['input'])}: there is no {section} without {needed}; add "
                f"{needed}=…, or leave {place} out"
            )
            continue
        if detail["type"] in ("missing", "missing_argument"):
            # An index: an item of a tuple is missing. The only tuples of fixed length in settings
            # are pairs of numbers (the betas of Adam).
            if isinstance(detail["loc"][-1], int):
                place = ".".join(names[:-1])
                if place not in reported_pairs:  # both items may be missing
                    yield f"{place}={shown(detail['input'])}: must be two numbers, e.g. [0.9,0.99]"
                reported_pairs.add(place)
            else:
                yield f"{place}: has no value; set it: {place}=…"
            continue
        yield f"{place}={shown(detail['input'])}: {_describe_problem(detail, place)}"


def shown(value: Any) -> str:
    """Return a value as it is typed on the command line: null, true, [0.9,0.99], {a: 1}."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(part)}' for key, part in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_problem(detail: Mapping[str, Any], place: str) -> str:
    """Return the problem, and perhaps remedy, of one of pydantic's errors about the key `place`.

    Exact causes come first; EXPECTED then says only which type a value should have had.
    """
    # `ctx` has the bound (`ge`), an enum's members (`expected`), or a validator's error (`error`).
    kind, context = detail["type"], detail.get("ctx") or {}
    for name, words in BOUNDS.items():
        if name in context:
            bound = context[name]
            if (name, bound) == ("ge", 0):
                return "must be 0 or more"
            return f"{words} {bound if isinstance(bound, int) else f'{bound:g}'}"
    if kind == "enum":
        # pydantic writes 'a', 'b' or 'c'
        names = context["expected"].replace("' or '", "', '").strip("'").split("', '")
        return f"expected one of: {', '.join(names)}{did_you_mean(str(detail['input']), names)}"
    if kind == "unexpected_keyword_argument":
        return "unknown key"
    # The old value of a key that is a section today, or takes other values: algorithm.kl=k3.
    if (new := moved_key(f"{place}={shown(detail['input'])}")) is not None:
        return f"is {new} now"
    if kind == "section":
        return f"is a section; set its keys with {place}.<key>=…"
    if kind == "string_type" and isinstance(detail["input"], int | float):
        # YAML has read 12e4 as 120000.0: only a whole number still has its written form.
        text = detail["input"] if isinstance(detail["input"], int) else "…"
        return f"""expected a text; quote it: {place}='"{text}"'"""
    for prefix, expected in EXPECTED.items():
        if kind.startswith(prefix):
            return expected
    if kind == "value_error":  # raised by a validator of ours
        return str(context["error"])
    return str(detail["msg"])


BOUNDS = {
    "ge": "must be at least",
    "gt": "must be more than",
    "le": "must be at most",
    "lt": "must be below",
}
EXPECTED = {
    "finite_number": "must be a finite number",
    "int_": "expected a whole number",
    "float_": "expected a number",
    "bool_": "expected true or false",
    "string_": "expected a text",
    "list_": "expected a list, e.g. [a,b]",
    "tuple_": "expected a list, e.g. [0.9,0.99]",
    "too_long": "must be two numbers, e.g. [0.9,0.99]",  # a pair is the only list with a length
    "dict_": "expected keys and values, e.g. {name: value}",
}
"""Beginning of the name of a pydantic error -> the problem."""
