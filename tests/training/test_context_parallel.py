"""Several processes compute packed trees together: what one process computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from context_processes import TREE, segments_of
from torchrun import torchrun

from agenttrain.training.attention import attend
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_tree import Call, ContextTree, fill
from agenttrain.training.handed_states import make_tails
from agenttrain.training.logprobs import TRIAL
from agenttrain.training.partial_attention import (
    Scoring,
    attend_partially,
    merge,
    nothing_yet,
    partial_gradients,
)
from agenttrain.training.segments import Segment
from agenttrain.training.world import World
from agenttrain.types import ConfigError

CPU = torch.device("cpu")
DENSE_HIDDEN, DENSE_GRADIENT = 1e-5, 5e-5
HIDDEN, GRADIENT = 5e-5, 2e-4
"""Of recurrent layers, and of experts."""
DENSE = ["Qwen2", "Qwen2-window", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Phi3", "SmolLM3"]
OTHERS = ["Qwen3Moe", "GptOss", "DeepseekV3", "Qwen3_5", "Qwen3_5Moe", "GraniteMoeHybrid"]
MORE = ["KimiLinear", "Lfm2", "Lfm2Moe", "NemotronH", "Qwen2Moe", "OlmoHybrid"]


def test_a_tree_is_cut_into_chunks_of_equal_length() -> None:
    # packed   P P P P P P P P | A A A | B B B B B
    # chunk    0 0 0 0 1 1 1 1   2 2 2   2 3 3 3 3      owners 0 1 1 0
    segments = segments_of(((8, None), (3, 0), (5, 0)))
    first, second = (ContextTree(segments, rank=rank, processes=2) for rank in (0, 1))
    assert [(p.segment.start, p.length, p.owner, p.offset) for p in first.pieces] == [
        *((0, 4, 0, 0), (4, 4, 1, 0), (8, 3, 1, 4)),
        *((11, 1, 1, 7), (12, 4, 0, 4)),
    ]
    assert first.packed_positions().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert first.positions().tolist() == [0, 1, 2, 3, 9, 10, 11, 12]
    assert second.positions().tolist() == [4, 5, 6, 7, 8, 9, 10, 8]
    # A and the first token of B follow the second half of P, and attend to it in one call.
    assert second.calls(1, None) == [
        Call(slice(4, 8), slice(0, 4), None),
        *(Call(slice(a, b), slice(a, b), 0) for a, b in ((0, 4), (4, 7), (7, 8))),
    ]
    assert second.calls(0, None) == [
        Call(slice(0, 4), slice(0, 4), None),
        Call(slice(4, 8), slice(0, 4), None),
    ]
    # With a window of 3 the first token of B, at position 8, sees the positions 6 and 7.
    assert second.calls(0, 3) == [Call(slice(0, 4), slice(2, 4), 2)]
    assert second.calls(1, 3)[-2:] == [
        Call(slice(7, 8), slice(7, 8), None),
        Call(slice(7, 8), slice(2, 4), None),
    ]


@pytest.mark.parametrize("processes", [2, 11, 12, 13, 16, 24, 32])
def test_every_process_has_tokens_of_the_trial(processes: int) -> None:
    # 23 tokens are enough for 11 processes. For 12 a token is added, for 32 there are 41.
    segments = fill(TRIAL, processes)
    assert segments[: len(TRIAL)] == TRIAL
    assert segments[-1].end == max(23, 2 * processes)
    trees = [ContextTree(segments, rank=r, processes=processes) for r in range(processes)]
    counts = [len(tree.packed_positions()) for tree in trees]
    assert counts == [len(tree.positions()) for tree in trees]
    assert min(counts) >= 2 and sum(counts) == segments[-1].end


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_all_processes_have_about_as_much_to_attend_to(processes: int) -> None:
    """Every pair of a query and a key is in one call of one process."""
    tokens = 96 * processes
    work = []
    for rank in range(processes):
        tree = ContextTree((Segment(0, tokens),), rank=rank, processes=processes)
        assert tree.counts == [96] * processes
        calls = [call for source in range(processes) for call in tree.calls(source, None)]
        work.append(sum(map(pairs, calls)))
    assert sum(work) == tokens * (tokens + 1) // 2
    assert len(set(work)) == 1


def pairs(call: Call) -> int:
    """Queries times keys, or the triangle of a causal call."""
    queries = call.queries.stop - call.queries.start
    keys = call.keys.stop - call.keys.start
    return queries * keys if call.shift is None else queries * (queries + 1) // 2


def test_parts_weigh_as_much_as_their_keys() -> None:
    # Two keys of score 0 with values 1 and 2, and one with 6: (1 + 2 + 6) / 3 = 3.
    query, value = torch.zeros(1, 1, 4), torch.tensor([[[1.0]], [[2.0]], [[6.0]]])
    key = torch.zeros(3, 1, 4)
    output, log = nothing_yet(query, value)
    for part in (slice(0, 2), slice(2, 3)):
        merge(output, log, *attend_partially(query, key[part], value[part], Scoring(), None))
    assert output.item() == pytest.approx(3.0)
    assert log.item() == pytest.approx(torch.tensor(3.0).log().item())


@pytest.mark.parametrize(
    ("scoring", "heads", "sizes"),
    [
        (Scoring(), (4, 2), (8, 8)),
        (Scoring(scale=0.3), (4, 4), (8, 8)),
        (Scoring(softcap=2.0), (4, 2), (8, 8)),
        (Scoring(window=7), (4, 1), (8, 8)),
        (Scoring(), (2, 2), (12, 8)),
    ],
    ids=["grouped", "scaled", "soft cap", "window", "narrow values"],
)
def test_attention_in_parts_is_attention(
    scoring: Scoring, heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """300 queries behind 40 keys, in parts of unlike lengths: the output and all gradients."""
    torch.manual_seed(0)
    query = torch.randn(300, heads[0], sizes[0], dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(340, heads[1], size, dtype=torch.float64, requires_grad=True) for size in sizes
    )
    laid_out = [state.transpose(0, 1)[None] for state in (query, key, value)]
    expected = attend(*laid_out, scoring)[0].transpose(0, 1)
    slope = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * slope).sum(), (query, key, value))
    q, k, v = query.detach(), key.detach(), value.detach()
    output, log = nothing_yet(q, v)
    parts = [slice(0, 40), slice(40, 63), slice(63, 340)]
    if scoring.window is None:
        # All queries see the first keys, and those from 63 on are the last of the causal part.
        calls = [
            (slice(0, 300), parts[0], None),
            (slice(0, 23), parts[1], 0),
            (slice(23, 300), parts[1], None),
            (slice(23, 300), parts[2], 0),
        ]
    else:
        calls = [(slice(0, 300), part, 40 - part.start) for part in parts]
    for a, b, shift in calls:
        merge(output[a], log[a], *attend_partially(q[a], k[b], v[b], scoring, shift))
    torch.testing.assert_close(output, expected)
    sums = [torch.zeros_like(state) for state in (q, k, v)]
    for a, b, shift in calls:
        found = partial_gradients(*(q[a], k[b], v[b], scoring, shift, output[a], log[a], slope[a]))
        for total, place, part in zip(sums, (a, b, b), found, strict=True):
            total[place] += part
    for total, gradient in zip(sums, gradients, strict=True):
        torch.testing.assert_close(total, gradient)


def test_convolutions_fetch_the_tokens_before_a_piece() -> None:
    # packed   P P P P | P P P P | A B B B | B B B B     (A of one token, B of seven follow P)
    segments = segments_of(((8, None), (1, 0), (7, 0)))
    first, second = (ContextTree(segments, rank=rank, processes=2) for rank in (0, 1))
    tails = make_tails(first, 3, CPU)
    # Process 0 has P's first half and the end of B. It fetches the beginning of B, 3 tokens.
    assert tails.fetched == {1: 3}
    assert {rank: index.tolist() for rank, index in tails.sent.items()} == {1: [1, 2, 3]}
    # Process 1 has P's second half, A and the beginning of B, and fetches the tokens before P's.
    tails = make_tails(second, 3, CPU)
    assert tails.fetched == {0: 3}
    assert {rank: index.tolist() for rank, index in tails.sent.items()} == {0: [5, 6, 7]}


def test_a_group_divides_the_processes() -> None:
    with pytest.raises(ConfigError, match=r"distributed\.context_parallel=2"):
        ContextGroup(World(), 2)


@pytest.fixture(scope="module")
def gaps() -> Callable[[int, str], dict[str, float]]:
    """Differences of a family over some processes; all families of a number run together."""
    found: dict[int, dict[str, dict[str, float]]] = {}

    def result(processes: int, name: str) -> dict[str, float]:
        if processes not in found:
            names = NAMES[processes]
            found[processes] = torchrun("context_processes.py", *names, processes=processes)[0]
        return found[processes][name]

    return result


NAMES = {2: [*DENSE, *OTHERS], 4: [*DENSE[:4], *OTHERS, *MORE], 3: ["Qwen3", "Qwen3_5"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "name"), [(n, name) for n, names in NAMES.items() for name in names]
)
def test_several_processes_compute_what_one_does(
    processes: int, name: str, gaps: Callable[[int, str], dict[str, float]]
) -> None:
    """Trees, windows, soft caps, sinks, latent heads, experts, scans and convolutions."""
    found = gaps(processes, name)
    assert found["hidden"] <= (DENSE_HIDDEN if name in DENSE else HIDDEN)
    assert found["gradient"] <= (DENSE_GRADIENT if name in DENSE else GRADIENT)


@pytest.mark.slow
def test_what_is_sent_is_what_the_formula_says() -> None:
    found = torchrun("context_processes.py", "--bytes", processes=4)
    assert found[0]["sent"] == found[0]["formula"] > 0
    assert found[0]["logprobs"] == 259  # they come to the process that has the rollout


@pytest.mark.slow
def test_each_process_keeps_its_part_of_the_activations(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench" / "context_parallel.py"
    figures = tmp_path / "figures.json"
    subprocess.run([sys.executable, script, "--quick", "--json", figures], check=True)
    measured = json.loads(figures.read_text())
    assert measured["activations_over_share_2"] <= 1.25
    assert measured["activations_over_share_4"] <= 1.25
    assert measured["sent_over_formula_2"] == measured["sent_over_formula_4"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp-context-2", "fsdp2-context-2"])
def test_the_rollout_that_breaks_an_update_is_named(mode: str, tmp_path: Path) -> None:
    """It is the second process's, and the first one computes a part of its tokens."""
    found = torchrun("context_processes.py", "--blamed", mode, str(tmp_path / "crash"))[0]
    assert [culprits for _, *culprits in found["errors"]] == [["g1-2"], ["g1-2"]]


@pytest.mark.slow
def test_all_processes_refuse_a_model_that_one_computes_wrongly() -> None:
    """The second process's hidden states are wrong, and the first one's are right."""
    found = torchrun("context_processes.py", "--refused")
    errors = [found[rank]["error"] for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0].startswith("distributed.context_parallel=2: ")


def test_the_layout_of_the_packing_tests_is_cut_whole() -> None:
    segments = segments_of(TREE)
    tree = ContextTree(segments, rank=0, processes=4)
    places = [
        place
        for rank in range(4)
        for place in ContextTree(segments, rank=rank, processes=4).packed_positions().tolist()
    ]
    assert sorted(places) == list(range(segments[-1].end))
    assert max(tree.counts) - min(tree.counts) <= 2
