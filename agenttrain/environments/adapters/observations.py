"""Observations of environments as text that a model reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from agenttrain.tools.reply import plain_form

DIGITS = 4
"""Significant digits of the numbers in an observation."""


def observation_text(observation: Any) -> str:
    """Return an observation as text: each part of a Dict in a line, numbers with DIGITS digits.

    Example: ``{"position": array([0.12345]), "door": 1}`` -> ``"position: [0.1235]\\ndoor: 1"``.
    """
    value = _plain(observation)
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_text(part)}" for name, part in value.items())
    return _text(value)


def _text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value in JSON's types, with rounded numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value if isinstance(value, str | int | bool | None) else _plain(plain_form(value))
