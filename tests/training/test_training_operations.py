"""Operations of a model over packed tokens, by numbers computed by hand; the work of a step."""

from __future__ import annotations

import pytest
import tiny
import torch
from training_cases import policy, rollout
from transformers import Qwen3Config, Qwen3ForCausalLM

from agenttrain.tracking.cards import PEAK_TFLOPS, peak_tflops
from agenttrain.trainer import train_policy
from agenttrain.training.operations import (
    Operations,
    StepWork,
    WorkCounter,
    count_operations,
    work_metrics,
)
from agenttrain.training.segments import Segment, one_after_the_other
from agenttrain.types import Origin

PROMPT = Segment(0, 3)
TREE = (PROMPT, Segment(3, 2, PROMPT), Segment(5, 1, PROMPT))
"""Two sequences, of 5 and 4 tokens, that share their first three.

keys seen by each token   prompt 1 2 3   first 4 5   second 4
"""


def qwen(**changes: object) -> Qwen3ForCausalLM:
    """One layer: hidden 8, 2 heads of 4, 1 key head, MLP 16, vocabulary 10, its own head."""
    config = Qwen3Config(
        **{
            **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10},
            **{"tie_word_embeddings": False, **changes},
        }
    )
    return Qwen3ForCausalLM(config)


# q 8x8, k and v 8x4, o 8x8, q and k norm 4 each        64 + 32 + 32 + 64 + 8 = 200
# gate, up, down 8x16                                   3 x 128               = 384
# two norms of the layer, the last norm 8 each                                =  24
# head 10x8 (the embedding, 10x8, is looked up)                               =  80
WEIGHTS = 688


def test_a_shared_prefix_counts_once_and_keys_causally() -> None:
    counted = count_operations(qwen())
    assert (counted.trained, counted.frozen, counted.widths) == (WEIGHTS, 0, {None: 8})
    keys = 1 + 2 + 3 + 4 + 5 + 4
    # 2 N per token; 2 products of 2 operations for each key and channel
    assert counted.forward(6, TREE) == 2 * 688 * 6 + 4 * 8 * keys
    assert counted.training(6, TREE) == 6 * 688 * 6 + 3.5 * 4 * 8 * keys
    # Without sharing: 5 + 4 tokens, 15 + 10 keys.
    assert counted.training(9, one_after_the_other([5, 4])) == 6 * 688 * 9 + 3.5 * 4 * 8 * 25


def test_a_window_limits_the_keys() -> None:
    counted = Operations(trained=0, frozen=0, widths={None: 1, 2: 3})
    keys, in_window = 19, 1 + 2 + 2 + 2 + 2 + 2
    assert counted.forward(6, TREE) == 4 * (keys + 3 * in_window)


def test_layers_of_a_config_have_their_windows() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model = qwen(num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=64)
    assert count_operations(model).widths == {None: 8, 64: 16}


def test_a_tied_embedding_is_the_head() -> None:
    assert count_operations(qwen(tie_word_embeddings=True)).trained == WEIGHTS


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = qwen()
    model.model.layers[0].mlp.requires_grad_(False)
    counted = count_operations(model)
    assert (counted.trained, counted.frozen) == (WEIGHTS - 384, 384)
    assert counted.training(1, ()) == 6 * 304 + 4 * 384


def test_of_experts_those_that_a_token_is_routed_to_count() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{"hidden_size": 8, "num_hidden_layers": 1, "head_dim": 4, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": False},
        **{"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    )
    # The router 8x4, and one expert of the four in place of the MLP.
    assert count_operations(Qwen3MoeForCausalLM(config)).trained == WEIGHTS + 32


def test_a_step_counts_its_passes() -> None:
    """Two answers of 2 and 1 tokens to one prompt of 3; the last token of each is computed too."""
    group = [
        rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [20, 2])], sample=0, reward=1.0),
        rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [2])], sample=1, reward=0.0),
    ]
    model = tiny.model()
    counted = count_operations(model)
    learner = policy(model, training={"share_prefix": "always"})
    train_policy(learner, [group])
    work = learner.take_work()
    assert (work.computed_tokens, work.trained_tokens) == (6, 3)
    assert work.operations == counted.training(6, TREE)
    assert (work.peak_tflops, work.peak_gb) == (None, None)  # there is no card
    assert learner.take_work() == StepWork()


def test_passes_of_the_reference_count_forward_only() -> None:
    group = [
        rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [20, 2])], sample=n, reward=float(n))
        for n in range(2)
    ]
    model = tiny.model()
    counted = count_operations(model)
    settings = {"kl": {"beta": 0.1}}
    learner = policy(model, algorithm=settings, training={"share_prefix": "never"})
    train_policy(learner, [group])
    alone = one_after_the_other([5, 5])
    work = learner.take_work()
    assert work.operations == counted.training(10, alone) + counted.forward(10, alone)
    assert (work.computed_tokens, work.trained_tokens) == (20, 4)


class Allocator:
    """torch's allocator of a GPU, as far as it counts its peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.hold(0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")

    def hold(self, most: int, then: int | None = None) -> None:
        """Hand out `most` bytes, of which `then` stay."""
        self.peak = max(self.peak, most) if most else self.allocated
        self.allocated = self.allocated if then is None else then


def test_the_peak_of_the_updates_is_not_that_of_rollouts_or_syncs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch)
    counter = WorkCounter(count_operations(tiny.model()), torch.device("cuda"))
    allocator.hold(9_000_000_000, then=1_000_000_000)  # rollouts
    counter.begin_update()
    allocator.hold(7_000_000_000, then=2_000_000_000)
    assert counter.end_update() == 7_000_000_000
    allocator.hold(8_000_000_000, then=2_000_000_000)  # the weight sync
    work = counter.take()
    assert (work.peak_gb, work.update_peak_gb) == (9.0, 7.0)
    counter.begin_update()  # a step that allocates nothing
    assert counter.end_update() == 2_000_000_000
    assert work_metrics([counter.take(), work], 2.0).items() >= {
        ("perf/peak_gb", 9.0),
        ("perf/update_peak_gb", 7.0),
    }


def test_utilisation_is_of_all_cards_together() -> None:
    # 30e12 + 10e12 operations in 2 seconds on cards that could do 2 x (50e12 + 30e12)
    works = [
        StepWork(operations=30e12, peak_tflops=50.0, trained_tokens=3, computed_tokens=9),
        StepWork(operations=10e12, peak_tflops=30.0, trained_tokens=1, computed_tokens=5),
    ]
    assert work_metrics(works, 2.0) == {
        "tokens/trained": 4.0,
        "tokens/computed": 14.0,
        "perf/mfu": 0.25,
    }
    assert "perf/mfu" not in work_metrics([*works, StepWork(operations=1.0)], 2.0)
    gpus = [StepWork(peak_gb=61.0), StepWork(peak_gb=63.5)]
    assert work_metrics(gpus, 2.0)["perf/peak_gb"] == 63.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_card_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_every_card_finds_itself() -> None:
    assert {name: peak_tflops(name) for name in PEAK_TFLOPS} == PEAK_TFLOPS
