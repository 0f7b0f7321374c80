"""Checks of `data:` beside its two sections of rows."""

from __future__ import annotations

from collections.abc import Iterator

from agenttrain.config.errors import ConfigError
from agenttrain.config.expression import compiled
from agenttrain.config.row_file import ENDLESS, FILE_ROWS, HUB_ROWS
from agenttrain.config.schema import DataConfig, RunConfig
from agenttrain.config.text_template import TextTemplate

HOLD_OUT = "data.test_fraction=0.1 holds some of data.train out"


def names_test_rows(data: DataConfig) -> bool:
    """Return whether data.test names rows: a path if it needs one, or another split of the same."""
    if data.test.get("_target_") not in (FILE_ROWS, HUB_ROWS) or data.test.get("path") is not None:
        return bool(data.test)
    return any(value not in (None, data.train.get(name)) for name, value in data.test.items())


def has_test_rows(data: DataConfig) -> bool:
    """Return whether there are rows to evaluate on, of data.test or held out of data.train."""
    return data.test_fraction is not None or names_test_rows(data)


def check_test_rows(verb: str, config: RunConfig) -> None:
    """Raise ConfigError for an evaluation without rows."""
    if verb == "eval" and not has_test_rows(config.data):
        raise ConfigError("data.test: names no rows to evaluate on; add data.test.path=<file>")


def data_setting_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the settings that both splits share."""
    data = config.data
    for name, group in (("path", "file or data=hub"), ("subset", "hub"), ("revision", "hub")):
        value = getattr(data, name)
        if value is not None and all(s.get(name) != value for s in (data.train, data.test)):
            yield f"data.{name}={value}: is not used by these rows; add data={group}"
    if data.shuffle and data.train.get("_target_") in ENDLESS:
        yield "data.shuffle=true: rows without end have no shuffled order; leave it out"
    yield from _held_out(config)
    for name, text in data.map.items():
        try:
            compiled(text, f"data.map.{name}")
        except ValueError as error:
            yield str(error)
    if data.prompt is None:
        return
    try:
        TextTemplate(data.prompt, "data.prompt")
    except ValueError as error:
        yield str(error)
    for name in {"messages", "prompt"} & set(data.map):
        yield f"data.map.{name}={data.map[name]}: data.prompt makes the question already; drop one"


def _held_out(config: RunConfig) -> Iterator[str]:
    data, same = config.data, config.data.train == config.data.test
    fraction = data.test_fraction
    if not has_test_rows(data) and config.eval.every is not None:
        yield f"eval.every={config.eval.every}: data.test names no rows; {HOLD_OUT}"
    if fraction is None:
        # Whoever names one file twice wants to be tested on what was trained.
        if data.path is not None and same and config.eval.questions:
            yield (
                "data.test: has the same rows as data.train; hold some out with "
                "data.test_fraction=0.1, or choose others with data.test.split=… or "
                "data.test.path=…, or eval.questions=0"
            )
    elif not 0 < fraction < 1:
        yield f"data.test_fraction={fraction}: must be between 0 and 1"
    elif (names_test_rows(data) and not same) or data.train.get("_target_") in ENDLESS:
        yield (
            f"data.test_fraction={fraction}: data.test has rows of its own; leave it out, or let "
            "both read the same: data=file data.path=…"
        )
    if fraction is None and data.test_seed:
        yield f"data.test_seed={data.test_seed}: has no effect without data.test_fraction"
