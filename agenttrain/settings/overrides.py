"""Overrides of Hydra's command line, as texts: `optimizer.lr=1e-4`, `++tools.sql.timeout_s=5`."""

from __future__ import annotations


def key_of(override: str) -> str:
    """Return the key of an override: ``++sweep.trials=5`` -> ``sweep.trials``."""
    return override.lstrip("+~").partition("=")[0]


def as_typed(override: str | None) -> str:
    """Return an override as the user typed it, without the ``++`` of `open_keys`.

    Takes an `input_line` of Hydra's, which may be None, too.
    """
    return (override or "").removeprefix("++")
