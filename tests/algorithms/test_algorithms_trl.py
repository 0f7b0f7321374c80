"""Our losses beside those that the pinned TRL computes, live, on random numbers.

TRL's `_compute_loss` runs as it is. Its trainer is made without `__init__` (which would load a
model and data); what the method reads is set on it: a real GRPOConfig and Accelerator, a module
whose `training` is true, and `_get_per_token_logps_and_entropies`, bound to numbers that we draw in
place of a model's. `importance_sampling_ratio`, which TRL computes while it samples, is an input
and computed here.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from loss_cases import Padded, Update, clip, config, loss_and_gradient

from agenttrain.algorithms.config import (
    Aggregation,
    AlgorithmConfig,
    Behaviour,
    CorrectionLevel,
    CorrectionMode,
)
from agenttrain.algorithms.objectives.config import build_objective

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None, reason="pip install 'agenttrain[test]' brings TRL 1.16"
)

B, T, ACCUMULATED, LONGEST = 6, 9, 3, 16


@cache
def trl() -> SimpleNamespace:
    """Import TRL's classes, which takes seconds, when a test runs and not when it is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOConfig, GRPOTrainer
    return SimpleNamespace(GMPOTrainer=GMPOTrainer, GRPOConfig=GRPOConfig, GRPOTrainer=GRPOTrainer)


