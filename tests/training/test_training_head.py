"""Log-probabilities under a head: against full logits, finite differences, and their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from agenttrain.training import head as head_module
from agenttrain.training.head import LogitTransform, linear_logprobs
from agenttrain.training.logprobs import head_logprobs

PLAIN = LogitTransform()
TRANSFORMS = {
    "plain": PLAIN,
    "temperature": LogitTransform(temperature=0.7),
    "scaled": LogitTransform(temperature=1.3, scale=0.25),
    "capped": LogitTransform(temperature=0.7, scale=2.0, softcap=3.0),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 3 tokens and 4 entries, so that small inputs have several of each."""
    monkeypatch.setattr(head_module, "CPU_TILE", (3, 12))


def reference(hidden, weight, bias, labels, transform, dtype=torch.float64):
    logits = transform(hidden.to(dtype) @ weight.to(dtype).T + (0 if bias is None else bias))
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_those_of_finite_differences(
    name: str, keep: bool, small_tiles: None
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 3), (10, 3), (10,))
    ]
    labels = torch.tensor([0, 9, 4, 3, 8, 1, 7])

    def both(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
        return linear_logprobs(
            hidden, weight, bias, labels, TRANSFORMS[name], keep=keep, entropy_grad=True
        )

    assert torch.autograd.gradcheck(both, inputs)
    for found, expected in zip(
        both(*inputs), reference(*inputs, labels, TRANSFORMS[name]), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-12)


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 600),
    vocabulary=st.integers(2, 5000),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    budget=st.sampled_from([0, 1024]),
    entropy=st.booleans(),
)
def test_chunked_is_full(
    tokens: int, vocabulary: int, scale: float, budget: int, entropy: bool
) -> None:
    """Against float64, from flat to one-hot distributions, kept and computed again."""
    torch.manual_seed(tokens)
    head = nn.Linear(8, vocabulary)
    hidden = (scale * torch.randn(tokens, 8)).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    found = head_logprobs(
        hidden, head, labels, transform=PLAIN, logits_budget_mb=budget, entropy_grad=entropy
    )
    parameters = (hidden, head.weight, head.bias)
    expected = reference(*parameters, labels, PLAIN)
    weights = torch.randn(tokens)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is torch.float32
        assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert found[1].requires_grad is entropy
    terms = 2 if entropy else 1
    grads = [
        torch.autograd.grad(sum((weights * part).sum() for part in parts[:terms]), parameters)
        for parts in (found, expected)
    ]
    # Where the label has nearly all the probability, 1 - p is rounding, in any fp32 softmax.
    rounding = 2e-6 * hidden.abs().max()
    for got, wanted in zip(*grads, strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max() + rounding


def test_a_frozen_head_gets_no_gradient() -> None:
    head = nn.Linear(8, 50).requires_grad_(False)
    hidden = torch.randn(5, 8, requires_grad=True)
    logprobs, _ = head_logprobs(hidden, head, torch.arange(5), transform=PLAIN, logits_budget_mb=1)
    logprobs.sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


class Adapted(nn.Module):
    """A head that is more than its weight, as LoRA makes one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 50, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


@pytest.mark.parametrize("chunk", [50, 10**6])
def test_a_head_that_is_a_module_of_its_own_is_called(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agenttrain.training.logprobs.CHUNK_LOGITS", chunk)
    torch.manual_seed(0)
    head = Adapted(nn.Linear(8, 50))
    merged = head.base.weight + head.up.weight @ head.down.weight
    hidden, labels = torch.randn(9, 8, requires_grad=True), torch.arange(9)
    transform = TRANSFORMS["capped"]
    found = head_logprobs(
        hidden, head, labels, transform=transform, logits_budget_mb=1, entropy_grad=True
    )
    expected = reference(hidden, merged, head.base.bias, labels, transform, torch.float32)
    inputs = (hidden, *head.parameters())
    grads = [
        torch.autograd.grad(parts[0].sum() + parts[1].sum(), inputs, retain_graph=True)
        for parts in (found, expected)
    ]
    for got, wanted in [*zip(found, expected, strict=True), *zip(*grads, strict=True)]:
        assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_products_have_fp32_statistics(autocast: bool) -> None:
    """In bf16 the products are rounded (8 bits); what is summed over the vocabulary is not."""
    torch.manual_seed(0)
    head = nn.Linear(64, 3000, bias=False)
    hidden = torch.randn(300, 64)
    if not autocast:
        head, hidden = head.bfloat16(), hidden.bfloat16()
    hidden.requires_grad_()
    labels = torch.randint(3000, (300,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs, entropy = head_logprobs(hidden, head, labels, transform=PLAIN, logits_budget_mb=0)
        logits = head(hidden).float()
    assert logprobs.dtype is entropy.dtype is torch.float32
    exact = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(logprobs, exact, atol=1e-4)
    logprobs.sum().backward()
    (wanted,) = torch.autograd.grad(exact.sum(), hidden)
    assert hidden.grad.dtype is hidden.dtype
    assert (hidden.grad - wanted).abs().max() <= 0.02 * wanted.abs().max()


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("tokens", "vocabulary"), [(300, 8000), (3000, 8000), (300, 80_000)])
def test_no_tensor_is_as_large_as_tokens_times_vocabulary(tokens: int, vocabulary: int) -> None:
    """Above the budget the largest is a tile or the weight's gradient, forward and backward."""
    head = nn.Linear(4, vocabulary, bias=False)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with Largest() as seen:
        logprobs, _ = head_logprobs(hidden, head, labels, transform=PLAIN, logits_budget_mb=0)
        logprobs.sum().backward()
    assert seen.elements == max(4 * vocabulary, 2**19 // 256 * 256)


def test_within_the_budget_the_logits_stand_in_memory_once() -> None:
    kept = []
    head = nn.Linear(4, 3000, bias=False)
    hidden = torch.randn(200, 4, requires_grad=True)
    labels = torch.zeros(200, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        for budget in (1, 1024):  # 200 x 3000 x 4 bytes = 2.3 MiB
            kept.clear()
            head_logprobs(hidden, head, labels, transform=PLAIN, logits_budget_mb=budget)
            logits = sum(numel for numel in kept if numel not in (800, 12_000, 200))
            assert logits == (0 if budget == 1 else 600_000)


def test_without_a_gradient_nothing_is_kept() -> None:
    head, hidden = nn.Linear(4, 30), torch.randn(5, 4)
    with torch.no_grad(), Largest() as seen:
        logprobs, entropy = head_logprobs(
            hidden, head, torch.arange(5), transform=PLAIN, logits_budget_mb=1
        )
    assert not logprobs.requires_grad and not entropy.requires_grad
    assert seen.elements == 150  # 5 x 30
