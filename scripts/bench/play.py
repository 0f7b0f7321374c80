"""Seconds until `agenttrain play` answers, with the bundled agent, on this machine's cores.

Medians over starts of a process of its own, whose input and output are pipes. The figures:

    play_start_s          from the start of the process to its first prompt: the model is loaded
    play_first_token_s    from the message to the first sampled token
    import_s              side by side: a process that imports torch and transformers' model classes
                          and nothing else, the part of the start that is not ours
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import IO

import harness

PLAY = (sys.executable, "-m", "agenttrain.cli", "play", "eval.temperature=0")
IMPORTS = "import torch; from transformers import AutoTokenizer, Qwen3ForCausalLM"
READY, FIRST = "a line is a message", "<tool_call>"


def wait_for(output: IO[bytes], text: str) -> float:
    """Read until the text has come; return the time."""
    seen = ""
    while text not in seen:
        piece = os.read(output.fileno(), 4096).decode(errors="replace")
        assert piece, f"the process has ended: {seen}"
        seen += piece
    return time.perf_counter()


def start() -> tuple[float, float]:
    """Return the seconds to the first prompt, and from a message to its first token."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        PLAY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ready = wait_for(process.stdout, READY)
    asked = time.perf_counter()
    process.stdin.write(b"/ask\n")
    process.stdin.flush()
    answered = wait_for(process.stdout, FIRST)
    process.communicate()
    return ready - begun, answered - asked


def measure(quick: bool) -> dict[str, float]:
    """Start it a few times, each beside a process that only imports."""
    starts, imports = [], []
    for _ in range(1 if quick else 5):
        starts.append(start())
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        imports.append(time.perf_counter() - begun)
    return {
        "play_start_s": statistics.median(ready for ready, _ in starts),
        "play_first_token_s": statistics.median(first for _, first in starts),
        "import_s": statistics.median(imports),
    }


if __name__ == "__main__":
    harness.run(__doc__ or "", measure)
