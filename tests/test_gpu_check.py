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
from agenttrain.rollout.collector import Collected, MetricNames, step_metrics
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.training.kernels import Kernel
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
    assert [*runs] == [*script.ON_TRANSFORMERS, *script.RUNS, *script.TWO, "model other"]
    with hydra_session(Source()):
        for name, overrides in runs.items():
            config = compose_run(open_keys(overrides), Source()).config
            engine = "transformers" if name in script.ON_TRANSFORMERS else "vllm"
            assert (config.engine.name, config.steps) == (engine, 5)


def test_the_metrics_that_it_reports_are_those_of_a_run() -> None:
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
    }
    assert "time/sync_s" in names
    for beginning in loaded().TOLD:
        assert any(name.startswith(beginning) for name in names), beginning


def test_a_check_that_fails_is_told_and_the_others_go_on() -> None:
    def breaks() -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    assert loaded().attempt(breaks) == {
        "ok": False,
        "error": "RuntimeError: an illegal memory access was encountered",
    }
