"""Checkpoints that are whole or not there.

checkpoints/step-000010/   model.safetensors, config.json, tokenizer: loadable by transformers
                           (with LoRA: adapter_model.safetensors and adapter_config.json)
                           policy.pt      optimizer and step; sharded: policy-0.pt, policy-1.pt, …
                           rng-0.pt       python, numpy and torch random states of process 0
                           state.json     what the trainer wants back
                           manifest.json  sha256 of each file above; written last
checkpoints/latest         link to the newest
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from agenttrain.training.lora import adapter_weights, is_adapted, load_adapter, save_adapter
from agenttrain.training.policy import Policy
from agenttrain.training.random_states import random_states, seed_random, set_random_states
from agenttrain.training.sharded_state import (
    WHOLE,
    is_sharded,
    read_state,
    whole_weights,
    write_part,
)
from agenttrain.training.sharding import assign
from agenttrain.types import AgenttrainError

MANIFEST = "manifest.json"
PREFIX = "step-"


class CheckpointError(AgenttrainError):
    """A checkpoint is torn, corrupt or missing; the message names the file."""


class NotWritten(CheckpointError):
    """A checkpoint cannot be written; the earlier ones are as they were."""


UNWRITABLE = (OSError, CheckpointError)


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Example: ``checkpoints.save(policy, step=10)``, and in a later process
    ``state = checkpoints.load_latest(policy)`` with ``state["step"] == 10``.
    """

    def __init__(self, folder: Path, *, tokenizer: Any, keep: int) -> None:
        """`keep` newest checkpoints stay. The tokenizer is saved with the chat template it has."""
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: keep at least 1.")
        self.folder = folder
        _recover(folder)
        self._tokenizer = tokenizer
        self._keep = keep

    def beside(self, folder: Path) -> Checkpoints:
        """The same, in another folder, which keeps one."""
        return Checkpoints(folder, tokenizer=self._tokenizer, keep=1)

    @property
    def empty(self) -> bool:
        """Whether no checkpoint was ever finished."""
        return not _newest_first(self.folder)

    def save(
        self,
        policy: Policy,
        *,
        step: int,
        state: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write `step-<step>`; `state` is JSON that `load` returns, with `step` added.

        `rng` are the `random_states` that `load` restores; None: those of this moment.
        A process that dies on the way leaves the earlier checkpoints as they were. Raises OSError
        or CheckpointError when it cannot be written.
        """
        path = self.folder / f"{PREFIX}{step:06d}"
        part = self.folder / f".{path.name}.part"
        world = policy.world
        weights = _weights(policy)
        with world.together(f"{path.name}: its folder", *UNWRITABLE):
            if world.is_main:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
        with world.together(f"{path.name}: each process's part", *UNWRITABLE), _telling(part):
            torch.save(random_states() if rng is None else rng, part / f"rng-{world.rank}.pt")
            if is_sharded(policy.model):
                write_part(policy.state_dict(), part, world.rank)
        with world.together(f"{path.name}: the whole", *UNWRITABLE):
            if world.is_main:
                self._write(policy, weights, part, {**(state or {}), "step": step})
                _seal(part)
                _replace(part, path)
                self._link(path)
                self._prune(path)
        return path

    def _write(
        self, policy: Policy, weights: dict[str, Tensor], part: Path, state: Mapping[str, Any]
    ) -> None:
        with _telling(part):
            if is_adapted(policy.model):
                save_adapter(policy.model, part, weights)
            else:
                policy.model.save_pretrained(part, state_dict=weights)
            self._tokenizer.save_pretrained(part)
            if not is_sharded(policy.model):
                torch.save(policy.state_dict(), part / WHOLE)
        (part / "state.json").write_text(json.dumps(state))

    def load(self, policy: Policy, path: Path) -> dict[str, Any]:
        """Restore weights, optimizer and random states from `path`; returns the saved state.

        As many processes may have written it as like: one that there was none of then draws from
        random states of its own. Raises CheckpointError, before anything is changed, when a file is
        not what was written.
        """
        verify(path)
        if is_adapted(policy.model):
            load_adapter(policy.model, path)
        else:
            saved = type(policy.model).from_pretrained(path, dtype=policy.model.dtype)
            state = saved.state_dict()
            for name, tensor in policy.model.state_dict().items():
                assign(tensor, state[name])
        policy.load_state_dict(read_state(path))
        _restore_random(path, policy.world.rank)
        return json.loads((path / "state.json").read_text())

    def load_latest(self, policy: Policy) -> dict[str, Any]:
        """Restore the newest checkpoint that is whole; a warning names what is wrong with others.

        Newer ones that are not whole become `.corrupt-step-<step>`: the run will write those steps
        anew. Raises CheckpointError, and moves nothing, if there is none.
        """
        path = latest(self.folder)
        state = self.load(policy, path)
        # Who is later must find the same folder: nothing moves before all have looked.
        policy.world.barrier(f"{path.name}: read")
        if policy.world.is_main:
            for corrupt in _newest_first(self.folder):
                if corrupt == path:
                    break
                aside = corrupt.with_name(f".corrupt-{corrupt.name}")
                shutil.rmtree(aside, ignore_errors=True)
                corrupt.rename(aside)
            self._link(path)
        policy.world.barrier(f"{path.name}: the newest")
        return state

    def _link(self, path: Path) -> None:
        part = self.folder / ".latest.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
        part.replace(self.folder / "latest")
        _sync(self.folder)

    def _prune(self, written: Path) -> None:
        """Remove all but `written` and the newest others."""
        others = [path for path in _newest_first(self.folder) if path != written]
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path)


def latest(folder: Path) -> Path:
    """The newest checkpoint under `folder` that verifies; others are skipped with a warning.

    Raises CheckpointError if there is none.
    """
    for path in _newest_first(folder):
        try:
            verify(path)
        except CheckpointError as error:
            print(f"warning: checkpoint skipped: {error}", file=sys.stderr)
        else:
            return path
    raise CheckpointError(f"{folder}: no whole checkpoint. Start the run anew.")


def verify(path: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file is what was written."""
    try:
        files = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error
    for name, digest in files.items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error}") from error
        if found != digest:
            raise CheckpointError(f"{path / name}: its content is not what was written")


