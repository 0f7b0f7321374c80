"""Packed as a tree, every recurrent family computes what it computes one rollout at a time."""

from __future__ import annotations

import sys
import types
from functools import partial

import pytest
import torch
import transformers
from packing_families import SMALL
from recurrent_families import (
    DELTA,
    RECURRENT,
    UNWRAPPED,
    enlarge,
    family_params,
    tiny_recurrent,
)

from agenttrain.engines.mixers import ADAPTERS, is_kernel, reference
from agenttrain.training.attention import packing
from agenttrain.training.config import ActivationCheckpointing, LoraSettings
from agenttrain.training.logprobs import (
    UnsupportedModel,
    check_head,
    packed_hidden,
    separate_hidden,
    why_not_packed,
)
from agenttrain.training.lora import add_lora
from agenttrain.training.recomputation import recomputed_modules, recomputing
from agenttrain.training.recurrent import RecurrentTree, make_halo, make_waves
from agenttrain.training.segments import Segment, packed_positions

CPU = torch.device("cpu")
FAMILIES = family_params(RECURRENT)
ONE_OF_EACH = ("Qwen3_5", "GraniteMoeHybrid", "Lfm2")
"""A delta rule, a Mamba2 and a short convolution."""


def tree(*lengths_and_parents: tuple[int, int | None]) -> tuple[Segment, ...]:
    """Segments one after the other, each with the index of its parent."""
    segments: list[Segment] = []
    for length, parent in lengths_and_parents:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, length, None if parent is None else segments[parent]))
    return tuple(segments)


LAYOUT = tree(
    (65, None),  # 0: alone
    (64, None),  # 1: a prompt of one chunk, itself a sequence
    (2, None),  # 2: a prompt shorter than the convolution
    (130, 1),  # 3: two chunks after the prompt
    (1, 1),  # 4: one token, with two branches
    (63, 2),  # 5
    (1, 2),  # 6
    (3, 4),  # 7: third level
    (1, 4),  # 8
)
IDS = torch.randint(3, 64, (LAYOUT[-1].end,), generator=torch.Generator().manual_seed(4))


def run(model: torch.nn.Module, *, packed: bool, layout: tuple[Segment, ...] = LAYOUT):
    """Hidden states, and every parameter's gradient of a weighted sum of them."""
    model.zero_grad()
    ids = IDS[: layout[-1].end]
    if packed:
        with packing(model):  # the backward pass too: checkpointed layers run there again
            hidden = packed_hidden(model, ids, layout)
            _weigh(hidden).backward()
    else:
        hidden = separate_hidden(model, ids, layout)
        _weigh(hidden).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients


