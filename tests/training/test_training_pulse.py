"""Who stands still is found out by those who wait for it."""

from __future__ import annotations

import time

import torch.distributed as dist

from agenttrain.training.world import Pulse


def test_a_process_that_shows_no_life_for_long_is_silent() -> None:
    store = dist.HashStore()
    pulse = Pulse(store, rank=0, limit_s=0.05)
    store.set("alive/1", "7")
    while not (silent := pulse.silent([1, 2])):
        time.sleep(0.01)
    assert silent == [1]  # 2 has not begun to count
    store.set("alive/1", "8")
    assert pulse.silent([1, 2]) == []


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("agenttrain.training.world.time.monotonic", lambda: now)
    store = dist.HashStore()
    pulse = Pulse(store, rank=0, limit_s=5.0)
    store.set("alive/1", "7")
    assert pulse.silent([1]) == []
    now += 3600  # this process was stopped, and perhaps all of them: counts as 2 s
    assert pulse.silent([1]) == []
    now += 2
    assert pulse.silent([1]) == []  # 4 s
    now += 2
    assert pulse.silent([1]) == [1]  # 6 s


def test_a_process_that_lives_counts_on() -> None:
    store = dist.HashStore()
    Pulse(store, rank=1, limit_s=0.08).start()
    seen = set()
    while len(seen) < 3:
        store.wait(["alive/1"])
        seen.add(store.get("alive/1"))
        time.sleep(0.001)
