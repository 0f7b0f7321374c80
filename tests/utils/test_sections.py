"""Settings dataclasses: which values pass, and what the others are answered with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.types import ConfigError
from agenttrain.utils.sections import (
    SETTINGS,
    Number,
    Whole,
    choice,
    descriptions,
    raise_problems,
    validated,
)


class Kind(StrEnum):
    fast = "fast"
    slow = "slow"


@dataclass(config=SETTINGS)
class Fast:
    speed: Whole = Field(1, ge=1)


@dataclass(config=SETTINGS)
class Slow:
    delay_s: Number = 0.5


def resolve(section: Mapping[str, Any]) -> object:
    return TypeAdapter({"fast": Fast, "slow": Slow}[section["name"]]).validate_python(
        {key: value for key, value in section.items() if key != "name"}
    )


@dataclass(config=SETTINGS)
class Section:
    rate: Number = Field(0.1, gt=0)
    share: Number = Field(0.5, ge=0, lt=1)
    count: Whole | None = Field(None, ge=1, le=9)
    kind: Kind = Kind.fast
    revision: str = "main"
    betas: tuple[float, float] = (0.9, 0.99)
    names: list[str] = field(default_factory=list)
    part: choice(resolve) = Field(default_factory=lambda: {"name": "fast"})  # type: ignore[valid-type]

    @model_validator(mode="after")
    def check(self) -> Section:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if self.kind is Kind.slow and self.rate > 1:
            yield f"x.rate={self.rate}: is too fast for x.kind=slow; lower it"
        if self.names and self.count is None:
            yield "x.count=null: names are counted; set it"


REFUSED = {
    "rate=0": "x.rate=0: must be more than 0",
    "rate=true": "x.rate=true: expected a number",
    "rate=high": "x.rate=high: expected a number",
    "share=-1": "x.share=-1: must be 0 or more",
    "share=1": "x.share=1: must be below 1",
    "count=0": "x.count=0: must be at least 1",
    "count=10": "x.count=10: must be at most 9",
    "count=1.5": "x.count=1.5: expected a whole number",
    "count=true": "x.count=true: expected a whole number",
    "kind=fas": "x.kind=fas: expected one of: fast, slow (did you mean 'fast'?)",
    "revision=123": """x.revision=123: expected a text; quote it: x.revision='"123"'""",
    "names=a": "x.names=a: expected a list, e.g. [a,b]",
    "zzz=1": "x.zzz=1: unknown key",
    "part={name: fast, delay_s: 1}": "x.part.delay_s=1: unknown key",
    "part={name: fast, speed: 0}": "x.part.speed=0: must be at least 1",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_a_refused_value_is_named(text: str, message: str) -> None:
    section = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    with pytest.raises(ConfigError) as caught:
        validated(Section, section, "x")
    assert str(caught.value) == message


def test_numbers_are_finite() -> None:
    with pytest.raises(ConfigError, match=r"^x\.rate=nan: must be a finite number$"):
        validated(Section, {"rate": float("nan")}, "x")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Section, {"rate": -1.0, "count": 0, "part": {"name": "slow", "speed": 3}}, "x")
    assert str(caught.value).splitlines() == [
        "x.rate=-1.0: must be more than 0",
        "x.count=0: must be at least 1",
        "x.part.speed=3: unknown key",
    ]


def test_a_check_of_several_fields_names_all_of_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Section, {"kind": "slow", "rate": 2.0, "names": ["a"]}, "x")
    assert str(caught.value).splitlines() == [
        "x.rate=2.0: is too fast for x.kind=slow; lower it",
        "x.count=null: names are counted; set it",
    ]


def test_a_choice_becomes_the_settings_of_what_is_chosen() -> None:
    section = validated(Section, {"rate": 1, "part": {"name": "slow", "delay_s": 2}}, "x")
    assert section.rate == 1.0
    assert section.part == Slow(delay_s=2.0)


@dataclass(config=SETTINGS)
class Documented(Fast):
    speed: Whole = 2
    delay_s: Number = 0.5
    """Seconds before it begins,
    as one line."""


def test_the_text_under_a_field_describes_it() -> None:
    assert descriptions(Documented) == {"delay_s": "Seconds before it begins, as one line."}
