"""Regular expressions of response schemas, with a limit on their time."""

from __future__ import annotations

import pytest

from agenttrain.chat.parsers import patterns
from agenttrain.chat.parsers.patterns import Pattern


def test_results_of_slow_operations_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SLOW_S", 0.0)
    monkeypatch.setattr(patterns, "_SLOW", {})
    pattern = Pattern(r"(a+)b", "x-regex")
    assert [match.start() for match in pattern.matches("ab aab")] == [0, 3]
    assert pattern.substitute("all", "ab aab") == "all all"
    assert pattern.find_match("ab").start() == 0
    assert pattern.substitute("search", "ab") == "search"
