"""The teacher: a second model whose probabilities of the sampled tokens become advantages.

It reads the policy's tokens, with another prompt if `algorithm.teacher.prompt` adds to it. Example:
the prompt is ``p p``, and the teacher sees ``p q q p`` in its place (s sampled, t tool)::

    policy     p p     s s t s
    teacher    p q q p s s t s

`agenttrain.trainer.train_policy` calls its functions. S: sampled tokens of a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.algorithms.config import AlgorithmConfig, Behaviour
from agenttrain.algorithms.credit import set_advantages
from agenttrain.algorithms.distillation import is_gated_in, mixed_advantages
from agenttrain.algorithms.loss import MetricParts, mean_parts
from agenttrain.engines.base import EngineError
from agenttrain.training.batch import SequenceKey, TrainingSequence
from agenttrain.training.config import TrainingConfig
from agenttrain.training.logprobs import Scorer, pack_evenly, score_microbatches
from agenttrain.training.sharding import Sharding
from agenttrain.training.sliced_weights import SlicedWeights, read_shards
from agenttrain.training.world import World
from agenttrain.training.wrapping import shard
from agenttrain.types import MAIN, AgenttrainError, Rollout, Trajectory

PromptIds = Callable[[Rollout, Trajectory], Sequence[int]]
"""Returns the ids of a prompt of the teacher's own, which it reads in place of the policy's."""


class TeacherFailed(AgenttrainError):
    """The teacher gave no usable probabilities: the run ends, because a zero would teach too."""


class Teacher(Protocol):
    """Source of the teacher's probabilities: a model of this process, or servers."""

    def score(self, sequences: Sequence[TrainingSequence]) -> Mapping[SequenceKey, Tensor]:
        """Return the sampled tokens' logprobs [S] by sequence. All processes call it together."""
        ...


class ModelTeacher:
    """Teacher that is a frozen model in this process, sharded as the policy is.

    There are two layouts. Without `sharding` each process has the whole model, and scores its
    sequences alone. With it each has a part, and all processes make every forward pass together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        training: TrainingConfig,
        accelerator: Any,
        world: World | None = None,
        sharding: Sharding | None = None,
        weights: SlicedWeights | None = None,
        prompt_ids: PromptIds | None = None,
    ) -> None:
        """Move `model` to the device, or shard it.

        With `weights`, `model` is on the meta device, and each process reads its part after it is
        sharded. Without `prompt_ids` the teacher reads the policy's prompt. Raises UnsupportedModel
        for a model whose probabilities cannot be computed here.
        """
        self._world = world or World()
        self._device: torch.device = accelerator.device
        self._budget = training.token_budget
        self._prompt_ids = prompt_ids
        text = model.config.get_text_config()
        self._longest: float = getattr(text, "max_position_embeddings", None) or torch.inf
        """Most tokens of a sequence that the teacher scores."""
        self._sharded = sharding is not None
        # Nothing is exchanged: it is a barrier. Without a limit (`patient`), because a slow file
        # system may delay one process by minutes.
        self._world.exchange((), "the teacher in every process", patient=True)
        model = model.requires_grad_(False)
        self._scorer = Scorer(
            model if sharding else model.to(self._device),
            temperature=temperature,
            logits_budget_mb=training.logits_budget_mb,
            share_prefix=training.share_prefix,
            defer=True,  # `choose_layout` follows, once the model is on its device or sharded
            key="algorithm.teacher.path",
        )
        if sharding is None:
            # It computes in the precision of training. evaluation_mode: without a wrapper for
            # data-parallel training (DDP), because nothing is trained.
            self._scorer = accelerator.prepare_model(self._scorer, evaluation_mode=True)
        else:
            shard(self._scorer, accelerator, sharding)
            if weights is not None:
                device = torch.device("cpu") if sharding.cpu_offload else self._device
                # After `shard`: each process reads its own part alone.
                read_shards(weights, self._scorer, device, self._world)
        # Last: it runs the model.
        self._scorer.choose_layout(self._device, self._world, accelerator.autocast())

    def score(self, sequences: Sequence[TrainingSequence]) -> dict[SequenceKey, Tensor]:
        """Return the logprobs [S] of the sampled tokens of each sequence that is not too long."""
        sequences = [with_teacher_prompt(sequence, self._prompt_ids) for sequence in sequences]
        fitting = [sequence for sequence in sequences if sequence.length <= self._longest]
        # Sharded, all processes have to make as many forward passes: `peers` are those to match.
        peers = self._world if self._sharded else None
        microbatches = pack_evenly(self._scorer, fitting, self._budget, self._device, peers)
        scores = score_microbatches(self._scorer, microbatches)
        return {key: logprobs_S for key, (logprobs_S, _) in scores.items()}


class TextScorer(Protocol):
    """Servers that score texts."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return every id's log-probability except the first's. Raises EngineError."""
        ...


