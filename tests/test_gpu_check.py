"""`scripts/gpu_check`: what it says without a GPU, and that what it would run can be composed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.algorithms.loss import metric_names
from agenttrain.algorithms.mismatch import MISMATCH_NAMES
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server.fleet import Fleet
from agenttrain.rollout.collector import Collected, MetricNames, step_metrics
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.kernels import Kernel
from agenttrain.training.operations import StepWork, work_metrics
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import Gap

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check"


def loaded() -> Any:
    """The script as a module; its name has no suffix."""
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["gpu"] is None and found["versions"]["torch"] == torch.__version__
    assert found["message"] == "there is no GPU here: nothing was checked"


@pytest.mark.slow
def test_what_it_would_run_are_settings_of_a_run() -> None:
    script = loaded()
    runs = script.planned([Path("one"), Path("other")], devices=2)
    groups = (script.ON_TRANSFORMERS, script.IMAGES, script.RUNS, script.TWO, script.ON_SERVERS)
    assert [*runs] == [*(name for group in groups for name in group), "model other"]
    engines = {
        **dict.fromkeys([*script.ON_TRANSFORMERS, *script.IMAGES], "transformers"),
        **dict.fromkeys(script.ON_SERVERS, "vllm_server"),
    }
    with hydra_session(Source()):
        for name, overrides in runs.items():
            config = compose_run(open_keys(overrides), Source()).config
            assert (config.engine.name, config.steps) == (engines.get(name, "vllm"), 5)
            assert config.servers.gpus == ([0] if name in script.ON_SERVERS else None)
            # `kill` counts rollouts: the second step is to have begun.
            assert config.tasks_per_step * config.algorithm.group_size == 64


def test_the_metrics_that_it_reports_are_those_of_a_run(tmp_path: Path) -> None:
    scorer = SimpleNamespace(kernels=Counter({Kernel.flash: 1}))
    policy = SimpleNamespace(_scorer=scorer)
    names = {
        *step_metrics(
            MetricNames(tools=(), rewards=()), Collected(), {"rollout": 1.0, "sync": 1.0}
        ),
        *("loss", "grad_norm", "lr", "train/tokens"),  # of every update
        *metric_names(AlgorithmConfig()),
        *MISMATCH_NAMES,
        *Policy.kernel_metrics(policy),
        *Gap(mean=0.0, q90=0.0, max=0.0).metrics(),
        *work_metrics([StepWork(peak_gb=2.0, update_peak_gb=1.0)], 1.0),
        *Fleet(tmp_path, ServersConfig(), WeightSyncMode.drain).metrics(),
    }
    for metric in ("perf/peak_gb", "perf/update_peak_gb", "fleet/deaths"):
        assert metric in names
    assert "time/sync_s" in names
    for beginning in loaded().TOLD:
        assert any(name.startswith(beginning) for name in names), beginning


def test_every_run_and_check_is_in_one_part() -> None:
    script = loaded()
    names = [name for part in script.PARTS.values() for name in part]
    runs = script.planned([Path("one"), Path("other")], devices=2)
    checks = ["packing", "plan", "vllm_bench", "moe_reload"]
    assert sorted([*names, "model other"]) == sorted([*runs, *checks])
    assert [script.part_of(name) for name in ("servers killed", "plan", "model other")] == [
        *("kill", "transformers", "models")
    ]


def test_a_plan_is_compared_with_the_peak_of_the_update() -> None:
    parts = [
        {"name": "weights", "bytes": 3e9, "when": ["rollouts", "update"], "on_host": False},
        {"name": "activations", "bytes": 5e9, "when": ["update"], "on_host": False},
        {"name": "keys and values", "bytes": 9e9, "when": ["rollouts"], "on_host": False},
        {"name": "process", "bytes": 4e9, "when": ["update"], "on_host": True},
        {"name": "reserve", "bytes": 2e9, "when": ["update"], "on_host": False},
    ]
    compare = loaded().compare
    found = compare(parts, 8.72)  # of 3 + 5
    assert (found["planned_update_gb"], found["ok"]) == (8.0, True)
    assert found["seen_over_planned"] == pytest.approx(1.09)
    assert [compare(parts, seen_gb)["ok"] for seen_gb in (8.9, 7.1, None)] == [False] * 3


def test_a_check_that_fails_is_told_and_the_others_go_on() -> None:
    def breaks() -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    assert loaded().attempt(breaks) == {
        "ok": False,
        "error": "RuntimeError: an illegal memory access was encountered",
    }
