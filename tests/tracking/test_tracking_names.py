"""The table of metric names against the names that runs write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agenttrain.algorithms.loss import metric_names
from agenttrain.algorithms.mismatch import MISMATCH_NAMES, ROUTE_NAMES
from agenttrain.algorithms.objectives.config import all_objectives
from agenttrain.cli import main
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server.fleet import Fleet
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.tracking.metrics import agent_metrics
from agenttrain.tracking.names import METRICS, metric_row
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.weight_sync import Gap, SyncSeconds

RUN = (
    *("train", "debug=tiny", "steps=1", "eval.questions=0", "tracker=none", "algorithm=dapo"),
    *("algorithm.kl.beta=0.01", "algorithm.entropy.bonus=0.01", "algorithm.top_entropy=0.5"),
    *("algorithm.behaviour=recomputed", "algorithm.correction.level=token"),
    *("algorithm.off_policy_threshold=1", "data.curriculum.enabled=true"),
    *("cost.gpu_hour=1", "cost.peak_tflops=1"),
)
AHEAD = (
    *("train", "debug=tiny", "steps=1", "eval.questions=0", "tracker=none"),
    *("async_training.max_staleness=1", "weight_sync.mode=abort_resume"),
)
SUPERVISED = (
    *("sft", "experiment=shop_warmstart", "debug=tiny", "steps=1"),
    *("eval.questions=0", "tracker=none"),
)

MIXED = (
    *("train", "experiment=shop_mix", "debug=tiny", "steps=1", "tracker=none"),
    "data.sources.chains.curriculum.enabled=true",
)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The metrics of one run with most options on, of one that samples ahead, of one of `sft`, of a
    mixture, and those of other options."""
    names: set[str] = set()
    for arguments in (RUN, AHEAD, SUPERVISED, MIXED):
        folder = tmp_path_factory.mktemp("run") / "run"
        assert main([*arguments, f"hydra.run.dir={folder}"]) == 0
        names |= set(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))
    with hydra_session(Source()):
        for preset in sorted((Path(__file__).parents[2] / "conf" / "algorithm").glob("*.yaml")):
            config = compose_run([f"algorithm={preset.stem}"], Source()).config
            names |= set(metric_names(config.algorithm))
        config = compose_run(["algorithm.teacher.path=bundled:shop"], Source()).config
        names |= set(metric_names(config.algorithm))
    gap = Gap(mean=0.0, q90=0.0, max=0.0).metrics()
    names |= set(agent_metrics([]))
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), ServersConfig(), WeightSyncMode.drain)
    names |= set(fleet.metrics())
    names |= {"perf/peak_gb", "perf/update_peak_gb", "perf/tokens_per_s_gpu"}  # on a GPU
    # Of engines with weights of their own, the last of vLLM in this process.
    seconds = SyncSeconds(send=0.0, load=0.0, probe=0.0).metrics()
    names |= {*MISMATCH_NAMES, *ROUTE_NAMES, *gap, *seconds, "time/sync_check_s"}
    with_an_end = {"curriculum/new", "source/lookups/epoch"}  # of rows with an end
    return {*names, *with_an_end} - {"step"}


@pytest.mark.slow
def test_every_metric_has_a_row(names: set[str]) -> None:
    of_objectives = {name for one in all_objectives().values() for name in one.metrics}
    assert {name for name in names if metric_row(name) is None} == of_objectives


@pytest.mark.slow
def test_every_row_is_a_metric(names: set[str]) -> None:
    used = {row.pattern for name in names if (row := metric_row(name)) is not None}
    assert {row.pattern for rows in METRICS.values() for row in rows} - used == set()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("tools/sql/calls", "tools/<tool>/calls"),
        ("tools/stuck", "tools/stuck"),
        ("rewards/exact_match/mean", "rewards/<function>/mean"),
        ("tools/sql/queue_s", None),
    ],
)
def test_a_name_finds_its_row(name: str, pattern: str | None) -> None:
    row = metric_row(name)
    assert (None if row is None else row.pattern) == pattern
