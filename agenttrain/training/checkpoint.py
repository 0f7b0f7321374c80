"""Checkpoints that are whole or not there.

checkpoints/step-000010/   model.safetensors, config.json, tokenizer: loadable by transformers
                           (with LoRA: adapter_model.safetensors and adapter_config.json)
                           policy.pt      optimizer and step; sharded: policy-0.pt, policy-1.pt, …
                           rng-0.pt       python, numpy and torch random states of process 0
                           state.json     what the trainer wants back
                           manifest.json  sha256 of each file above; written last
checkpoints/latest         link to the newest
checkpoints/best           link to the best by its evaluation, which stays (checkpoint.keep_best)
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from agenttrain.training.checkpoint_files import (
    PREFIX,
    CheckpointError,
    NotWritten,
    digest,
    latest,
    newest_first,
    only_tensors,
    put_aside,
    recover,
    remove,
    replace,
    seal,
    sync,
    verify,
)
from agenttrain.training.lora import adapter_weights, is_adapted, load_adapter, save_adapter
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import (
    WHOLE,
    assign,
    full_weights,
    is_sharded,
    read_state,
    read_tensors,
    write_part,
)

LATEST, BEST = "latest", "best"
UNWRITABLE = (OSError, CheckpointError)


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Example: ``checkpoints.save(policy, step=10)``, and in a later process
    ``state = checkpoints.load_latest(policy)`` with ``state["step"] == 10``.
    """

    def __init__(self, folder: Path, *, tokenizer: Any, keep: int, main: bool = True) -> None:
        """`keep` newest checkpoints stay. The tokenizer is saved with the chat template it has.

        Of a run's processes the `main` one alone clears away what an earlier run left over: another
        may come when a new checkpoint is already being written.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: keep at least 1.")
        self.folder = folder
        self._main = main
        if main:
            recover(folder)
        self._tokenizer = tokenizer
        self._keep = keep

    def beside(self, folder: Path) -> Checkpoints:
        """Make the checkpoints of another folder, which keeps one."""
        return Checkpoints(folder, tokenizer=self._tokenizer, keep=1, main=self._main)

    @property
    def empty(self) -> bool:
        """True if no checkpoint was ever finished."""
        return not newest_first(self.folder)

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
        try:
            # All processes gather the weights, and the main one has them.
            if is_adapted(policy.model):
                weights = adapter_weights(policy.model)
            else:
                weights = full_weights(policy.model, keep=world.is_main)
            with world.together(f"{path.name}: its folder", *UNWRITABLE, patient=True):
                if world.is_main:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
            with (
                world.together(f"{path.name}: each process's part", *UNWRITABLE, patient=True),
                _as_not_written(part),
            ):
                torch.save(random_states() if rng is None else rng, part / f"rng-{world.rank}.pt")
                if is_sharded(policy.model):
                    write_part(policy.state_dict(), part, world.rank)
            with world.together(f"{path.name}: the whole", *UNWRITABLE, patient=True):
                if world.is_main:
                    self._write(policy, weights, part, {**(state or {}), "step": step})
                    seal(part)
                    replace(part, path)
                    self._link(LATEST, path)
                    self._prune(path)
        except UNWRITABLE:
            shutil.rmtree(part, ignore_errors=True)  # a full disk needs the room
            raise
        return path

    def _write(
        self, policy: Policy, weights: dict[str, Tensor], part: Path, state: Mapping[str, Any]
    ) -> None:
        """Write what the main process writes: model, tokenizer, an unsharded policy, the state."""
        with _as_not_written(part):
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

        Any number of processes may have written it: a process of a higher rank than those gets
        random states of its own. Raises CheckpointError, before anything is changed, when a file is
        not what was written.
        """
        with policy.world.together(f"{path.name}: its files", CheckpointError, patient=True):
            if policy.world.is_main:
                verify(path)
        if is_adapted(policy.model):
            with only_tensors(path):
                load_adapter(policy.model, path)
        else:
            with only_tensors(path):
                saved = type(policy.model).from_pretrained(path, dtype=policy.model.dtype)
            state = saved.state_dict()
            for name, tensor in policy.model.state_dict().items():
                assign(tensor, state[name])
        policy.load_state_dict(read_state(path))
        rank = policy.world.rank
        if (path / f"rng-{rank}.pt").exists():
            set_random_states(read_tensors(path / f"rng-{rank}.pt"))
        else:
            # One process more than wrote them: its states follow from those of the first.
            text = f"{digest(path / 'rng-0.pt')}-{rank}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            seed_random(seed)
        return json.loads((path / "state.json").read_text())

    def load_latest(self, policy: Policy) -> dict[str, Any]:
        """Restore the newest checkpoint that is whole; a warning names what is wrong with others.

        Newer ones that are not whole become `.corrupt-step-<step>`: the run will write those steps
        anew. Raises CheckpointError, and moves nothing, if there is none.
        """
        world, name = policy.world, None
        with world.together("the newest checkpoint", CheckpointError, patient=True):
            name = latest(self.folder).name if world.is_main else None
        path = self.folder / str(world.broadcast(name, "the newest checkpoint"))
        state = self.load(policy, path)
        # A later process must see the same folder: nothing moves before all have read it.
        policy.world.barrier(f"{path.name}: read")
        if policy.world.is_main:
            for corrupt in newest_first(self.folder):
                if corrupt == path:
                    break
                put_aside(corrupt, f".corrupt-{corrupt.name}")
            self._link(LATEST, path)
            self._prune(path)  # a run that was killed between the writing and that left one more
        policy.world.barrier(f"{path.name}: the newest")
        return state

    def mark_best(self, policy: Policy, step: int) -> None:
        """Mark the checkpoint of that step as the best: it stays, and the one before need not."""
        if policy.world.is_main:
            path = self.folder / f"{PREFIX}{step:06d}"
            self._link(BEST, path)
            self._prune(newest_first(self.folder)[0])

    def _link(self, name: str, path: Path) -> None:
        part = self.folder / f".{name}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
        link = self.folder / name
        if link.is_dir() and not link.is_symlink():  # copied by something that follows links
            put_aside(link, f".former-{name}")
        part.replace(link)
        sync(self.folder)

    def _prune(self, written: Path) -> None:
        """Remove all but `written`, the newest others, and the best one."""
        best = self.folder / BEST
        kept = {written, self.folder / best.readlink()} if best.is_symlink() else {written}
        others = [path for path in newest_first(self.folder) if path != written]
        for path in others[self._keep - 1 :]:
            if path not in kept:
                remove(path)


