"""Memory that the C library holds after tensors were freed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FRAGMENTED = """
import torch
from agenttrain.training.heap import return_free_memory

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

del_first = torch.ones(30 * 2**18)  # once freed, blocks of up to 30 MB come from the heap
del del_first
blocks = [torch.ones(2**19) for _ in range(300)]  # 2 MB each
del blocks[:-1]  # the last one keeps the heap from getting shorter
before = resident()
return_free_memory()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no trim")
def test_freed_tensors_do_not_stay_resident() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True
    )
    assert float(found.stdout) > 500