def _weigh(hidden: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    return (hidden * weights).sum()


def assert_same(found, expected, *, gradients: float = 2e-4) -> None:
    """Equal up to 5e-5 in hidden states, and up to `gradients` in every parameter's gradient."""
    (hidden, slopes), (hidden_alone, slopes_alone) = found, expected
    assert (hidden - hidden_alone).abs().max() <= 5e-5 * hidden_alone.abs().max()
    assert slopes.keys() == slopes_alone.keys()
    for name, slope in slopes_alone.items():
        gap = (slopes[name] - slope).abs().max()
        assert gap <= gradients * slope.abs().max() + 1e-6, name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_tree_is_each_sequence_alone(name: str) -> None:
    model = tiny_recurrent(name)
    assert why_not_packed(model) is None
    check_head(model)
    random_state = torch.get_rng_state()
    expected = run(model, packed=False)
    assert_same(run(model, packed=True), expected)
    # Nothing random: recomputed modules keep no state of the generator.
    assert torch.get_rng_state().equal(random_state)


def test_text_of_a_model_that_sees_is_packed_as_a_tree() -> None:
    config = transformers.Qwen3_5Config(
        text_config={**SMALL, **DELTA},
        vision_config={
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            **{"out_hidden_size": SMALL["hidden_size"], "patch_size": 4},
        },
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    enlarge(model)
    assert why_not_packed(model) is None
    check_head(model)
    assert_same(run(model, packed=True), run(model, packed=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_gradient_passes_from_one_sequence_to_another(name: str) -> None:
    model = tiny_recurrent(name)
    layout = tree((5, None), (4, None), (2, 1), (1, 1), (3, 3))
    embeddings: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: embeddings.append(output.requires_grad_())
    )
    with packing(model):
        hidden = packed_hidden(model, IDS[: layout[-1].end], layout)
    for last in layout:
        own = packed_positions(last)
        slope = torch.autograd.grad(_weigh(hidden[own]), embeddings[0], retain_graph=True)[0][0]
        others = torch.ones(len(slope), dtype=torch.bool)
        others[own] = False
        assert slope[own].any(-1).all()
        assert not slope[others].any()


SHORT = tree((70, None), (66, None), (5, 1), (1, 1), (3, 3))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_checkpointed_layers_change_nothing(name: str) -> None:
    model = tiny_recurrent(name)
    expected = run(model, packed=False, layout=SHORT)
    with recomputing(recomputed_modules(model, ActivationCheckpointing.all)):
        assert_same(run(model, packed=True, layout=SHORT), expected)


def draw_adapters(model: torch.nn.Module) -> None:
    """Adapters start as zero: give each one an effect."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_get_the_gradients_of_each_sequence_alone(name: str) -> None:
    model = tiny_recurrent(name)
    add_lora(model, LoraSettings(rank=2))
    draw_adapters(model)
    expected = run(model, packed=False, layout=SHORT)
    assert expected[1] and all("lora_" in name for name in expected[1])
    assert_same(run(model, packed=True, layout=SHORT), expected)


def test_adapters_of_packed_experts_get_the_gradients_of_each_sequence_alone() -> None:
    model = tiny_recurrent("Qwen3_5Moe")
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    add_lora(model, LoraSettings(rank=2, targets=["q_proj"], target_parameters=experts))
    draw_adapters(model)
    expected = run(model, packed=False, layout=SHORT)
    assert sum("experts" in name for name in expected[1]) == 2 * 2 * 2  # layers, weights, A and B
    assert_same(run(model, packed=True, layout=SHORT), expected)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_repeat_to_the_bit(name: str, threads: int) -> None:
    model, before = tiny_recurrent(name), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hidden, gradients = run(model, packed=True)
        again, gradients_again = run(model, packed=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(hidden, again)
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", "Bamba"])
def test_logprobs_in_bfloat16_are_those_of_each_sequence_alone(name: str) -> None:
    model = tiny_recurrent(name).bfloat16()
    head = model.get_output_embeddings()
    with torch.no_grad():
        alone = head(separate_hidden(model, IDS, LAYOUT)).float().log_softmax(-1)
        with packing(model):
            packed = head(packed_hidden(model, IDS, LAYOUT)).float().log_softmax(-1)
    assert (packed - alone).gather(1, IDS[:, None]).abs().mean() <= 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_layout_the_wrapped_functions_are_the_original_ones(
    name: str, monkeypatch
) -> None:
    model = tiny_recurrent(name)
    assert why_not_packed(model) is None  # wraps them
    module = sys.modules[type(model).__module__]
    wrapped = {name: getattr(module, name) for name in ADAPTERS if hasattr(module, name)}
    scans = wrapped.keys() - {"causal_conv1d_fn"}
    assert "causal_conv1d_fn" in wrapped and (scans or name.startswith("Lfm"))
    hidden, gradients = run(model, packed=False, layout=SHORT)
    for function_name, function in wrapped.items():
        monkeypatch.setattr(module, function_name, function.function)
    original, original_gradients = run(model, packed=False, layout=SHORT)
    assert torch.equal(hidden, original)
    assert all(torch.equal(gradients[name], original_gradients[name]) for name in gradients)


@pytest.mark.parametrize("name", UNWRAPPED)
def test_a_family_whose_scan_takes_no_layout_is_refused(name: str) -> None:
    assert "hidden states differ" in (why_not_packed(tiny_recurrent(name)) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Qwen3Next", "torch_chunk_gated_delta_rule"),
        ("Lfm2", "causal_conv1d_fn"),
        ("Bamba", "mamba2_chunk_scan"),
    ],
)
def test_a_function_that_lost_its_layout_is_found(name, function, dtype, monkeypatch) -> None:
    model = tiny_recurrent(name).to(dtype)
    original = getattr(sys.modules[type(model).__module__], function)
    monkeypatch.setitem(
        ADAPTERS, function, lambda function, _, *args, **own: function(*args, **own)
    )
    monkeypatch.setattr(
        sys.modules[type(model).__module__], function, getattr(original, "function", original)
    )
    assert "packed, " in (why_not_packed(model) or "")


@pytest.mark.parametrize("lost", ["initial_state", "last_state"])
def test_a_state_without_a_gradient_beyond_a_chunk_is_found(lost: str, monkeypatch) -> None:
    """The scan is right forwards, and backwards up to the 64 tokens of a chunk."""
    model = tiny_recurrent("Qwen3_5")
    module = sys.modules[type(model).__module__]
    name = "torch_chunk_gated_delta_rule"
    function = getattr(module, name)
    original = getattr(function, "function", function)

    def scan(query, *arguments, initial_state=None, **keywords):
        is_long = query.shape[1] > 64
        if is_long and lost == "initial_state" and initial_state is not None:
            initial_state = initial_state.detach()
        output, state = original(query, *arguments, initial_state=initial_state, **keywords)
        is_lost = is_long and lost == "last_state" and state is not None
        return output, state.detach() if is_lost else state

    monkeypatch.setattr(module, name, scan)
    assert "its gradients differ by" in (why_not_packed(model) or "")


def test_the_trial_of_a_long_chunk_has_few_tokens_with_gradients() -> None:
    """Bamba's own chunk, of 256 tokens: a pass with gradients keeps all that is computed."""
    model = tiny_recurrent("Bamba", mamba_chunk_size=256)
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: tokens.append(inputs[0].numel() * torch.is_grad_enabled())
    )
    assert why_not_packed(model) is None
    # 9 + 6 + 2 + 1 + 258 + 5 in one pass, three times; alone each with all before it, in one pass:
    # 9 + 6 + 8 + 7 + 265 + 270
    assert sum(tokens) == 3 * 281 + 565


def test_a_kernel_with_wrong_gradients_stops_the_run(monkeypatch) -> None:
    """A package's convolution, right forwards, whose weight has half of its gradient."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    model = tiny_recurrent("Lfm2")
    module = sys.modules[type(model).__module__]
    code = reference(getattr(module.causal_conv1d_fn, "function", module.causal_conv1d_fn))

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        half = (weight + weight.detach()) / 2
        return code(x, half if package.is_wrong else weight, bias, activation)

    package = types.ModuleType("a_kernel_package")
    package.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, package.__name__, package)
    wrap = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", package.__name__)
    kernel = wrap(code)
    assert is_kernel(kernel) and not is_kernel(code)
    monkeypatch.setattr(module, "causal_conv1d_fn", kernel)
    package.is_wrong = False
    assert why_not_packed(model) is None
    package.is_wrong = True
    with pytest.raises(UnsupportedModel, match=r"for causal_conv1d_fn .*by 0\.5,"):
        why_not_packed(model)


# The example of `agenttrain.training.batch` and `agenttrain.training.recurrent`.
A, P, Q, S, T, U = EXAMPLE = tree((5, None), (3, None), (2, 1), (1, 1), (2, 2), (1, 2))


def test_the_extended_row_of_an_example() -> None:
    halo = make_halo(EXAMPLE, 3, CPU)
    shown = ["."] * len(halo.token_U)
    for column in (*halo.column_T.tolist(), *halo.copy_columns.tolist()):
        shown[column] = str(halo.token_U[column].item())
    # A: 0 … 4 | P: 5 6 7 | Q: 8 9 after 6 7 | S: 10 after 6 7 | T: 11 12 and U: 13 after 8 9
    assert " ".join(shown) == ". . 0 1 2 3 4 . . 5 6 7 6 7 8 9 6 7 10 8 9 11 12 8 9 13"
    assert halo.blank_columns.tolist() == [0, 1, 7, 8]
    assert halo.copied_tokens.tolist() == [6, 7, 8, 9]
    # Token 6 is copied to columns 12 and 16, the copies 0 and 2.
    assert halo.copies_of_tokens.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_halo_reaches_through_a_segment_that_is_shorter_than_the_convolution() -> None:
    layout = tree((1, None), (1, 0), (1, 1))
    halo = make_halo(layout, 4, CPU)
    # . . . 0 | . . 0 1 | . 0 1 2
    assert halo.blank_columns.tolist() == [0, 1, 2, 4, 5, 8]
    assert halo.token_U[halo.copy_columns].tolist() == [0, 0, 1]


def test_waves_of_an_example() -> None:
    waves = make_waves(EXAMPLE, None, CPU)
    # P has children, which start from its state; A would share no state with it.
    assert [wave.segments for wave in waves] == [(P,), (A,), (Q,), (S,), (T, U)]
    assert [wave.parents for wave in waves] == [(), (), (0,), (0,), (1, 1)]
    assert [wave.keeps for wave in waves] == [True, False, True, False, False]
    # At most three padded tokens of a call: T and U, padded to two, would be four.
    assert [wave.segments for wave in make_waves(EXAMPLE, 3, CPU)][-2:] == [(T,), (U,)]


def test_a_packed_tree_takes_no_cache() -> None:
    model = tiny_recurrent("Qwen3_5")
    cache = transformers.DynamicCache(config=model.config)
    call = partial(model.model, input_ids=IDS[None, :5], use_cache=True, past_key_values=cache)
    assert why_not_packed(model) is None
    with pytest.raises(ValueError, match="takes no cache"):
        call(recurrent=RecurrentTree(tree((5, None)), CPU))
