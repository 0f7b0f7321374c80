"""Routers of experts: found by a forward pass, their choices recorded by the engine."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from packing_families import FAMILIES, tiny_family
from plain_routes import plain_routes
from recurrent_families import RECURRENT, family_params, tiny_recurrent
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedModel

from agenttrain.engines.config import Sampling
from agenttrain.engines.routers import (
    UnknownRouters,
    check_experts,
    find_routers,
)
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.types import Completion, Origin, Routes, Trajectory

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
LAYERS = {
    # family: (layers, those with experts)
    "Qwen2Moe": (2, [0, 1]),
    "Qwen3Moe": (2, [0, 1]),
    "Mixtral": (2, [0, 1]),
    "Olmoe": (2, [0, 1]),
    "GptOss": (2, [0, 1]),
    "DeepseekV3": (2, [1]),
    "Glm4Moe": (2, [1]),
    "Qwen3_5Moe": (2, [0, 1]),
    "Qwen3Next": (2, [0, 1]),
    "Lfm2Moe": (2, [1]),
    "GraniteMoeHybrid": (2, [0, 1]),
    "NemotronH": (3, [1]),
}


def model_of(name: str) -> PreTrainedModel:
    if name == "Olmoe":
        torch.manual_seed(0)
        model = OlmoeForCausalLM(OlmoeConfig(**SMALL, pad_token_id=0)).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.3)
        return model
    return tiny_recurrent(name) if name in RECURRENT else tiny_family(name)


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(count)]


@pytest.mark.parametrize("name", family_params(LAYERS))
def test_routers_are_found_by_shape(name: str) -> None:
    routers = find_routers(model_of(name))
    layers, with_experts = LAYERS[name]
    assert (routers.layers, routers.top_k) == (layers, 2)
    assert [router.layer for router in routers.routers] == with_experts


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Lfm2"])
@pytest.mark.parametrize("refuse", [find_routers, check_experts])
def test_a_dense_model_is_refused(name: str, refuse) -> None:
    with pytest.raises(UnknownRouters) as refused:
        refuse(model_of(name))
    text = str(refused.value)
    assert text.startswith("algorithm.router_replay=rollout: ")
    assert "algorithm.router_replay=off" in text


def test_weights_of_other_modules_are_no_experts() -> None:
    """A class token or positions of an encoder are weights of three dimensions too."""
    model = model_of("Qwen3").to("meta")
    model.class_token = torch.nn.Parameter(torch.empty(1, 1, 8, device="meta"))
    with pytest.raises(UnknownRouters, match="has no layer that chooses experts"):
        check_experts(model)


@pytest.mark.parametrize("name", family_params(LAYERS))
def test_experts_are_seen_without_weights(name: str) -> None:
    check_experts(model_of(name).to("meta"))


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    """Phi-MoE's takes the maximum twice, and calls no `topk`."""
    with pytest.raises(UnknownRouters, match="experts whose router is not found"):
        find_routers(tiny_family("Phimoe"))


