"""Gradients of packed tokens that are selected several times."""

from __future__ import annotations

import pytest
import torch

from agenttrain.training import selection
from agenttrain.training.attention import make_varlen
from agenttrain.training.segments import Segment
from agenttrain.training.selection import Repeat, make_repeats

CPU = torch.device("cpu")


def test_a_token_gets_the_gradients_of_all_its_copies() -> None:
    repeats = make_repeats(torch.tensor([4, 6, 4]), CPU)
    tokens = torch.arange(7.0, requires_grad=True)
    selected = Repeat.apply(tokens, repeats)
    assert selected.tolist() == [4, 6, 4]
    selected.backward(torch.tensor([1.0, 10.0, 100.0]))
    assert tokens.grad.tolist() == [0, 0, 0, 0, 101, 0, 10]


def test_nothing_may_be_selected() -> None:
    tokens = torch.ones(2, 3, requires_grad=True)
    selected = Repeat.apply(tokens, make_repeats(torch.zeros(0, dtype=torch.long), CPU))
    assert selected.shape == (0, 3)
    selected.sum().backward()
    assert tokens.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def tree(children: int) -> tuple[Segment, ...]:
    """A prompt of 6 tokens with `children` after it, the first of which has one child of its own.

    A child has 3 tokens, and the child's child 2.
    """
    prompt = Segment(0, 6)
    branches = [Segment(6 + 3 * index, 3, prompt) for index in range(children)]
    return (prompt, *branches, Segment(6 + 3 * children, 2, branches[0]))


@pytest.mark.parametrize("children", [8, 64, 512])
def test_keys_of_a_prefix_get_their_gradient_rounded_once(children: int) -> None:
    """However many children attend to them: additions in bfloat16 would round each time."""
    segments = tree(children)
    keys = make_varlen(segments, CPU).keys
    key = torch.zeros(segments[-1].end, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    draw = torch.Generator().manual_seed(0)
    # Between 0.5 and 1.5, so that no sum is small against its terms.
    gradient = (torch.rand(len(keys.sources), 2, 4, generator=draw) + 0.5).bfloat16()
    Repeat.apply(key, keys).backward(gradient)
    exact = torch.zeros(key.shape, dtype=torch.float64)
    exact.index_add_(0, keys.sources, gradient.double())
    assert exact[:6].min() > 0.9 * children
    # Half of the last of 8 significant bits, and a little for the sum in float32.
    assert ((key.grad.double() - exact).abs() <= 1.001 * 2**-8 * exact).all()


@pytest.mark.parametrize("size", [90 * 3 * 4, 1])
def test_sums_are_complete_however_few_copies_are_laid_out_at_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens of the prompt at once, of 42 copies of 3 numbers of 4 bytes each, or one."""
    monkeypatch.setattr(selection, "SUMMED_BYTES", size)
    keys = make_varlen(tree(40), CPU).keys
    gradient = torch.randn(len(keys.sources), 3, generator=torch.Generator().manual_seed(1))
    key = torch.zeros(tree(40)[-1].end, 3, requires_grad=True)
    Repeat.apply(key, keys).backward(gradient)
    exact = torch.zeros(key.shape, dtype=torch.float64)
    exact.index_add_(0, keys.sources, gradient.double())
    torch.testing.assert_close(key.grad.double(), exact, rtol=1e-5, atol=1e-5)