def draw(seed: int) -> Padded:
    """Rollouts of different lengths with a tool's tokens inside, of two advantages' signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, T, generator=generator, dtype=torch.float64)

    new = -normal(1.0).abs()
    old = new + normal(0.3)
    mask = torch.ones(B, T, dtype=torch.long)
    for row in range(B):
        mask[row, 2 + int(torch.randint(0, T - 2, (), generator=generator)) :] = 0
    mask[0] = torch.tensor([1, 1, 0, 0, 1, 1, 0, 1, 0])
    return Padded(
        new=new,
        old=old,
        mask=mask,
        advantages=normal(1.0)[:, 0],
        ref=new + normal(0.2),
        engine=old + normal(0.1),
        entropy=normal(1.0).abs().float().double(),  # TRL takes the quantile in single precision
    )


def trainer(cls: type, tmp_path: object, batch: Padded, new: torch.Tensor, **arguments: object):
    """TRL's trainer with what `_compute_loss` reads, and fixed log-probabilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = trl().GRPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, **arguments)
    made = cls.__new__(cls)
    vars(made).update(
        args=args,
        accelerator=Accelerator(cpu=True),
        model=torch.nn.Linear(1, 1).train(),
        aux_loss_enabled=False,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high if args.epsilon_high is not None else args.epsilon,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=ACCUMULATED,
        max_completion_length=LONGEST,
        use_adaptive_entropy=False,
        entropy_coef=args.entropy_coef,
        _entropy_bonus_enabled=args.entropy_coef > 0,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    made._get_per_token_logps_and_entropies = lambda *_, **__: (new, batch.entropy, None)
    return made


def of_trl(tmp_path: object, batch: Padded, ratio: torch.Tensor | None = None, **arguments: object):
    """Loss, gradient and metrics of TRL on `batch`."""
    new = batch.new.clone().requires_grad_()
    cls = getattr(trl(), str(arguments.pop("cls", "GRPOTrainer")))
    made = trainer(cls, tmp_path, batch, new, **{"beta": 0.0, **arguments})
    made.use_vllm = ratio is not None
    prompt = torch.ones(B, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T, dtype=torch.long),
        "tool_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "sampling_per_token_logps": batch.engine,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": ratio,
    }
    loss = made._compute_loss(SimpleNamespace(), inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    means = {name: values[0] for name, values in made._metrics["train"].items()}
    return loss.item(), gradient, means


SEQUENCE = Aggregation.sequence_mean
# our settings, and TRL's arguments
CASES: dict[str, tuple[AlgorithmConfig, dict]] = {
    "grpo": (config(aggregation=SEQUENCE), {"loss_type": "grpo"}),
    "grpo_kl": (
        config(aggregation=SEQUENCE, kl={"beta": 0.3, "bias_correction": True}),
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "bnpo": (
        config(objective=clip(high=0.3)),
        {"loss_type": "bnpo", "epsilon_high": 0.3},
    ),
    "bnpo_dual": (
        config(objective=clip(dual=1.5), kl={"beta": 0.1}),
        {"loss_type": "bnpo", "delta": 1.5, "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "dr_grpo": (config(aggregation=Aggregation.fixed_length), {"loss_type": "dr_grpo"}),
    "gspo": (
        config(
            aggregation=SEQUENCE,
            objective=clip(ratio="sequence_mean", low=0.01, high=0.02),
        ),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.01,
            "epsilon_high": 0.02,
        },
    ),
    "luspo": (
        config(aggregation=Aggregation.sequence_sum, objective=clip(ratio="sequence_mean")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "dapo": (
        config(objective=clip(high=0.28)),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "cispo": (
        config(objective=build_objective("cispo", high=0.1)),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "cispo_sequence": (
        config(objective=build_objective("cispo", ratio="sequence_mean", high=0.02)),
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.02},
    ),
    "sapo": (
        config(objective=build_objective("sapo", tau_pos=0.5, tau_neg=2.0), aggregation=SEQUENCE),
        {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
    ),
    "vespo": (
        config(objective=build_objective("vespo", k_pos=1.5, lambda_neg=1.25)),
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.25},
    ),
    "off_policy_mask": (
        config(off_policy_threshold=0.05),
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    ),
    "top_entropy": (config(top_entropy=0.25), {"loss_type": "dapo", "top_entropy_quantile": 0.25}),
    "entropy_bonus": (config(entropy={"bonus": 0.1}), {"loss_type": "dapo", "entropy_coef": 0.1}),
    "gmpo": (
        config(
            objective=build_objective("geometric_mean", low=0.1, high=0.2), aggregation=SEQUENCE
        ),
        {"cls": "GMPOTrainer", "epsilon": 0.1, "epsilon_high": 0.2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(name: str, seed: int, tmp_path) -> None:
    settings, arguments = CASES[name]
    batch = draw(seed)
    check(settings, batch, of_trl(tmp_path, batch, **dict(arguments)))


@pytest.mark.parametrize("mode", CorrectionMode)
@pytest.mark.parametrize("level", [CorrectionLevel.token, CorrectionLevel.sequence])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_engine_correction_is_that_of_trl(level, mode, loss_type, tmp_path) -> None:
    batch = draw(7)
    difference = (batch.old - batch.engine) * batch.mask
    if level is CorrectionLevel.sequence:
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    low, high = 0.9, 1.1
    if mode is CorrectionMode.truncate:
        ratio = ratio.clamp(low, high)
    else:
        ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    settings = config(
        objective=build_objective("vespo" if loss_type == "vespo" else "clip"),
        behaviour=Behaviour.recomputed,
        correction={"level": level, "mode": mode, "min": low, "max": high},
    )
    expected = of_trl(tmp_path, batch, ratio, loss_type=loss_type)
    check(settings, batch, expected)


def check(settings: AlgorithmConfig, batch: Padded, expected: tuple) -> None:
    tokens = int(batch.mask.sum())
    update = Update(
        # TRL's dapo: items / processes * accumulated / steps per generation, of which there is 1
        tokens=tokens * ACCUMULATED,
        rollouts=B * ACCUMULATED,
        fixed_length=LONGEST,
        bonus=settings.entropy.bonus / (tokens * ACCUMULATED),
    )
    loss, gradient, means = loss_and_gradient(batch, settings, update)
    expected_loss, expected_gradient, expected_means = expected
    assert loss == pytest.approx(expected_loss, abs=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=0)
    assert gradient[batch.mask == 0].abs().max() == 0
    assert gradient.abs().max() > 1e-3
    shared = {name: expected_means[name] for name in means if name in expected_means}
    assert {n: means[n] for n in shared} == pytest.approx(shared, abs=1e-6)