@contextmanager
def _as_not_written(part: Path) -> Iterator[None]:
    """Turn the errors that torch, safetensors and tokenizers raise on a full disk into
    NotWritten."""
    try:
        yield
    except Exception as error:
        # tokenizers raises a plain Exception.
        if not isinstance(error, RuntimeError | SafetensorError) and type(error) is not Exception:
            raise
        raise NotWritten(f"{part}: cannot be written: {error}") from error


def random_states() -> dict[str, Any]:
    """States of every random generator that training, tools and rewards draw from, in this process.

    They are plain values and tensors, which torch loads with weights_only.
    """
    version, numbers, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    name, keys, *position = state
    return {
        "python": (version, list(numbers), gauss),
        "numpy": (name, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "cuda_device": torch.cuda.current_device() if torch.cuda.is_available() else None,
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue from where `random_states` was called.

    On a machine with other GPUs: the state of the GPU that this process computed on goes to the GPU
    that it computes on now, and the states of the others to as many others as there are.
    """
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *position = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(states["torch"])
    saved = states["cuda"]
    count = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    if count:
        own = torch.cuda.current_device()
        # A checkpoint of before `cuda_device` was kept: as far as can be known the same one.
        before = states.get("cuda_device", own if own < len(saved) else 0)
        for device in range(min(len(saved), count)):
            torch.cuda.set_rng_state(saved[device], device)
        torch.cuda.set_rng_state(saved[before], own)


def seed_random(seed: int) -> None:
    """Seed all of them; numpy takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
