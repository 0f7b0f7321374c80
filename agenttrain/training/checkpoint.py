"""Checkpoints: complete or absent, never half-written.

checkpoints/step-000010/   model.safetensors, config.json, tokenizer: loadable by transformers
                           (with LoRA: adapter_model.safetensors and adapter_config.json, on a base
                           in 4 bits base_quantization.json;
                           sharded: model-00001-of-00002.safetensors, …)
                           policy.pt      optimizer and step; sharded: policy-0.pt, policy-1.pt, …
                           rng-0.pt       python, numpy and torch random states of process 0
                           state.json     state of the training loop
                           manifest.json  sha256 of each file above; written last
checkpoints/latest         link to the newest
checkpoints/best           link to the best by its evaluation (checkpoint.keep_best)
checkpoints/best-<source>  link to the best of one source of a mixture

Each process hashes what it writes, while it writes it. `Checkpoints.begin` copies the policy and
writes the copy in a thread, and `finish` puts the files in their place: a checkpoint is finished
by all processes together, between two steps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from agenttrain.engines.language_model import encoder_weights
from agenttrain.engines.mixers import keeping_float32
from agenttrain.engines.vision import PROCESSOR_FILE, copy_processors
from agenttrain.training.checkpoint_files import (
    PREFIX,
    PRUNED,
    CheckpointError,
    NotWritten,
    digest,
    newest_first,
    only_tensors,
    put_aside,
    recover,
    replace,
    seal,
    verify,
)
from agenttrain.training.lora import is_adapted, load_adapter, save_adapter_config
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import assign, is_sharded, read_state, read_tensors, shard_of
from agenttrain.training.sliced_weights import (
    SlicedWeights,
    WrongWeights,
    why_not_sliced,
)
from agenttrain.training.snapshot import INDEX, Snapshot, take_snapshot, weights_index
from agenttrain.training.world import World
from agenttrain.utils.files import sync

WAKE_S = 0.5
"""Longest time that a wait for the writing thread delays the handling of signals."""
FULL = 1 << 20
"""Free bytes below which a file that could not be written is put down to a full disk."""
LATEST, BEST = "latest", "best"
UNWRITABLE = (OSError, CheckpointError)
"""Errors of a checkpoint that cannot be written. Their unfinished folder is removed."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    A run calls `load_latest` when it is resumed. Then `save`, or `begin` and later `finish`, for
    each checkpoint, and `mark_best` after evaluations.

    A checkpoint has three phases. `_begin` makes an unfinished folder with the small files. A
    `Writing` writes the large ones, of each process its own: in `begin` by a thread, from a copy,
    while training goes on; in `save` at once. `finish` then seals the folder, puts it in place, and
    removes checkpoints that are not to be kept.

    Where files are read or written the processes wait for each other with `patient`: without a time
    limit, as long as none of them has died.
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
        self._writing: Writing | None = None

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
        """Write the checkpoint `step-<step>` and return its folder. All processes together.

        `state` is JSON that `load` returns with `step` added. `rng` are the `random_states` that
        `load` restores; None: the current ones. If a process dies meanwhile, earlier checkpoints
        are as they were. Raises OSError or CheckpointError if it cannot be written.
        """
        writing = self._begin(policy, step, state, rng, copies=False)
        # Gathering the weights takes long. Meanwhile a thread writes all other large files: the
        # optimizer's state and the random states.
        writing.start()
        self._take_weights(writing, policy, copies=False)  # waits for the thread at the end
        writing.write()  # the files that were added since: the weights, in this thread
        path = self.finish(policy.world)
        assert path is not None  # it was begun above
        return path

    def begin(
        self,
        policy: Policy,
        *,
        step: int,
        state: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a checkpoint in the background: copy the policy, and write the copy in a thread.

        `finish` waits for the thread and completes the checkpoint. `state` and `rng` are those of
        `save`: JSON and random states that `load` returns and restores.
        """
        writing = self._begin(policy, step, state, rng, copies=True)
        # Copies must be complete before training goes on: the thread starts last, and writes all.
        self._take_weights(writing, policy, copies=True)
        writing.start()

    def _take_weights(self, writing: Writing, policy: Policy, *, copies: bool) -> None:
        """Add the weights to the snapshot of `writing`.

        `begin` needs `copies`, which later updates do not change. `save` writes at once. It has
        started the thread that writes the other files: wait for it at the end.
        """
        try:
            writing.snapshot.take_weights(policy, copies=copies)
        except BaseException as error:
            # Forget the checkpoint: the next `finish` would complete it without its weights.
            self._writing = None
            # KeyboardInterrupt and SystemExit (a second SIGTERM) leave without waiting.
            if isinstance(error, Exception):
                writing.wait()
            raise
        writing.wait()

    @property
    def pending(self) -> int | None:
        """Step of the checkpoint that was begun and is not finished. None: there is none."""
        return None if self._writing is None else self._writing.step

    def finish(self, world: World, *, wait: bool = True) -> Path | None:
        """Complete the checkpoint that was begun and return its folder. All processes together.

        Returns None if none was begun, or, without `wait`, while a process is still writing. Raises
        OSError or CheckpointError if the checkpoint cannot be written. The processes wait for each
        other `patient`ly: without a time limit, as long as none of them has died.
        """
        writing = self._writing
        if writing is None:
            return None
        name = writing.path.name
        if wait:
            writing.wait()
        elif not all(world.gather([writing.written], f"{name}: whether it is written")):
            return None
        self._writing = None
        try:
            # If writing failed in one process, this raises its error there, and PeerFailed in the
            # other processes.
            shares = world.exchange(
                [(writing.digests, writing.snapshot.weights)],
                f"{name}: each process's part",
                failure=writing.failure,
                patient=True,
            )
            # An error of the main process in this block raises PeerFailed in the others.
            with world.together(f"{name}: the complete checkpoint", *UNWRITABLE, patient=True):
                if world.is_main:
                    self._complete(writing, shares)
        except UNWRITABLE:
            shutil.rmtree(writing.part, ignore_errors=True)  # a full disk needs the space
            raise
        return writing.path

    def _complete(
        self,
        writing: Writing,
        shares: Sequence[tuple[Mapping[str, str], tuple[str, dict[str, int]] | None]],
    ) -> None:
        """Write the last files of a checkpoint, and put its folder in place. Main process only.

        `shares` has of each process the sha256 of the files that it wrote, by name, and its
        `Snapshot.weights`.
        """
        part, path = writing.part, writing.path
        files = [weights for _, weights in shares if weights is not None]
        if files:  # sharded: an index names the file of each weight
            (part / INDEX).write_text(json.dumps(weights_index(files), indent=2) + "\n")
        (part / "state.json").write_text(json.dumps(writing.state))
        all_digests = {name: sha256 for digests, _ in shares for name, sha256 in digests.items()}
        seal(part, all_digests)
        replace(part, path)
        self._link(LATEST, path)
        self._prune(path)

    def _begin(
        self,
        policy: Policy,
        step: int,
        state: Mapping[str, Any] | None,
        rng: Mapping[str, Any] | None,
        *,
        copies: bool,
    ) -> Writing:
        """Make the unfinished folder with its small files; return the `Writing` of the large ones.

        Its snapshot lacks the weights, which `_take_weights` adds. With `copies` the snapshot
        shares no memory with the policy, which may then be trained while it is written.

        The main process makes the folder. The others wait for it without a time limit (`patient`),
        and raise PeerFailed if it fails.
        """
        world, model = policy.world, policy.model
        self.finish(world)  # one checkpoint is written at a time
        rng = random_states() if rng is None else rng
        path = self.folder / f"{PREFIX}{step:06d}"
        part = self.folder / f".{path.name}.part"
        try:
            with world.together(f"{path.name}: its folder", *UNWRITABLE, patient=True):
                if world.is_main:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
                    with as_not_written(part):
                        if is_adapted(model):
                            save_adapter_config(model, part)
                        else:
                            # The configs alone: the snapshot writes the weights. Given no weights
                            # transformers still writes a model.safetensors, which is removed.
                            model.save_pretrained(part, state_dict={})
                            (part / "model.safetensors").unlink(missing_ok=True)
                        self.tokenizer.save_pretrained(part)
                        if model.name_or_path and encoder_weights(model):
                            copy_processors(Path(model.name_or_path), part)
                        if policy.vision is not None:
                            (part / PROCESSOR_FILE).write_bytes(policy.vision.settings)
        except UNWRITABLE:  # in the main process alone: the others get PeerFailed
            shutil.rmtree(part, ignore_errors=True)
            raise
        snapshot = take_snapshot(policy, rng, copies=copies)
        self._writing = Writing(path, part, step, {**(state or {}), "step": step}, snapshot)
        return self._writing

    def _load(self, policy: Policy, path: Path) -> dict[str, Any]:
        """Restore a verified checkpoint, and return its JSON state.

        It has weights, the optimizer's state and the random states of each process.
        """
        world = policy.world
        with world.together(f"{path.name}: its content", CheckpointError, patient=True):
            try:
                load_weights(policy.model, path, world)
                policy.load_state_dict(read_state(path, shard_of(policy.model)))
            except WrongWeights as error:
                raise CheckpointError(str(error)) from error
            except CheckpointError as error:
                if world.size > 1:
                    error.args = (f"rank {world.rank}: {error}",)
                raise
        rank = world.rank
        if (path / f"rng-{rank}.pt").exists():
            set_random_states(read_tensors(path / f"rng-{rank}.pt"))
        else:
            # There were fewer processes: derive this one's states from those of the first.
            text = f"{digest(path / 'rng-0.pt')}-{rank}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            seed_random(seed)
        return json.loads((path / "state.json").read_text())

    def load_latest(self, policy: Policy) -> dict[str, Any]:
        """Restore the newest intact checkpoint, and warn of newer ones that are not intact.

        Those are renamed `.corrupt-step-<step>`, since the run will write these steps again. Raises
        CheckpointError, and renames nothing, if no checkpoint is intact.
        """
        path = self._newest_intact(policy.world)
        state = self._load(policy, path)
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

    def _newest_intact(self, world: World) -> Path:
        """Return the newest checkpoint that verifies. Each process verifies a part of its files."""
        # The main process's list is everybody's: a file system of a cluster may show another list
        # to another machine, and then the processes would verify different checkpoints.
        names = [path.name for path in newest_first(self.folder)] if world.is_main else []
        for name in world.broadcast(names, "the checkpoints"):
            local_problem = None
            try:
                verify(self.folder / name, world.rank, world.size)
            except CheckpointError as error:
                local_problem = str(error)
            # `patient`: large files take long to read, so that there is no time limit.
            problems = world.exchange([local_problem], f"{name}: its files", patient=True)
            problem = next((problem for problem in problems if problem is not None), None)
            if problem is None:
                return self.folder / name
            if world.is_main:
                print(f"warning: checkpoint skipped: {problem}", file=sys.stderr)
        # The main process alone words the error; `together` raises PeerFailed in the others.
        with world.together("the newest checkpoint", CheckpointError):
            if world.is_main:
                raise CheckpointError(f"{self.folder}: no intact checkpoint. Start a new run.")
        raise AssertionError  # for the type checker: the block above raises in every process

    def mark_best(self, policy: Policy, step: int, sources: Sequence[str] = ("",)) -> None:
        """Mark the checkpoint of `step` as the best of these sources, or of the run (``""``).

        The former best may be pruned again, unless it is the best of another source.
        """
        if policy.world.is_main:
            path = self.folder / f"{PREFIX}{step:06d}"
            for source in sources:
                self._link(f"{BEST}-{source}" if source else BEST, path)
            self._prune(newest_first(self.folder)[0])  # none was written now: keep the newest

    def _link(self, name: str, path: Path) -> None:
        """Point the link `name` to a checkpoint, atomically."""
        part = self.folder / f".{name}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
        link = self.folder / name
        # A copy of the run by a tool that follows links has a folder in the link's place.
        if link.is_dir() and not link.is_symlink():
            put_aside(link, f".former-{name}")
        part.replace(link)
        sync(self.folder)

    def _prune(self, written: Path) -> None:
        """Remove all checkpoints but `written`, the newest others up to `keep`, and the best ones.

        `written` is not the newest in a run that was resumed from an older checkpoint.
        """
        links = [link for link in self.folder.glob(f"{BEST}*") if link.is_symlink()]
        protected = {written, *(self.folder / link.readlink() for link in links)}
        other_checkpoints = [path for path in newest_first(self.folder) if path != written]
        for path in other_checkpoints[self._keep - 1 :]:  # `written` is one of the `keep`
            if path not in protected:
                # Renamed first: a process that dies meanwhile leaves no half of a checkpoint.
                put_aside(path, f"{PRUNED}{path.name}")
                shutil.rmtree(path.with_name(f"{PRUNED}{path.name}"))


@dataclass(slots=True)
class Writing:
    """A checkpoint that `Checkpoints` has begun, as far as this process writes it.

    `start` runs `write` in a thread, and `wait` waits for it. `Checkpoints.save` then calls `write`
    once more for the weights, in the calling thread. `Checkpoints.finish` then reads the fields.
    """

    path: Path
    """Folder of the complete checkpoint."""
    part: Path
    """Folder until then."""
    step: int
    state: dict[str, Any]
    """JSON that `Checkpoints.load_latest` returns."""
    snapshot: Snapshot
    """Files that this process writes."""
    thread: threading.Thread | None = None
    written: bool = False
    """True once `write` has ended, in an error too."""
    digests: dict[str, str] = field(default_factory=dict)
    """sha256 of each written file, by name."""
    failure: Exception | None = None
    """Error of `write`. `Checkpoints.finish` raises it, and PeerFailed in the other processes."""

    def start(self) -> None:
        """Begin to write in a thread."""
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self.thread.start()

    def write(self) -> None:
        """Write the files that the snapshot holds, and drop them from it; store an error.

        `save` calls this twice. The first call, in a thread, writes the optimizer's state and the
        random states while the weights are gathered. The second one writes the weights, which
        were added to the snapshot since.
        """
        try:
            if self.failure is None:  # after an error the checkpoint is given up
                with as_not_written(self.part):  # gives errors of libraries one type, NotWritten
                    self.digests |= self.snapshot.write(self.part)
        except Exception as error:
            self.failure = error
        self.written = True

    def wait(self) -> None:
        """Wait for the thread, in short joins: Python handles signals only between two of them."""
        while self.thread is not None and self.thread.is_alive():
            self.thread.join(WAKE_S)


@contextmanager
def as_not_written(part: Path) -> Iterator[None]:
    """Turn errors of torch, safetensors and tokenizers while they write into NotWritten.

    An OSError stays one. If it names no file, it gets the name of the folder `part`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(part)) from error
    except Exception as error:
        # tokenizers raises a plain Exception.
        if not isinstance(error, RuntimeError | SafetensorError) and type(error) is not Exception:
            raise
        reason = str(error)
        if shutil.disk_usage(part.parent).free < FULL:  # torch does not say so
            reason = f"{os.strerror(errno.ENOSPC)} ({reason})"
        raise NotWritten(f"{part}: cannot be written: {reason}") from error


