"""Tokens, seconds and money of a run, by numbers computed by hand; in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from agenttrain.cli import main
from agenttrain.commands.sweep.table import results
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.settings.machine import run_gpus
from agenttrain.tracking.run_folder import read_summary
from agenttrain.tracking.usage import Usage, usage_lines

FIRST = {
    "tokens/sampled": 100.0, "tokens/trained": 60.0, "tokens/computed": 400.0,
    "time/rollout_s": 6.0, "time/train_s": 3.0, "time/sync_s": 1.0,
    "idle/rollout": 0.5, "perf/mfu": 0.2, "perf/tokens_per_s_gpu": 40.0, "perf/peak_gb": 60.5,
}  # fmt: skip
SECOND = {
    **FIRST, "tokens/sampled": 300.0, "time/rollout_s": 2.0, "time/train_s": 1.0,
    "time/sync_s": 1.0, "idle/rollout": 0.1, "perf/mfu": 0.4, "perf/tokens_per_s_gpu": 5.0,
    "perf/peak_gb": 55.0,
}  # fmt: skip


def test_a_run_adds_up() -> None:
    now = SimpleNamespace(s=100.0)
    usage = Usage(gpus=8, gpu_hour=2.5, clock=lambda: now.s)
    now.s = 136.0  # 24 seconds of loading and 12 of the step: 36 x 8 x 2.5 / 3600 = 0.2
    first = usage.add(FIRST)
    assert first["tokens/sampled_total"] == 100
    assert (first["time/step_s"], first["time/total_s"]) == (36, 36)
    assert (first["cost/step"], first["cost/total"]) == pytest.approx((0.2, 0.2))
    now.s = 145.0
    second = usage.add(SECOND)
    assert (second["tokens/sampled_total"], second["tokens/trained_total"]) == (400, 120)
    assert (second["time/step_s"], second["time/total_s"]) == (9, 45)
    assert (second["cost/step"], second["cost/total"]) == pytest.approx((0.05, 0.25))
    now.s = 172.0
    assert usage.summary() == pytest.approx({
        "gpus": 8, "gpu_hour": 2.5, "cost": 0.4,
        "tokens_sampled": 400, "tokens_trained": 120, "tokens_computed": 800,
        "rollout_s": 8, "train_s": 4, "sync_s": 2, "other_s": 58,  # of 72
        "rollout_idle": 0.4,                    # (0.5 x 6 + 0.1 x 2) / 8
        "mfu": 0.25,                            # (0.2 x 3 + 0.4 x 1) / 4
        "tokens_per_s_gpu": 30,                 # (40 x 10 + 5 x 4) / 14
        "peak_gb": 60.5,
    })  # fmt: skip


def test_a_resumed_run_goes_on_from_its_rows() -> None:
    now = SimpleNamespace(s=0.0)
    usage = Usage(clock=lambda: now.s)
    now.s = 20.0
    rows = [{"step": 1, **FIRST, **usage.add(FIRST)}]
    # Killed: summary.json knows no seconds, the last row 20.
    resumed = Usage(rows=rows, clock=lambda: now.s)
    now.s = 29.0
    assert resumed.add(SECOND) == {
        "tokens/sampled_total": 400, "tokens/trained_total": 120,
        "time/step_s": 9, "time/total_s": 29,
    }  # fmt: skip
    # Stopped by a signal after 50 seconds; a row of an earlier version has null and fewer names.
    old = [{"step": 1, "time/rollout_s": 4.0, "idle/rollout": None}]
    stopped = Usage(rows=old, earlier_s=50.0, clock=lambda: now.s)
    now.s = 30.0
    assert stopped.add({"tokens/sampled": 7.0})["time/total_s"] == 51
    assert stopped.summary() == {"tokens_sampled": 7, "rollout_s": 4, "other_s": 47}


def test_the_console_gets_shares() -> None:
    usage = {
        "rollout_s": 50.0, "train_s": 30.0, "sync_s": 1.0, "other_s": 19.0, "rollout_idle": 0.14,
        "tokens_sampled": 1234567.0, "mfu": 0.314, "tokens_per_s_gpu": 5210.4, "peak_gb": 61.26,
        "gpus": 8, "gpu_hour": 2.5, "cost": 1234.5,
    }  # fmt: skip
    assert dict(usage_lines(usage)) == {
        "time": "rollout 50% (engine idle 14%), train 30%, sync 1%, other 19%",
        "usage": "1,234,567 tokens sampled",
        "speed": "MFU 0.314, 5,210 tokens/s and GPU, 61.3 GB at most",
        "cost": "1,234.50: 8 x 2.5 an hour",
    }
    assert list(usage_lines({})) == []
    waited = {"rollout_s": 3.0, "other_s": 1.0, "engine_idle_s": 1.0, "trainer_wait_s": 2.0}
    assert dict(usage_lines(waited)) == {
        "time": "rollout 75%, other 25%, engine idle 25%, trainer waiting 50%"
    }


def test_an_asynchronous_run_adds_up_what_it_waited() -> None:
    now = SimpleNamespace(s=0.0)
    usage = Usage(clock=lambda: now.s)
    now.s = 20.0
    usage.add({"time/rollout_s": 4.0, "async/idle_s": 1.5, "async/wait_s": 3.0})
    usage.add({"time/rollout_s": 5.0, "async/idle_s": 0.5, "async/wait_s": 1.0})
    assert usage.summary() == {
        "rollout_s": 9, "other_s": 11, "engine_idle_s": 2, "trainer_wait_s": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "verb", "trainers", "gpus"),
    [
        ([], "train", 1, 1),
        (["engine=vllm", "+engine.tensor_parallel_size=4"], "train", 1, 4),
        (["engine=vllm_server", "servers.count=4"], "train", 4, 8),
        (["engine=vllm_server", "servers.count=2", "servers.tensor_parallel_size=2"], "eval", 1, 5),
        (["engine=vllm_server", "servers.nodes=2", "servers.count=8"], "train", 8, 16),
        (["engine=vllm_server", "servers.admin_urls=[http://a:1]"], "train", 2, 2),
        (["rollout.process=own"], "train", 1, 2),
        (["experiment=shop_warmstart"], "sft", 2, 2),
    ],
)
def test_gpus_of_a_run(overrides: list[str], verb: str, trainers: int, gpus: int) -> None:
    with hydra_session(Source()):
        config = compose_run(overrides, Source()).config
    assert run_gpus(config, verb, trainers) == gpus


@pytest.mark.slow
def test_a_run_with_a_price_and_a_peak_rate(tmp_path: Path, capsys) -> None:
    """On a CPU; the peak rate of a card is looked up on a GPU only."""
    folder = tmp_path / "run"
    arguments = [
        "debug=tiny",
        "eval.questions=0",
        "tracker=none",
        "algorithm.kl.beta=0.01",
        f"hydra.run.dir={folder}",
    ]
    priced = ["cost.gpu_hour=3600", "cost.gpus=2", "cost.peak_tflops=0.001"]
    assert main([*arguments, "steps=1", *priced]) == 0
    (first,) = map(json.loads, (folder / "metrics.jsonl").open())
    assert first["cost/total"] == pytest.approx(2 * first["time/total_s"])
    assert first["perf/mfu"] > 0
    assert 0 <= first["idle/rollout"] <= 1
    assert {"perf/peak_gb", "perf/tokens_per_s_gpu"}.isdisjoint(first)
    summary = read_summary(folder)
    usage = summary["usage"]
    assert usage["tokens_sampled"] == first["tokens/sampled"] == first["tokens/sampled_total"] > 0
    assert usage["mfu"] == pytest.approx(first["perf/mfu"])
    assert usage["cost"] >= 2 * summary["seconds"]
    assert results(folder)["usage/cost"] == usage["cost"]
    assert "2 x 3600 an hour" in capsys.readouterr().out
    # Resumed without them: no price and no rate, and the tokens go on.
    assert main([f"resume={folder}", "steps=2", "cost.gpu_hour=null", "cost.peak_tflops=null"]) == 0
    _, second = map(json.loads, (folder / "metrics.jsonl").open())
    assert {"cost/total", "perf/mfu"}.isdisjoint(second)
    total = first["tokens/sampled"] + second["tokens/sampled"]
    assert second["tokens/sampled_total"] == total
    assert second["time/total_s"] > summary["seconds"]
    assert read_summary(folder)["usage"]["tokens_sampled"] == total