class ServedTeacher:
    """Teacher that is a frozen model on servers. Each training process asks for its sequences."""

    def __init__(
        self,
        servers: TextScorer,
        *,
        max_context: int,
        world: World | None = None,
        prompt_ids: PromptIds | None = None,
    ) -> None:
        """Score by `servers`, which take less than `max_context` tokens.

        `prompt_ids` makes the teacher's own prompt. Without it the teacher reads the policy's.
        """
        self._servers, self._max_context = servers, max_context
        self._world = world or World()
        self._prompt_ids = prompt_ids

    def score(self, sequences: Sequence[TrainingSequence]) -> dict[SequenceKey, Tensor]:
        """Return the logprobs [S] of the sampled tokens of each sequence that fits the servers.

        Raises TeacherFailed in all processes.
        """
        sequences = [with_teacher_prompt(sequence, self._prompt_ids) for sequence in sequences]
        # A server also samples a token, which is thrown away but has to fit into the context.
        fitting = [sequence for sequence in sequences if sequence.length < self._max_context]
        values: list[list[float]] = []
        # Without a time limit: the servers of one process may take long.
        with self._world.together("the teacher's servers", TeacherFailed, patient=True):
            try:
                values = self._servers.score([s.token_ids_T.tolist() for s in fitting])
            except EngineError as error:
                raise TeacherFailed(f"{error}") from error
        # The first id has no logprob: index p has that of the id at p + 1, as in `targets_S`.
        return {
            sequence.key: torch.tensor(logprobs)[sequence.targets_S]
            for sequence, logprobs in zip(fitting, values, strict=True)
        }


def with_teacher_prompt(
    sequence: TrainingSequence, prompt_ids: PromptIds | None
) -> TrainingSequence:
    """Return the sequence with the teacher's prompt in place of the policy's.

    A sequence that does not begin with the whole prompt of the main trajectory stays the same: a
    sub-agent's prompt is not about the row.
    """
    sequence = replace(sequence, routes=None)  # None: the teacher's routers choose
    # Follow the parents to the first trajectory; count the leading tokens that are shared with it.
    root, shared = sequence.trajectory, sequence.length
    while root.parent is not None:
        parent_index, branch_position = root.parent
        root = sequence.rollout.trajectories[parent_index]
        shared = min(shared, branch_position)
    length = root.prompt_length
    has_main_prompt = root.role == MAIN and shared >= length
    if prompt_ids is None or not has_main_prompt:
        return sequence
    # Targets move by the difference of the prompts' lengths.
    prompt = torch.tensor(prompt_ids(sequence.rollout, root), dtype=torch.long)
    return replace(
        sequence,
        token_ids_T=torch.cat([prompt, sequence.token_ids_T[length:]]),
        targets_S=sequence.targets_S + (len(prompt) - length),
    )


def score_with(
    teacher: Teacher, groups: Sequence[Sequence[TrainingSequence]], world: World
) -> list[list[TrainingSequence]]:
    """Return the sequences with the teacher's logprobs. Leave out rollouts too long for it.

    Raises TeacherFailed in all processes for probabilities that are not finite.
    """
    scores = teacher.score(list(chain(*groups)))
    with world.together("the teacher's probabilities", TeacherFailed):
        for (rollout_id, index), logprobs_S in scores.items():
            if not logprobs_S.isfinite().all():
                raise TeacherFailed(
                    f"rollout {rollout_id} trajectory {index}: the teacher's probabilities of its "
                    "tokens are not finite; check the weights of algorithm.teacher.path, or set "
                    "algorithm.teacher.dtype=float32"
                )
    # A rollout with one trajectory that is too long is left out as a whole.
    too_long = {s.rollout.rollout_id for group in groups for s in group if s.key not in scores}
    return [
        [
            replace(sequence, teacher_logprobs_S=scores[sequence.key])
            for sequence in group
            if sequence.rollout.rollout_id not in too_long
        ]
        for group in groups
    ]


def add_teacher(
    groups: Sequence[Sequence[Rollout]],
    sequences: Sequence[Sequence[TrainingSequence]],
    config: AlgorithmConfig,
) -> MetricParts:
    """Mix the teacher's part into the advantages of the scored rollouts. Return its metrics.

    `sequences` are those of the rollouts of `groups` that the teacher scored. A rollout that has a
    reward but was too long for the teacher gets no advantage: the rewards' part alone would teach
    something else than the other rollouts do. A scored rollout without advantages, such as one
    without a reward, counts only for the distance of policy and teacher.

    `is_gated_in` decides by a rollout's reward whether the teacher's part is added.
    """
    teacher = config.teacher
    assert teacher is not None
    scored_ids = {sequence.rollout.rollout_id for sequence in chain(*sequences)}
    # Values of the three metrics. `gated_in`: the rollout gets the teacher's part (`is_gated_in`).
    differences, gated_in, too_long = [], [], []
    is_recomputed = config.behaviour is Behaviour.recomputed
    for sequence in chain(*sequences):
        policy_S = sequence.old_logprobs_S if is_recomputed else sequence.behaviour_S
        assert policy_S is not None and sequence.teacher_logprobs_S is not None
        differences.append(policy_S - sequence.teacher_logprobs_S)
        rollout, trajectory = sequence.rollout, sequence.trajectory
        if trajectory.advantages is None:  # there is nothing to mix the teacher's part into
            continue
        assert rollout.reward is not None
        mixed_S = mixed_advantages(
            torch.tensor(trajectory.advantages, dtype=torch.float64),
            policy_S,
            sequence.teacher_logprobs_S,
            teacher,
            gated_in=is_gated_in(rollout.reward, teacher),
        )
        trajectory.advantages = array("d", mixed_S.tolist())
    # The other two metrics are over all rollouts with a reward, also those that were too long.
    for rollout in chain(*groups):
        if rollout.reward is None or not rollout.sampled_length:
            continue
        gated_in.append(is_gated_in(rollout.reward, teacher))
        is_too_long = rollout.rollout_id not in scored_ids
        too_long.append(is_too_long)
        if is_too_long:
            set_advantages(rollout, None)
    return {
        "teacher/kl": mean_parts(torch.cat([torch.zeros(0), *differences])),
        "teacher/gated_in": mean_parts(torch.tensor(gated_in)),
        "teacher/too_long": mean_parts(torch.tensor(too_long)),
    }
