"""Training with images: packed, shared and one by one give the same loss and gradient."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import training_cases
import vision_kit

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vision import Vision
from agenttrain.training.batch import TrainingSequence, make_sequences
from agenttrain.training.config import ActivationCheckpointing, LoraSettings, SharePrefix
from agenttrain.training.logprobs import Scorer
from agenttrain.training.lora import add_lora
from agenttrain.types import Completion, Finish, Origin, PlacedImage, Rollout
from agenttrain.utils.image_files import picture_of

PAD = vision_kit.pad()
CPU = torch.device("cpu")
SIZES = ((16, 8), (24, 8), (16, 16), (40, 24), (8, 8))


def context(rng: random.Random, images: int) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Random ids with so many images among them."""
    ids = [rng.randrange(7, 300) for _ in range(rng.randint(1, 9))]
    placed = []
    for _ in range(images):
        image = vision_kit.picture(*rng.choice(SIZES), seed=rng.randrange(100))
        placed.append(PlacedImage(image, len(ids), vision_kit.placeholders().grid(image)))
        ids += [PAD] * placed[-1].tokens
        ids += [rng.randrange(7, 300) for _ in range(rng.randint(1, 9))]
    return ids, tuple(placed)


def groups(seed: int, count: int = 2, size: int = 3) -> list[list[Rollout]]:
    """Groups of rollouts with 0 to 2 images in the prompt and in a tool's reply."""
    rng = random.Random(seed)
    made = []
    for group in range(count):
        prompt = context(rng, group % 3)
        rollouts = []
        for sample in range(size):
            one = Rollout(
                task=training_cases.TASK,
                rollout_id=f"g{group}-{sample}",
                group_id=f"g{group}",
                sample=sample,
                reward=float(sample),
            )
            (trajectory,) = one.trajectories
            trajectory.append_context(*prompt[:1], Origin.prompt, prompt[1])
            for images in (rng.randint(0, 2), 0):
                ids = tuple(rng.randrange(7, 300) for _ in range(rng.randint(1, 6)))
                completion = Completion(
                    token_ids=ids,
                    logprobs=(-5.0,) * len(ids),
                    finish=Finish.stop,
                    versions=((0, len(ids)),),
                )
                trajectory.append_sampled(completion, trajectory.token_ids)
                reply, placed = context(rng, images)
                trajectory.append_context(reply, Origin.tool, placed)
            rollouts.append(one)
        made.append(rollouts)
    return made


def sequences_of(seed: int) -> list[TrainingSequence]:
    return [s for group in groups(seed) for one in group for s in make_sequences(one)]


