"""A second SIGTERM, and one that only repeats the first."""

from __future__ import annotations

import os
import signal
import time

import pytest

from agenttrain.utils.signals import GRACE_S, Preempted, listening


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_within_the_grace_repeats_the_first_and_a_later_one_ends_the_run(capfd):
    saved = []
    with listening() as stop, pytest.raises(KeyboardInterrupt):
        with pytest.raises(Preempted), stop.deferred(lambda: saved.append(1)):
            send()
            send()
            stop.check()
        assert (saved, stop.insisted) == ([1], False)
        time.sleep(GRACE_S)
        send()
    assert stop.insisted
    assert "SIGTERM again after 2 s: at once" in capfd.readouterr().err
