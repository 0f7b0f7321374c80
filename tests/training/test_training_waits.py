"""No operation of a microbatch makes a GPU and its host wait for each other.

Each operation counted here reads values of a tensor on the host, as `item` does, or has an output
whose shape depends on values, as a selection by mask does. On a GPU the host would wait until all
queued work is done, and then the GPU for the host.

Outside of a microbatch these remain, each once per step or update: the copies of the scores to the
host (`score_microbatches`, `store_scores`), the sums of counts over processes (`Policy.minibatch`),
the norm of the gradient and whether the loss is finite (`Policy.optimizer_step`), and the metrics'
values (`Averages.means`). Microbatches with images wait: `embed` counts the placeholders, and
transformers' encoders read the sizes of the images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from packing_families import tiny_family
from recurrent_families import tiny_recurrent
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import policy, rollout
from transformers import PreTrainedModel

from agenttrain.algorithms.config import Behaviour, CorrectionLevel, CorrectionMode
from agenttrain.algorithms.objectives.config import Ratio, build_objective
from agenttrain.trainer import compute_gradient
from agenttrain.training.config import SharePrefix
from agenttrain.training.credit_assignment import assign_advantages
from agenttrain.types import Completion, Finish, Origin, Rollout

READ_VALUES = (
    *("_local_scalar_dense", "nonzero", "nonzero_static", "bincount", "masked_select", "equal"),
    *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
)
"""Names of operations that read values on the host, or have a shape that depends on values."""
BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Names of operations that do so if an index is a mask."""


class Watch(TorchDispatchMode):
    """Collects the operations for which a GPU and its host would wait, and counts all."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        is_mask = name in BY_INDEX and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if is_mask or name in READ_VALUES:
            self.waits.append(str(function))
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_the_watch_sees_what_waits() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    with Watch() as watch:
        values[values > 1].sum().backward()
        values.sum().item()
        torch.arange(2).bincount()
        values.detach()[torch.tensor([True, False])] = 0.0
        values[torch.tensor([1])]  # positions do not
    assert watch.waits == [
        *("aten.index.Tensor", "aten.index_put.default", "aten._local_scalar_dense.default"),
        *("aten.bincount.default", "aten.index_put_.default"),
    ]


def answer(group: int, sample: int) -> Rollout:
    """A rollout of two turns, whose prompt its group shares."""
    return rollout(
        [
            (Origin.prompt, [7 + group, 8, 9, 10, 11]),
            (Origin.sampled, [20 + sample] * (2 + 3 * sample) + [2]),
            (Origin.tool, [40, 41]),
            (Origin.sampled, [22, 2]),
        ],
        group=f"g{group}",
        sample=sample,
        reward=float(sample % 2),
    )


def watched_microbatches(
    algorithm: dict, training: dict, model: PreTrainedModel | None = None
) -> Iterator[Watch]:
    """Yield the watch over each `compute_gradient` of a step of two groups."""
    trained = policy(model, algorithm=algorithm, training=training)
    groups = [[answer(group, sample) for sample in range(4)] for group in range(2)]
    # A second trajectory, so that a rollout has more tokens than each of its sequences.
    summary = groups[0][1].branch(0, 5, role="summary")
    done = Completion(
        token_ids=(23, 2), logprobs=(-5.0,) * 2, finish=Finish.stop, versions=((0, 2),)
    )
    summary.append_sampled(done, summary.token_ids)
    sequences = trained.score(groups)
    assign_advantages(
        groups, trained.algorithm, trained.world, penalties={}, reward_weights={"reward": 1.0}
    )
    trained.begin_step()
    with trained.ready():
        for minibatch in trained.minibatches(sequences):
            for microbatch in trained.microbatches(minibatch):
                with Watch() as watch:
                    inputs, loss, _ = compute_gradient(trained, minibatch, microbatch)
                minibatch.record(microbatch, inputs, loss)
                yield watch
            trained.optimizer_step(minibatch)


RECOMPUTED = {"behaviour": Behaviour.recomputed, "minibatches": 2}
CORRECTED = {
    **RECOMPUTED,
    "correction": {"level": CorrectionLevel.token, "mode": CorrectionMode.mask, "max": 2.0},
    "kl": {"beta": 0.1},
}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"minibatches": 2},
        CORRECTED,
        {**RECOMPUTED, "top_entropy": 0.5, "entropy": {"bonus": 0.1}, "off_policy_threshold": 0.1},
        {"minibatches": 2, "objective": build_objective("clip", ratio=Ratio.sequence_sum)},
    ],
    ids=["grpo", "correction and kl", "top entropy and masks", "ratios of rollouts"],
)
@pytest.mark.parametrize("share", [SharePrefix.always, SharePrefix.never])
def test_a_microbatch_waits_for_no_value(algorithm: dict, share: SharePrefix) -> None:
    watches = list(watched_microbatches(algorithm, {"share_prefix": share}))
    assert len(watches) == 2
    for watch in watches:
        assert watch.operations > 500  # forward and backward passes
        assert watch.waits == []


@pytest.mark.parametrize(
    "model",
    [
        *(partial(tiny_family, name) for name in ("Gemma3", "GptOss", "Qwen3Moe", "DeepseekV3")),
        *(partial(tiny_recurrent, name) for name in ("Qwen3_5", "Bamba", "Lfm2")),
    ],
    ids=lambda build: build.args[0],
)
def test_no_layer_of_a_model_waits(model: Callable[[], PreTrainedModel]) -> None:
    """Windows, sinks, experts, latent heads, scans and convolutions; computed again, too."""
    (watch,) = watched_microbatches({}, {"activation_checkpointing": "all"}, model())
    assert watch.operations > 500
    assert watch.waits == []


@pytest.mark.filterwarnings("ignore:Qwen3ForCausalLM is trained with one forward pass per rollout")
def test_passes_of_one_sequence_do_not_wait_either() -> None:
    model = tiny.model()
    # Each position sees a sum over those before it, also those of another rollout.
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.cumsum(1))
    (watch,) = watched_microbatches({}, {}, model)
    assert watch.operations > 500
    assert watch.waits == []
