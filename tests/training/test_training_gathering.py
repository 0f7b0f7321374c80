"""Weights that are spread over processes, gathered layer by layer; real processes."""

from __future__ import annotations

import pytest
from process_gathers import LAYERS
from torchrun import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_sync_gathers_a_layer_at_a_time(processes: int) -> None:
    told = torchrun("process_gathers.py", processes=processes)
    assert len(told) == processes
    for found in told.values():
        for case in {"float32", "bfloat16", "in host memory", "nodes of two"} & found.keys():
            assert found[case]["names"] and found[case]["wrong"] == [], case
            # the layers, the embeddings, the last norm and the head
            assert found[case]["calls"] == LAYERS + 3, case
            # The layer and two of its weights; gloo's thread may still hold the layer before. All
            # weights are 6.7 layers.
            assert 1 < found[case]["peak_over_layer"] < 2.7, case
        assert found["adapters"]["wrong"] == found["adapters"]["unmerged"] == []
        assert found["adapters"]["calls"] == LAYERS
        assert found["sampler"] == {"wrong": [], "calls": LAYERS + 3}
