"""Log-probabilities and entropies of sampled tokens, without a logit anywhere else.

Hidden states are gathered at the positions whose next token was sampled, and only they meet the
language-model head. Shapes: T all tokens of a microbatch, S sampled tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttrain.training.attention import packing
from agenttrain.training.batch import Microbatch
from agenttrain.training.hidden import packed_hidden, separate_hidden, why_not_packed
from agenttrain.types import AgenttrainError

LOGIT_BYTES = 4
"""Of a logit in fp32, in which they are normalised."""
MEGABYTE = 2**20


class UnsupportedModel(AgenttrainError):
    """The model cannot be trained here; the message says why and what can."""


class Scorer(nn.Module):
    """Microbatch -> (logprobs_S, entropy_S), both fp32; the entropy carries no gradient.

    A module, so that accelerate can wrap what is called. A model whose attention or layers cannot
    be packed runs one forward pass per rollout, and a warning says so.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, logits_budget_mb: int
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.logits_budget_mb = logits_budget_mb
        check_head(model)
        reason = why_not_packed(model)
        self.packed = reason is None
        if reason is not None:
            warnings.warn(
                f"{type(model).__name__} is trained with one forward pass per rollout: {reason}.",
                stacklevel=2,
            )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Within, `forward` may be called; backward passes belong inside too."""
        training = self.model.training
        # Dropout would make the policy another than the one that sampled.
        self.model.eval()
        _wake_checkpointed(self.model)
        try:
            if self.packed:
                with packing(self.model):
                    yield
            else:
                yield
        finally:
            self.model.train(training)

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability of every sampled token and entropy where it was sampled, [S] each."""
        hidden = packed_hidden if self.packed else separate_hidden
        hidden_TH = hidden(self.model, microbatch.token_ids_T, microbatch.bounds)
        return head_logprobs(
            hidden_TH[microbatch.targets_S],
            self.model.get_output_embeddings(),
            microbatch.labels_S,
            temperature=self.temperature,
            logits_budget_mb=self.logits_budget_mb,
        )


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make the model's layers recompute themselves in the backward pass.

    Raises UnsupportedModel for a model that cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise UnsupportedModel(
            f"training.gradient_checkpointing=true: {type(model).__name__} cannot; set it to false"
        )
    # Renamed in transformers 5.23.
    older = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def _wake_checkpointed(model: PreTrainedModel) -> None:
    """Layers recompute only in training mode; what is in them (dropout) stays in eval mode."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True


def head_logprobs(
    hidden_SH: Tensor,
    head: nn.Module,
    labels_S: Tensor,
    *,
    temperature: float,
    logits_budget_mb: int,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature) at the labels, and the entropies, [S] each.

    Logits beyond the budget are computed in chunks, and once more in the backward pass; within it
    they are kept.
    """
    vocabulary = head.get_parameter("weight").shape[0]
    chunk = max(1, logits_budget_mb * MEGABYTE // (vocabulary * LOGIT_BYTES))
    if labels_S.numel() <= chunk:
        return _head_logprobs(hidden_SH, head, labels_S, temperature)
    parts = [
        checkpoint(_head_logprobs, hidden, head, labels, temperature, use_reentrant=False)
        for hidden, labels in zip(hidden_SH.split(chunk), labels_S.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _head_logprobs(
    hidden_SH: Tensor, head: nn.Module, labels_S: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs_SV = (head(hidden_SH).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_S = torch.special.entr(logprobs_SV.exp()).sum(-1)
    return logprobs_SV.gather(-1, labels_S[:, None])[:, 0], entropy_S


def check_head(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if the model does more to its logits than its head does.

    Caps and scales between the head and the logits would be lost here, silently.
    """
    token_ids_T = torch.arange(4, device=model.device)
    with torch.no_grad():
        logits_TV = model(input_ids=token_ids_T[None], use_cache=False).logits[0]
        hidden_TH = separate_hidden(model, token_ids_T, (0, 4))
        bare_TV = model.get_output_embeddings()(hidden_TH)
    gap = (logits_TV - bare_TV).abs().max().item()
    if not gap <= 1e-2 * logits_TV.abs().max().item():
        raise UnsupportedModel(
            f"model.path: {type(model).__name__} changes its logits after the language-model head "
            f"(by up to {gap:.3g}; a cap or a scale), which training does not do yet. Choose a "
            "model without one."
        )