def _newest_first(folder: Path) -> list[Path]:
    found = {
        int(match[1]): path
        for path in folder.glob(f"{PREFIX}*")
        if (match := re.fullmatch(rf"{PREFIX}(\d+)", path.name))
    }
    return [found[step] for step in sorted(found, reverse=True)]


def _seal(part: Path) -> None:
    """Write the manifest and force everything to disk."""
    files = sorted(path for path in part.rglob("*") if path.is_file())
    digests = {str(path.relative_to(part)): _digest(path) for path in files}
    (part / MANIFEST).write_text(json.dumps(digests, indent=1))
    for path in (*files, part / MANIFEST, part):
        _sync(path)


def _replace(part: Path, path: Path) -> None:
    """Move the finished folder to its name; one that has it already goes last."""
    former = path.with_name(f".{path.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if path.exists():
        path.rename(former)
    part.rename(path)
    _sync(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Undo a replacement that died between its two renames."""
    for former in folder.glob(f".{PREFIX}*.former"):
        path = folder / former.name[1:].removesuffix(".former")
        if not path.exists():
            former.rename(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _restore_random(path: Path, rank: int) -> None:
    """The states of this process; one more than wrote them gets some that follow from the first."""
    own = path / f"rng-{rank}.pt"
    if own.exists():
        set_random_states(torch.load(own, weights_only=True))
        return
    text = f"{_digest(path / 'rng-0.pt')}-{rank}"
    seed_random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"))


def _weights(policy: Policy) -> dict[str, Tensor]:
    """What is saved of the model; all processes gather it, and the main one has it."""
    if is_adapted(policy.model):
        return adapter_weights(policy.model)
    return whole_weights(policy.model, keep=policy.world.is_main)


@contextmanager
def _telling(part: Path) -> Iterator[None]:
    """Within, a full disk is a CheckpointError however torch and safetensors tell it."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise NotWritten(f"{part}: cannot be written: {error}") from error
