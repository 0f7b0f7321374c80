"""Checkpoints: complete or absent, never half-written.

checkpoints/step-000010/   model.safetensors, config.json, tokenizer: loadable by transformers
                           (with LoRA: adapter_model.safetensors and adapter_config.json)
                           policy.pt      optimizer and step; sharded: policy-0.pt, policy-1.pt, …
                           rng-0.pt       python, numpy and torch random states of process 0
                           state.json     state of the training loop
                           manifest.json  sha256 of each file above; written last
checkpoints/latest         link to the newest
checkpoints/best           link to the best by its evaluation (checkpoint.keep_best)
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

from agenttrain.engines.vision import PROCESSOR_FILE
from agenttrain.training.checkpoint_files import (
    PREFIX,
    PRUNED,
    CheckpointError,
    NotWritten,
    digest,
    latest,
    newest_first,
    only_tensors,
    put_aside,
    recover,
    replace,
    seal,
    sync,
    verify,
)
from agenttrain.training.lora import adapter_weights, is_adapted, load_adapter, save_adapter
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import (
    PART,
    WHOLE,
    assign,
    full_weights,
    is_sharded,
    own_part,
    read_state,
    read_tensors,
)

LATEST, BEST = "latest", "best"
UNWRITABLE = (OSError, CheckpointError)


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Example: ``checkpoints.save(policy, step=10)``, and in a later process
    ``state = checkpoints.load_latest(policy)`` with ``state["step"] == 10``.
    """

    def __init__(self, folder: Path, *, tokenizer: Any, keep: int, main: bool = True) -> None:
        """Keep the `keep` newest checkpoints in `folder`, each with the tokenizer and its template.

        Only the `main` process removes leftovers of an earlier run: another process may start when
        the main one is already writing a checkpoint.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: keep at least 1.")
        self.folder = folder
        self.tokenizer = tokenizer
        if main:
            recover(folder)
        self._keep = keep

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
        """Write the checkpoint `step-<step>` and return its folder; all processes together.

        `state` is JSON that `load` returns with `step` added. `rng` are the `random_states` that
        `load` restores; None: the current ones. If a process dies meanwhile, earlier checkpoints
        are as they were. Raises OSError or CheckpointError if it cannot be written.
        """
        path = self.folder / f"{PREFIX}{step:06d}"
        part = self.folder / f".{path.name}.part"
        world = policy.world
        try:
            # All processes gather the weights; only the main one holds them.
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
                    torch.save(own_part(policy.state_dict()), part / PART.format(world.rank))
            with world.together(f"{path.name}: the complete checkpoint", *UNWRITABLE, patient=True):
                if world.is_main:
                    with _as_not_written(part):
                        if is_adapted(policy.model):
                            save_adapter(policy.model, part, weights)
                        else:
                            policy.model.save_pretrained(part, state_dict=weights)
                        self.tokenizer.save_pretrained(part)
                        if policy.vision is not None:
                            (part / PROCESSOR_FILE).write_bytes(policy.vision.settings)
                        if not is_sharded(policy.model):
                            torch.save(policy.state_dict(), part / WHOLE)
                    (part / "state.json").write_text(json.dumps({**(state or {}), "step": step}))
                    seal(part)
                    replace(part, path)
                    self._link(LATEST, path)
                    self._prune(path)
        except UNWRITABLE:
            shutil.rmtree(part, ignore_errors=True)  # a full disk needs the space
            raise
        return path

    def load(self, policy: Policy, path: Path) -> dict[str, Any]:
        """Restore weights, optimizer and random states from `path`; return the saved state.

        Any number of processes may have written it. Raises CheckpointError, before anything
        changes, if a file is not what was written.
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
            # There were fewer processes: derive this one's states from those of the first.
            text = f"{digest(path / 'rng-0.pt')}-{rank}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            seed_random(seed)
        return json.loads((path / "state.json").read_text())

    def load_latest(self, policy: Policy) -> dict[str, Any]:
        """Restore the newest intact checkpoint; warn of newer ones, naming what is wrong.

        Newer ones are renamed `.corrupt-step-<step>`, since the run will write those steps again.
        Raises CheckpointError, and renames nothing, if no checkpoint is intact.
        """
        world, name = policy.world, None
        with world.together("the newest checkpoint", CheckpointError, patient=True):
            name = latest(self.folder).name if world.is_main else None
        path = self.folder / str(world.broadcast(name, "the newest checkpoint"))
        state = self.load(policy, path)
        # All processes must see the same folder: rename only after all have read it.
        policy.world.barrier(f"{path.name}: read")
        if policy.world.is_main:
            for corrupt in newest_first(self.folder):
                if corrupt == path:
                    break
                put_aside(corrupt, f".corrupt-{corrupt.name}")
            self._link(LATEST, path)
            self._prune(path)  # a run killed between writing and pruning left one too many
        policy.world.barrier(f"{path.name}: the newest")
        return state

    def mark_best(self, policy: Policy, step: int) -> None:
        """Mark the checkpoint of `step` as the best: it is kept, the former best is not."""
        if policy.world.is_main:
            path = self.folder / f"{PREFIX}{step:06d}"
            self._link(BEST, path)
            self._prune(newest_first(self.folder)[0])

    def _link(self, name: str, path: Path) -> None:
        part = self.folder / f".{name}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
        link = self.folder / name
        if (
            link.is_dir() and not link.is_symlink()
        ):  # a copy of the run by a tool that follows links
            put_aside(link, f".former-{name}")
        part.replace(link)
        sync(self.folder)

    def _prune(self, written: Path) -> None:
        """Remove old checkpoints; `written`, the newest others and the best one stay."""
        best = self.folder / BEST
        kept = {written, self.folder / best.readlink()} if best.is_symlink() else {written}
        others = [path for path in newest_first(self.folder) if path != written]
        for path in others[self._keep - 1 :]:
            if path not in kept:
                # Renamed first: a process that dies meanwhile leaves no half of a checkpoint.
                put_aside(path, f"{PRUNED}{path.name}")
                shutil.rmtree(path.with_name(f"{PRUNED}{path.name}"))


@contextmanager
def _as_not_written(part: Path) -> Iterator[None]:
    """Turn errors of torch, safetensors and tokenizers on a full disk into NotWritten."""
    try:
        yield
    except Exception as error:
        # tokenizers raises a plain Exception.
        if not isinstance(error, RuntimeError | SafetensorError) and type(error) is not Exception:
            raise
        raise NotWritten(f"{part}: cannot be written: {error}") from error


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this process: python, numpy, torch.

    They are plain values and tensors, which torch can load with weights_only.
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
    """Restore the states that `random_states` returned.

    On a machine with other GPUs, the state of this process's GPU goes to its current GPU, and the
    states of the others to as many other GPUs as there are.
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
        # Older checkpoints lack `cuda_device`: assume the same GPU.
        before = states.get("cuda_device", own if own < len(saved) else 0)
        for device in range(min(len(saved), count)):
            torch.cuda.set_rng_state(saved[device], device)
        torch.cuda.set_rng_state(saved[before], own)


def seed_random(seed: int) -> None:
    """Seed all random generators; numpy takes 32 bits of the seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