def load_weights(model: PreTrainedModel, path: Path, world: World) -> None:
    """Load a checkpoint's weights into `model`. Raises WrongWeights and NotRead."""
    with only_tensors(path):
        if is_adapted(model):
            load_adapter(model, path)
        elif is_sharded(model) and why_not_sliced(path) is None:  # each process reads its slices
            SlicedWeights(model, path, world.rank).fill(model, world)
        else:
            with keeping_float32():
                state = type(model).from_pretrained(path, dtype=model.dtype).state_dict()
            for name, tensor in model.state_dict().items():
                assign(tensor, state[name])


def random_states() -> dict[str, Any]:
    """Return the states of this process's generators, as plain values and tensors."""
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

    On a machine with other GPUs, this process's current GPU gets the state of the one it used, and
    the other states go to as many GPUs as there are.
    """
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *position = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(states["torch"])
    gpu_states = states["cuda"]
    count = torch.cuda.device_count() if gpu_states and torch.cuda.is_available() else 0
    if count:
        device = torch.cuda.current_device()
        # Older checkpoints lack `cuda_device`: assume the same GPU.
        saved_device = states.get("cuda_device", device if device < len(gpu_states) else 0)
        for index in range(min(len(gpu_states), count)):
            torch.cuda.set_rng_state(gpu_states[index], index)
        torch.cuda.set_rng_state(gpu_states[saved_device], device)


def seed_random(seed: int) -> None:
    """Seed all random generators. Numpy's takes 32 bits of the seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