def test_routers_that_choose_alike_are_told_apart() -> None:
    """With weights of zero all experts are equal, and every layer takes the same ones."""
    model = tiny_family("Qwen3Moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    assert [router.layer for router in find_routers(model).routers] == [0, 1]


class Constant(torch.nn.Module):
    """A router whose weights do not follow the experts that it returns."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = hidden_states.reshape(-1, hidden_states.shape[-1])[:, :4]
        _, experts = torch.topk(scores, 2, dim=-1)
        weights = scores.softmax(-1).sort(-1, descending=True).values[:, :2]
        return scores, weights, experts


def test_weights_that_do_not_follow_are_refused() -> None:
    model = tiny_family("Qwen3Moe")
    model.model.layers[1].mlp.gate = Constant()
    with pytest.raises(UnknownRouters, match="does not weigh"):
        find_routers(model)


@pytest.mark.parametrize(
    "name", family_params(["Qwen3Moe", "Mixtral", "Olmoe", "GptOss", "Qwen3_5Moe", "Lfm2Moe"])
)
def test_the_engine_returns_the_experts_of_each_sampled_token(name: str) -> None:
    """Those of the position before it, over ragged prompts, turns and copied prefixes."""
    model = model_of(name)
    system = ids_of(1, 20)
    prompts = {"a": ids_of(2, 3), "b": [*system, 5, 6], "c": [*system, 5, 6], "d": [*system, 9]}

    async def converse(engine: TransformersEngine, session: str) -> list[tuple]:
        ids, log = list(prompts[session]), []
        for turn, reply in enumerate((ids_of(7, 1), ids_of(8, 5))):
            sampling = Sampling(max_tokens=4 + turn, seed=len(session) + turn)
            completion = await engine.generate(ids, sampling, session=session)
            log.append((len(ids), completion))
            ids += [*completion.token_ids, *reply]
        return [(ids, *entry) for entry in log]

    async def run() -> list[list[tuple]]:
        engine = TransformersEngine(model, TransformersSettings(max_rows=3), record_routes=True)
        try:
            return await asyncio.gather(*(converse(engine, session) for session in prompts))
        finally:
            await engine.aclose()

    for log in asyncio.run(run()):
        for ids, start, completion in log:
            expected_TLK = plain_routes(model, ids)
            count = len(completion.token_ids)
            routes = completion.routes
            assert routes.tokens == count
            recorded = torch.frombuffer(bytearray(routes.experts), dtype=torch.int16).long()
            recorded_TLK = recorded.view(count, routes.layers, routes.top_k)
            expected = expected_TLK[start - 1 : start - 1 + count]
            assert recorded_TLK.sort(-1).values.equal(expected.sort(-1).values)


def test_an_evaluation_in_the_same_batch_gets_no_experts() -> None:
    """The requests of training beside it, and those that join it later, get theirs."""

    async def run() -> tuple[list[Completion], list[Completion]]:
        settings = TransformersSettings(max_rows=4)
        engine = TransformersEngine(tiny_family("Qwen3Moe"), settings, record_routes=True)

        async def ask(session: str, tokens: int, routes: bool) -> Completion:
            sampling = Sampling(max_tokens=tokens, seed=tokens, routes=routes)
            return await engine.generate([5, 6, 7], sampling, session=session)

        try:
            first = await ask("evaluated alone", 5, False)
            both = await asyncio.gather(ask("evaluated", 5, False), ask("trained", 6, True))
            return [first, both[0]], [both[1], await ask("trained alone", 6, True)]
        finally:
            await engine.aclose()

    evaluated, trained = asyncio.run(run())
    assert [completion.routes for completion in evaluated] == [None, None]
    assert trained[0].routes == trained[1].routes
    assert trained[0].routes.tokens == len(trained[0].token_ids)


def test_without_the_setting_no_experts_are_returned() -> None:
    async def run() -> Completion:
        engine = TransformersEngine(tiny_family("Qwen3Moe"), TransformersSettings(max_rows=1))
        try:
            return await engine.generate([5, 6], Sampling(max_tokens=2), session="a")
        finally:
            await engine.aclose()

    assert asyncio.run(run()).routes is None


def test_a_completion_of_two_versions_has_the_routes_of_each_span() -> None:
    # Three tokens, two layers, one expert in each: [[1, 2], [3, 4], [5, 6]].
    routes = Routes(experts=bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]), layers=2, top_k=1)
    trajectory = Trajectory(rollout_id="r")
    trajectory.append_context([7, 8], Origin.prompt)
    completion = Completion(
        token_ids=(9, 10, 2),
        logprobs=(-1.0, -2.0, -3.0),
        finish="stop",
        versions=((0, 1), (1, 2)),
        routes=routes,
    )
    trajectory.append_sampled(completion, [7, 8])
    first, second = trajectory.sampled_spans()
    assert first.routes.experts == bytes([1, 0, 2, 0])
    assert second.routes.experts == bytes([3, 0, 4, 0, 5, 0, 6, 0])
    assert Routes.join([first.routes, second.routes]) == routes


def test_all_families_are_known_here() -> None:
    assert set(LAYERS) <= {*FAMILIES, *RECURRENT, "Olmoe"}