def scores(
    scorer: Scorer, sequences: Sequence[TrainingSequence], budget: int, temperature: float = 1.0
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Logprobs by sequence, and the gradient of their weighted sum, in which every token counts."""
    model = scorer.model
    model.zero_grad()
    by_key = {}
    with scorer.ready():
        for microbatch in scorer.pack(sequences, budget, CPU):
            logprobs_S, _ = scorer(microbatch)
            lengths = [one.sampled_length for one in microbatch.sequences]
            for one, own in zip(microbatch.sequences, logprobs_S.split(lengths), strict=True):
                by_key[one.key] = own.detach()
                (own * torch.linspace(0.5, 1.5, len(own))).sum().backward(retain_graph=True)
    return by_key, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def scorer_of(
    share: SharePrefix, *, frozen: bool = True, kind: str = vision_kit.KINDS[0]
) -> Scorer:
    model = vision_kit.model(kind=kind)
    if frozen:
        model.model.visual.requires_grad_(False)
    return Scorer(
        model,
        temperature=1.0,
        logits_budget_mb=64,
        share_prefix=share,
        vision=vision_kit.vision(frozen=frozen),
    )


def assert_same(own: tuple[dict, dict], other: tuple[dict, dict], kind: str) -> None:
    """Scans of recurrent layers round otherwise in other chunks."""
    tolerance = 1e-4 if kind == "qwen3_5" else 1e-5
    for key, logprobs_S in other[0].items():
        assert torch.allclose(own[0][key], logprobs_S, atol=tolerance)
    assert own[1].keys() == other[1].keys()
    largest = max(float(g.abs().max()) for g in other[1].values())
    for name, gradient in other[1].items():
        assert (own[1][name] - gradient).abs().max() <= tolerance * largest, name


def own_scores(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """Logprobs by transformers' own forward pass with pixels, alone."""
    trajectory = sequence.trajectory
    tokens = torch.tensor([list(trajectory.token_ids)])
    keywords = {}
    if trajectory.images:
        made = vision_kit.vision()._processor(
            images=[picture_of(one.image) for one in trajectory.images], return_tensors="pt"
        )
        kinds = torch.zeros_like(tokens)
        for one in trajectory.images:
            kinds[0, one.start : one.end] = 1
        keywords = {**made, "mm_token_type_ids": kinds}
    model.model.rope_deltas = None
    logits = model(input_ids=tokens, use_cache=False, **keywords).logits[0].log_softmax(-1)
    places = sequence.targets_S
    return logits[places].gather(-1, tokens[0, places + 1, None])[:, 0]


@pytest.mark.parametrize(
    "kind",
    # A scan of each sequence alone takes long.
    [*vision_kit.KINDS[:2], pytest.param("qwen3_5", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_packed_shared_and_alone_are_transformers_own(frozen: bool, kind: str) -> None:
    sequences = sequences_of(1)
    assert sum(one.layout is not None for one in sequences) > 2
    assert any(one.layout is None for one in sequences)
    alone = scores(scorer_of(SharePrefix.never, frozen=frozen, kind=kind), sequences, 1)
    model = vision_kit.model(kind=kind)
    model.model.visual.requires_grad_(not frozen)
    expected = {}
    for one in sequences:
        logprobs_S = own_scores(model, one)
        expected[one.key] = logprobs_S.detach()
        (logprobs_S * torch.linspace(0.5, 1.5, len(logprobs_S))).sum().backward()
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same(alone, (expected, own), kind)
    for share, budget in ((SharePrefix.never, 10_000), (SharePrefix.always, 10_000)):
        scorer = scorer_of(share, frozen=frozen, kind=kind)
        assert scorer.packed
        assert_same(scores(scorer, sequences, budget), alone, kind)
    assert any(name.startswith("model.visual.blocks.0.mlp") for name in alone[1]) is not frozen


@pytest.mark.parametrize("kind", vision_kit.KINDS)
def test_one_pass_per_segment_is_the_same(kind: str) -> None:
    """For a model that cannot be packed."""
    sequences = sequences_of(2)
    alone = scores(scorer_of(SharePrefix.never, kind=kind), sequences, 1)
    scorer = scorer_of(SharePrefix.always, kind=kind)
    scorer.packed = False
    assert_same(scores(scorer, sequences, 10_000), alone, kind)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "kind", [*vision_kit.KINDS[:2], pytest.param("qwen3_5", marks=pytest.mark.slow)]
)
def test_recomputed_activations_change_nothing(kind: str, frozen: bool) -> None:
    sequences = sequences_of(1)[:4]
    scorer = scorer_of(SharePrefix.always, frozen=frozen, kind=kind)
    kept = scores(scorer, sequences, 10_000)
    for level in (ActivationCheckpointing.blocks, ActivationCheckpointing.all):
        scorer.recompute(level)
        assert_same(scores(scorer, sequences, 10_000), kept, kind)


def test_features_are_computed_once_per_image() -> None:
    sequences = sequences_of(3)
    scorer = scorer_of(SharePrefix.auto)
    scores(scorer, sequences, 60)
    shown = {p.image.sha256 for one in sequences for p in one.trajectory.images}
    assert scorer.vision is not None and scorer.vision.computed == len(shown)


@pytest.mark.parametrize("kind", [*vision_kit.KINDS, "qwen3_5_moe"])
def test_the_engines_logprobs_are_the_trainers(kind: str) -> None:
    vision = vision_kit.vision()
    policy = training_cases.policy(vision_kit.model(kind=kind), processes={"vision": vision})
    engine = TransformersEngine(policy.sampler, None, vision)
    rollouts = [one for group in groups(4) for one in group]

    async def sample() -> None:
        async def one(rollout: Rollout) -> None:
            (trajectory,) = rollout.trajectories
            trajectory.append_context([11, 12], Origin.tool)
            completion = await engine.generate(
                trajectory.token_ids,
                Sampling(max_tokens=8, seed=rollout.sample),
                session=rollout.rollout_id,
                images=trajectory.images,
            )
            trajectory.append_sampled(completion, trajectory.token_ids)

        await asyncio.gather(*map(one, rollouts))
        await engine.aclose()

    asyncio.run(sample())
    computed = vision.computed
    logprobs = policy.logprobs(rollouts)
    assert vision.computed == computed  # the engine's features
    for rollout in rollouts:
        last = torch.tensor(rollout.trajectories[0].spans[-1].logprobs)
        own = logprobs[rollout.rollout_id, 0][-len(last) :]
        assert (own - last).abs().max() < 1e-4


def test_an_update_leaves_a_frozen_tower_and_changes_a_trained_one() -> None:
    for frozen in (True, False):
        policy = training_cases.policy(
            vision_kit.model(),
            processes={"vision": vision_kit.vision(frozen=frozen)},
            training={"token_budget": 60},
        )
        before = training_cases.weights(policy)
        made = groups(5)
        for group in made:
            for one in group:
                length = one.sampled_length
                one.trajectories[0].advantages = array("d", [one.reward - 1.0] * length)
        policy.begin_step()
        sequences = policy.score(made)
        with policy.ready():
            for minibatch in policy.minibatches(sequences):
                for microbatch in policy.microbatches(minibatch):
                    logprobs_S, _ = policy.forward(microbatch)
                    minibatch.losses.append(logprobs_S.sum().detach())
                    policy.backward((logprobs_S * microbatch.advantages_S).sum())
        policy.optimizer.step()
        after = policy.model.state_dict()
        changed = {name for name, weight in before.items() if not weight.equal(after[name])}
        assert any("language_model" in name for name in changed)
        assert any("visual" in name for name in changed) is not frozen


@pytest.mark.parametrize("kind", vision_kit.KINDS)
def test_lora_adapts_the_language_model_alone(kind: str) -> None:
    model = vision_kit.model(kind=kind)
    add_lora(model, LoraSettings(rank=2))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapted and all("language_model" in name for name in adapted)


def dropped(sequence: TrainingSequence) -> TrainingSequence:
    """The last image's features are missing."""
    assert sequence.layout is not None
    return replace(sequence, layout=replace(sequence.layout, images=sequence.layout.images[:-1]))


def duplicated(sequence: TrainingSequence) -> TrainingSequence:
    assert sequence.layout is not None
    images = sequence.layout.images
    return replace(sequence, layout=replace(sequence.layout, images=(*images, images[-1])))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dropped, "placeholders, but .* vectors of images"),
        (duplicated, "both stand at position"),
    ],
)
def test_features_that_are_not_as_many_as_placeholders_are_refused(change, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        broken = [change(one) for one in sequences_of(1) if one.layout is not None]
        scores(scorer_of(SharePrefix.never), broken, 10_000)


@pytest.mark.parametrize("kind", vision_kit.KINDS)
def test_a_wrong_grid_is_refused(kind: str) -> None:
    """The image processor and the placeholders disagree on the size."""
    other = Vision(
        replace(vision_kit.placeholders(), least_pixels=256), vision_kit.vision()._processor
    )
    with pytest.raises(ValueError, match=r"makes a grid of .* placeholders stand for it"):
        other.compute(vision_kit.model(kind=kind), [vision_kit.picture(8, 8)], grad=False)


def test_swapped_images_change_the_logprobs() -> None:
    """What the comparison with the engine would show: the images of one size, in another order."""
    image, other = vision_kit.picture(16, 16, 1), vision_kit.picture(16, 16, 2)

    def logprobs(first, second):
        one = Rollout(task=training_cases.TASK, rollout_id="r", reward=1.0)
        (trajectory,) = one.trajectories
        ids = [7, *[PAD] * 4, 8, *[PAD] * 4, 9]
        placed = (PlacedImage(first, 1, (2, 2)), PlacedImage(second, 6, (2, 2)))
        trajectory.append_context(ids, Origin.prompt, placed)
        completion = Completion(
            token_ids=(20, 21),
            logprobs=(-1.0, -1.0),
            finish=Finish.stop,
            versions=((0, 2),),
        )
        trajectory.append_sampled(completion, trajectory.token_ids)
        return scores(scorer_of(SharePrefix.never), make_sequences(one), 100)[0]["r", 0]

    gap = (logprobs(image, other) - logprobs(other, image)).abs().max()
    assert gap > 1e-3
