"""Crash bundles: everything needed to repeat a failed step.

crash/step-000012/    like a run's folder, so that `agenttrain view` shows its rollouts
    crash.json        step, stage, error, culprits
    config.yaml       copy of the run's; tools.json too
    rollouts/         step-000012.jsonl: the rollouts that the step had so far
    batch.pt          the sequences of the failed update, tensor by tensor
    checkpoints/      weights from before the update, optimizer and random states
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from agenttrain.rewards.function import RewardError
from agenttrain.rollout.declared import FILE as TOOLS
from agenttrain.tracking.rollouts import write_step
from agenttrain.training.batch import SequenceRoutes, TrainingSequence
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import CheckpointError
from agenttrain.training.nonfinite import BrokenUpdate, NotFinite
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import read_tensors
from agenttrain.training.world import PeerFailed
from agenttrain.types import Rollout
from agenttrain.utils.files import write_atomically

TENSORS = (
    *("token_ids_T", "targets_S", "behaviour_S"),
    *("ref_logprobs_S", "old_logprobs_S", "old_entropy_S"),
)
"""Tensors of a TrainingSequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Writes the crash bundles of one run, for two kinds of errors.

    NotFinite (NaN or infinite values) is raised in all processes at once: together they write one
    bundle with the rollouts of all and the policy's checkpoint. A RewardError is
    raised in one process while it scores: it writes a bundle with its own rollouts, without a
    checkpoint, as scoring needs no policy.
    """

    folder: Path
    """Folder of the run."""
    policy: Policy
    checkpoints: Checkpoints
    arrays_above: int | None = None
    """Tokens of a rollout above which its record has a file of arrays; None: none has."""

    @contextmanager
    def collect(self, step: int, rollouts: Sequence[Rollout] = ()) -> Iterator[None]:
        """Write a bundle if an error in the block ends the step.

        The error's message then names the bundle, or says why there is none. `rollouts` are those
        of the step so far, for NotFinite. A RewardError has the rollouts that were being scored in
        its `rollouts`.
        """
        world = self.policy.world
        bundle = self.folder / "crash" / f"step-{step:06d}"
        try:
            yield
        except NotFinite as error:
            write = partial(self._write_together, bundle, step, error, rollouts)
            self._write_bundle(bundle, error, rollouts, write)
            raise
        except RewardError as error:
            # Without rollouts nothing can be repeated: the reward of an environment failed in the
            # tool loop, before any scoring, and the environment's state is gone.
            if error.rollouts:
                if not world.is_main:
                    bundle = bundle.with_name(f"{bundle.name}-rank-{world.rank}")
                write = partial(self._write_files, bundle, step, error, error.rollouts)
                self._write_bundle(bundle, error, error.rollouts, write)
            raise

    def _write_bundle(
        self,
        bundle: Path,
        error: NotFinite | RewardError,
        rollouts: Sequence[Rollout],
        write: Callable[[], None],
    ) -> None:
        """Call `write`, and add the command that replays the bundle to the error's message.

        If the bundle cannot be written, the message says why instead.
        """
        outcome = f"To see it again: agenttrain replay {quote(str(bundle))}"
        if any(t.images for rollout in rollouts for t in rollout.trajectories):
            outcome += " (it holds the images of its rollouts)"
        try:
            write()
        except (OSError, CheckpointError, PeerFailed) as problem:
            outcome = f"The evidence could not be written: {problem}"
        error.args = (f"{error}. {outcome}",)

    def _write_together(
        self, bundle: Path, step: int, error: NotFinite, rollouts: Sequence[Rollout]
    ) -> None:
        """Write the bundle of an error that all processes raise, with the policy's checkpoint."""
        world = self.policy.world
        all_rollouts = world.to_main(rollouts, "the rollouts of a step that failed")
        # If the main process fails with OSError, the others raise too instead of waiting for it.
        with world.together("the evidence of a step that failed", OSError):
            if world.is_main:
                self._write_files(bundle, step, error, all_rollouts)
        tokenizer, folder = self.checkpoints.tokenizer, bundle / "checkpoints"
        # Not among the run's checkpoints, which would be pruned for it.
        checkpoints = Checkpoints(folder, tokenizer=tokenizer, keep=1, main=world.is_main)
        checkpoints.save(self.policy, step=step - 1)  # the weights are those before the step

    def _write_files(
        self, bundle: Path, step: int, error: NotFinite | RewardError, rollouts: Sequence[Rollout]
    ) -> None:
        """Write all files of the bundle but the checkpoint, which needs all processes."""
        record = {
            "step": step,
            "stage": "reward" if isinstance(error, RewardError) else error.stage,
            "error": str(error),
            "culprits": list(error.culprits),
        }
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        for name in ("config.yaml", TOOLS):  # TOOLS: tools.json
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, bundle / name)
        write_step(bundle, step, rollouts, arrays_above=self.arrays_above)
        if isinstance(error, BrokenUpdate):  # it has the sequences of the failed update
            # Tensors, because JSON has no NaN.
            records = [
                {
                    "rollout_id": sequence.rollout.rollout_id,
                    "trajectory": sequence.trajectory.index,
                    "advantages": list(sequence.trajectory.advantages or ()),
                    **{name: getattr(sequence, name) for name in TENSORS},
                    "routes": _route_tensors(sequence),  # the rollouts' files have none
                }
                for sequence in error.sequences
            ]
            torch.save(records, bundle / "batch.pt")
        write_atomically(bundle / "crash.json", json.dumps(record, indent=2) + "\n")


def _route_tensors(sequence: TrainingSequence) -> dict[str, torch.Tensor] | None:
    """Return the fields of a sequence's routes by name, or None if it has none."""
    routes = sequence.routes
    if routes is None:
        return None
    return {"positions_R": routes.positions_R, "experts_RLK": routes.experts_RLK}


def read_batch(bundle: Path, rollouts: Sequence[Rollout]) -> list[TrainingSequence]:
    """Read the sequences of a failed update. `rollouts` are those of the bundle."""
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    sequences = []
    for record in read_tensors(bundle / "batch.pt"):
        rollout = by_id[record["rollout_id"]]
        tensors: dict[str, Any] = {name: record[name] for name in TENSORS}
        routes = record.get("routes")  # older bundles have none
        tensors["routes"] = None if routes is None else SequenceRoutes(**routes)
        trajectory = rollout.trajectories[record["trajectory"]]
        trajectory.advantages = array("d", record["advantages"])
        sequences.append(TrainingSequence(rollout=rollout, trajectory=trajectory, **tensors))
    return sequences
