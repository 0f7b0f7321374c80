"""Experts of the rollouts in the trainer's forward pass (`algorithm.router_replay=rollout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from packing_families import tiny_family
from plain_routes import plain_routes
from recurrent_families import family_params, tiny_recurrent
from training_cases import TASK, policy
from transformers import PreTrainedModel

from agenttrain.algorithms.mismatch import route_mismatch
from agenttrain.engines.routers import UnknownRouters, find_routers
from agenttrain.runs.rollout_messages import CODEC
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.trainer import train_policy
from agenttrain.training.batch import MissingRoutes, TrainingSequence, make_sequences, pack
from agenttrain.training.config import ActivationCheckpointing, SharePrefix
from agenttrain.training.logprobs import (
    Scorer,
    UnsupportedModel,
    score_microbatches,
)
from agenttrain.training.policy import Policy
from agenttrain.types import Completion, Finish, Origin, Rollout, Routes

CPU = torch.device("cpu")
NAMES = ["Qwen3Moe", "Mixtral", "GptOss", "Qwen3_5Moe", "Lfm2Moe"]
RECURRENT = ("Qwen3_5Moe", "Lfm2Moe")
REPLAY = {"router_replay": "rollout"}


def model_of(name: str) -> PreTrainedModel:
    model = tiny_recurrent(name) if name in RECURRENT else tiny_family(name)
    assert isinstance(model, PreTrainedModel)
    return model


def routes_of(experts_TLK: torch.Tensor) -> Routes:
    _, layers, top_k = experts_TLK.shape
    experts = experts_TLK.to(torch.int16).numpy().astype("<u2").tobytes()
    return Routes(experts=experts, layers=layers, top_k=top_k)


def rollout(
    prompt: list[int],
    turns: list[tuple[list[int], list[int]]],
    experts_TLK: torch.Tensor | None,
    *,
    sample: int = 0,
    reward: float = 1.0,
) -> Rollout:
    """A rollout of turns (sampled ids, reply); `experts_TLK` [T, L, K] are those of all its ids."""
    grown = Rollout(task=TASK, rollout_id=f"g-{sample}", group_id="g", sample=sample, reward=reward)
    (trajectory,) = grown.trajectories
    trajectory.append_context(prompt, Origin.prompt)
    for sampled, reply in turns:
        start = trajectory.length
        routes = None
        if experts_TLK is not None:
            routes = routes_of(experts_TLK[start - 1 : start - 1 + len(sampled)])
        completion = Completion(
            token_ids=tuple(sampled),
            logprobs=(-4.0,) * len(sampled),
            finish=Finish.stop,
            versions=((0, len(sampled)),),
            routes=routes,
        )
        trajectory.append_sampled(completion, trajectory.token_ids)
        trajectory.append_context(reply, Origin.tool)
    return grown


PROMPT, TURNS = [7, 8, 9, 10], [([20, 21, 2], [30, 31]), ([22, 2], [])]
IDS = [7, 8, 9, 10, 20, 21, 2, 30, 31, 22, 2]
REPLAYED = [3, 4, 5, 8, 9]
"""Positions whose next token is sampled: the prompt's last, 20 and 21, the reply's last, and 22."""


def scores(scorer: Scorer, sequences: Sequence[TrainingSequence], *, budget: int = 1000):
    """Sequence key -> logprobs [S]."""
    microbatches = scorer.pack(sequences, budget, CPU)
    return {key: value[0] for key, value in score_microbatches(scorer, microbatches).items()}


def scorer_of(model: PreTrainedModel, *, replays: bool = True, **settings) -> Scorer:
    return Scorer(model, temperature=1.0, logits_budget_mb=1, replays_routes=replays, **settings)


@pytest.mark.parametrize("name", family_params(NAMES))
def test_replay_of_own_routes_is_the_plain_pass_to_the_bit(name: str) -> None:
    model = model_of(name)
    one = rollout(PROMPT, TURNS, plain_routes(model, IDS))
    plain = scores(scorer_of(model, replays=False), make_sequences(one))
    replayed = scores(scorer_of(model), make_sequences(one, replays_routes=True))
    assert replayed["g-0", 0].equal(plain["g-0", 0])


@pytest.mark.parametrize("name", family_params(NAMES))
@pytest.mark.parametrize("packed", [True, False])
def test_foreign_routes_are_used_where_tokens_were_sampled_and_only_there(
    name: str, packed: bool
) -> None:
    model = model_of(name)
    own_TLK = plain_routes(model, IDS)
    foreign_TLK = (own_TLK + 1) % 4  # other experts in every layer
    scorer = scorer_of(model)
    scorer.packed = packed
    sequences = make_sequences(rollout(PROMPT, TURNS, foreign_TLK), replays_routes=True)
    (microbatch,) = scorer.pack(sequences, 1000, CPU)
    used = {}

    def record(layer, module, args) -> None:
        used[layer] = next(a for a in args if a.dtype is torch.long and a.dim() == 2)

    handles = [
        model.get_submodule(f"{router.name.rpartition('.')[0]}.experts").register_forward_pre_hook(
            lambda module, args, layer=router.layer: record(layer, module, args)
        )
        for router in find_routers(model).routers
    ]
    with scorer.ready(), torch.no_grad():
        scorer(microbatch)
    for handle in handles:
        handle.remove()
    assert used
    for layer, experts_TK in used.items():
        assert experts_TK[REPLAYED].equal(foreign_TLK[REPLAYED, layer])
    # The first layer's inputs are those of the plain pass, so it chooses as it did there.
    first = min(used)
    others = [position for position in range(len(IDS)) if position not in REPLAYED]
    before = [position for position in others if position < REPLAYED[0]]
    assert used[first][before].equal(own_TLK[before, first])
    if first == 0 and name in ("Mixtral", "Qwen3Moe"):
        assert used[first][others].equal(own_TLK[others, first])


def test_replayed_experts_are_weighed_by_the_trainers_router() -> None:
    """The output of a layer, and the gradient of its router, computed by hand.

    g_e = exp(s_e) / (sum over the replayed experts of exp(s)), for s the router's own scores.
    """
    model = model_of("Qwen3Moe")
    block = model.model.layers[0].mlp
    foreign_TLK = (plain_routes(model, IDS) + 1) % 4
    sequences = make_sequences(rollout(PROMPT, TURNS, foreign_TLK), replays_routes=True)
    scorer = scorer_of(model)
    (microbatch,) = scorer.pack(sequences, 1000, CPU)
    seen = {}
    handle = block.register_forward_hook(
        lambda module, args, output: seen.update(x=args[0].detach(), y=output)
    )
    with scorer.ready():
        scorer(microbatch)
        handle.remove()
        factors = torch.linspace(-1, 1, 32)
        (gradient,) = torch.autograd.grad((seen["y"][0, 4] * factors).sum(), block.gate.weight)
    x = seen["x"][0, 4]  # the position of id 20, from which 21 was sampled
    router = block.gate.weight.detach().clone().requires_grad_()
    # The block has norm_topk_prob: weights of the chosen experts add up to 1.
    chosen = foreign_TLK[4, 0].tolist()
    score = router @ x
    share = {e: score[e].exp() / sum(score[other].exp() for other in chosen) for e in chosen}
    if not model.config.norm_topk_prob:
        share = {e: score[e].exp() / score.exp().sum() for e in chosen}
    total = torch.zeros(32)
    for expert in chosen:
        gate, up = (block.experts.gate_up_proj[expert].detach() @ x).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        total = total + share[expert] * (block.experts.down_proj[expert].detach() @ hidden)
    torch.testing.assert_close(seen["y"][0, 4].detach(), total.detach())
    (expected,) = torch.autograd.grad((total * factors).sum(), router)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", family_params(["Qwen3Moe", "Lfm2Moe"]))
def test_a_shared_prompt_routes_as_the_trainer_says(name: str) -> None:
    """Siblings share the prompt up to its last token, where each replays its own experts."""
    model = model_of(name)
    prompt = [7, 8, 9, 10, 11, 12]
    own_TLK = plain_routes(model, [*prompt, 20, 2])
    rollouts = [
        rollout(prompt, [([20, 2], [])], own_TLK, sample=0),
        rollout(prompt, [([20, 2], [])], (own_TLK + 1) % 4, sample=1),
        rollout(prompt, [([20, 21, 2], [])], plain_routes(model, [*prompt, 20, 21, 2]), sample=2),
    ]
    sequences = [s for one in rollouts for s in make_sequences(one, replays_routes=True)]
    alone = scorer_of(model, share_prefix=SharePrefix.never)
    together = scorer_of(model, share_prefix=SharePrefix.always)
    expected = {}
    for sequence in sequences:
        expected |= scores(alone, [sequence])
    (microbatch,) = together.pack(sequences, 1000, CPU)
    # 5 shared prompt tokens. Sample 1 has its own last one and 20 2. Samples 0 and 2 have the same
    # experts at 12, but not the same id or the same experts after it.
    assert microbatch.token_ids_T.numel() < sum(sequence.length for sequence in sequences) - 8
    assert (microbatch.routes_TLK[:5] == -1).all()
    found = scores(together, sequences)
    for key, logprobs_S in expected.items():
        torch.testing.assert_close(found[key], logprobs_S, rtol=0, atol=3e-4)
    assert not found["g-0", 0].allclose(found["g-1", 0], atol=1e-3)


def test_a_branch_replays_the_experts_of_its_context() -> None:
    """A token's position has one choice, whichever trajectory continues it."""
    model = model_of("Qwen3Moe")
    experts_TLK = plain_routes(model, IDS)
    grown = rollout(PROMPT, TURNS, experts_TLK)
    branch = grown.branch(0, 6)  # after 20 21, of which the position of 21 sampled the id 2
    branch.append_context([40], Origin.template)
    branch.append_sampled(
        Completion(
            token_ids=(2,),
            logprobs=(-1.0,),
            finish=Finish.stop,
            versions=((0, 1),),
            routes=routes_of(torch.tensor([[[3, 0], [1, 2]]])),
        ),
        branch.token_ids,
    )
    main, side = make_sequences(grown, replays_routes=True)
    assert main.routes.positions_R.tolist() == REPLAYED
    assert side.routes.positions_R.tolist() == [3, 4, 5, 6]
    assert side.routes.experts_RLK[:3].equal(main.routes.experts_RLK[:3])
    assert side.routes.experts_RLK[3].tolist() == [[3, 0], [1, 2]]
    (microbatch,) = pack([main, side], 1000, CPU, least=1)
    assert microbatch.token_ids_T.numel() == 11 + 2  # the six ids of the context once
    # A turn that is sampled right at the branch has its own choice at the last position before it.
    again = grown.branch(0, 6)
    again.append_sampled(
        Completion(
            token_ids=(5,),
            logprobs=(-1.0,),
            finish=Finish.stop,
            versions=((0, 1),),
            routes=routes_of(torch.tensor([[[0, 1], [0, 1]]])),
        ),
        again.token_ids,
    )
    third = make_sequences(grown, replays_routes=True)[2]
    assert third.routes.positions_R.tolist() == [3, 4, 5]
    assert third.routes.experts_RLK[2].tolist() == [[0, 1], [0, 1]]


