"""The hosts that a run and a task both allow."""

from __future__ import annotations

import pytest

from agenttrain.runtimes.allowlist import common_hosts


@pytest.mark.parametrize(
    ("run", "task", "both"),
    [
        (["*.org", "a.com"], ["*.b.org", "example.org", "*.a.com"], ("*.b.org", "example.org")),
        (["example.org"], ["*.example.org"], ()),
        (["*.example.org"], ["example.org"], ()),
        (
            ["*.example.org"],
            ["*.example.org", "www.example.org"],
            ("*.example.org", "www.example.org"),
        ),
        (["*.ample.org"], ["example.org"], ()),
        ([], ["example.org"], ()),
    ],
)
def test_neither_list_widens_the_other(run: list[str], task: list[str], both: tuple) -> None:
    assert common_hosts(run, task) == both
    assert set(common_hosts(task, run)) == set(both)
