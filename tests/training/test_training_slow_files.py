"""A start from a file system that is slow, and from one that has gone; real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_slow_files import READ_S, READS, TIMEOUT_S
from torchrun import torchrun

pytestmark = pytest.mark.long


def test_a_start_waits_for_a_process_whose_reads_are_slow(tmp_path: Path) -> None:
    told = torchrun("process_slow_files.py", "slow", str(tmp_path))
    assert READS * READ_S > 2 * TIMEOUT_S
    for rank in (0, 1):
        assert told[rank].get("error") is None
        assert told[rank]["wrong"] == []
        assert told[rank]["s"] > READS * READ_S
        # Each wait and each weight is progress, so that no watchdog ends the run meanwhile.
        assert told[rank]["progress"] >= READS
    assert told[1]["reads"] == READS


def test_a_process_that_stands_still_in_a_read_ends_the_start(tmp_path: Path) -> None:
    told = torchrun("process_slow_files.py", "stopped", str(tmp_path))
    assert told[0]["missing"] == [1]
    assert told[0]["error"] == (
        "rank 0 waits for the weights in every process: rank 1 showed no life for 6 s "
        "(rank 1 was last at the model in every process; distributed.timeout_s)"
    )