def test_rollouts_without_experts_are_refused() -> None:
    with pytest.raises(MissingRoutes) as refused:
        make_sequences(rollout(PROMPT, TURNS, None), replays_routes=True)
    text = str(refused.value)
    assert text.startswith("algorithm.router_replay=rollout: rollout g-0 trajectory 0 turn 0 ")
    assert "algorithm.router_replay=off" in text


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        ([[0, 0], [0, 0]], "an expert twice for a token in layer 0"),
        ([[0, 1], [1, 9]], "expert 9 in layer 1"),
        ([[0, 1]], "2 experts in each of 1 layers"),
        ([[0, 1, 2], [0, 1, 2]], "3 experts in each of 2 layers"),
    ],
)
def test_experts_that_the_model_cannot_have_chosen_are_refused(
    experts: list[list[int]], problem: str
) -> None:
    trained = policy(model_of("Qwen3Moe"), algorithm=REPLAY)
    routes = torch.tensor([experts] * len(IDS))
    with pytest.raises(MissingRoutes) as refused:
        trained.score([[rollout(PROMPT, TURNS, routes)]])
    text = str(refused.value)
    assert text.startswith("algorithm.router_replay=rollout: rollout g-0 trajectory 0 was sampled")
    assert problem in text


def test_a_policy_without_experts_is_refused() -> None:
    with pytest.raises(UnknownRouters, match="Qwen3ForCausalLM"):
        policy(algorithm=REPLAY)


def test_experts_cross_processes_and_stay_out_of_the_file() -> None:
    model = model_of("Qwen3Moe")
    one = rollout(PROMPT, TURNS, plain_routes(model, IDS))
    again = CODEC.decode(CODEC.encode(one))
    assert [s.routes for s in again.trajectories[0].spans] == [
        s.routes for s in one.trajectories[0].spans
    ]
    record = rollout_record(one)
    assert "routes" not in str(record)
    assert read_rollout(record, TASK).trajectories[0].spans[1].routes is None


def gradients(trained: Policy, group: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """Parameter -> gradient of the mean logprob of a group's tokens."""
    sequences = [s for one in group for s in make_sequences(one, replays_routes=True)]
    (minibatch,) = trained.minibatches([[replace(s, weight=1.0) for s in sequences]])
    with trained.ready():
        for microbatch in trained.microbatches(minibatch):
            logprobs_S, _ = trained.forward(microbatch)
            trained.backward(logprobs_S.mean())
    return {
        name: p.grad.clone() for name, p in trained.model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("level", ["blocks", "all"])
def test_layers_that_are_computed_again_replay_again(level: str) -> None:
    group = []
    for sample in range(2):
        experts_TLK = (plain_routes(model_of("Qwen3Moe"), IDS) + 1 + sample) % 4
        group.append(rollout(PROMPT, TURNS, experts_TLK, sample=sample, reward=float(sample)))
        group[-1].trajectories[0].advantages = [1.0] * 5
    plain = gradients(policy(model_of("Qwen3Moe"), algorithm=REPLAY), group)
    checkpointed = policy(
        model_of("Qwen3Moe"), algorithm=REPLAY, training={"activation_checkpointing": level}
    )
    again = gradients(checkpointed, group)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)
    assert plain["model.layers.1.mlp.gate.weight"].abs().max() > 0


@pytest.mark.filterwarnings("ignore:MiniMaxForCausalLM is trained with one forward pass")
def test_a_model_that_cannot_be_packed_replays_rollout_by_rollout() -> None:
    """Its layers cannot be computed again: by then the last rollout's experts are loaded."""
    model = tiny_recurrent("MiniMax")
    one = rollout(PROMPT, TURNS, plain_routes(model, IDS), sample=0)
    other = rollout(PROMPT, TURNS, (plain_routes(model, IDS) + 1) % 4, sample=1)
    scorer = scorer_of(model)
    assert not scorer.packed
    sequences = [s for r in (one, other) for s in make_sequences(r, replays_routes=True)]
    found = scores(scorer, sequences)
    plain = scores(scorer_of(model, replays=False), make_sequences(one))
    assert found["g-0", 0].equal(plain["g-0", 0])
    assert not found["g-1", 0].allclose(plain["g-0", 0], atol=1e-3)
    for level in (ActivationCheckpointing.blocks, ActivationCheckpointing.all):
        with pytest.raises(UnsupportedModel) as refused:
            scorer_of(model, level=level)
        assert f"training.activation_checkpointing={level}" in str(refused.value)


def test_metrics_of_a_step() -> None:
    """Own experts: all equal, and no gap between replay and none. Foreign ones: none equal."""
    model = model_of("Qwen3Moe")
    own_TLK = plain_routes(model, IDS)
    for experts_TLK, equal in ((own_TLK, 1.0), ((own_TLK + 2) % 4, None)):
        group = [
            rollout(PROMPT, TURNS, experts_TLK, sample=sample, reward=float(sample))
            for sample in range(2)
        ]
        metrics = train_policy(policy(model_of("Qwen3Moe"), algorithm=REPLAY, lr=0.0), [group])
        replayed, own = (metrics[f"routing/logprob_gap_{kind}"] for kind in ("replayed", "own"))
        assert metrics["sampling/logprob_gap"] == pytest.approx(replayed, rel=1e-5)
        if equal is not None:
            assert metrics["routing/equal"] == equal
            assert replayed == own
        else:
            assert metrics["routing/equal"] < 0.5
            assert abs(replayed - own) > 1e-3


def test_metrics_by_hand() -> None:
    # Gaps with replay 0.5 and 0.0, without 1.0 and 0.5; 3 of 4 pairs (position, layer) are equal.
    parts = route_mismatch(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.5, -2.0]),
        torch.tensor([-2.0, -2.5]),
        torch.tensor([3.0, 4.0]),
    )
    assert {name: part.tolist() for name, part in parts.items()} == {
        "routing/equal": [3.0, 4.0],
        "routing/logprob_gap_replayed": [0.5, 2.0],
        "routing/logprob_gap_own": [1.5, 2.0],
    }


def test_the_reference_routes_by_itself() -> None:
    """A frozen model's probabilities are its own: those of a policy without replay."""
    settings = {"kl": {"beta": 0.1}}
    foreign_TLK = (plain_routes(model_of("Qwen3Moe"), IDS) + 1) % 4
    one = rollout(PROMPT, TURNS, foreign_TLK)
    ((plain,),) = policy(model_of("Qwen3Moe"), algorithm=settings).score([[one]])
    replaying = policy(model_of("Qwen3Moe"), algorithm={**settings, **REPLAY})
    ((replayed,),) = replaying.score([[one]])
    assert replayed.ref_logprobs_S.equal(plain.ref_logprobs_S)
    assert not replaying.logprobs([one])["g-0", 0].allclose(plain.ref_logprobs_S, atol=1e-3)
