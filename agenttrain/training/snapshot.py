"""Snapshots: the files of a checkpoint that one process writes.

A snapshot is complete in memory, and a copy if training is to go on while it is written. The
weights are a model folder of transformers, written by all processes together:

    model.safetensors                     all weights, by a policy that is not sharded
    model-00001-of-00002.safetensors, …   otherwise one file by each process that holds a part
    model.safetensors.index.json          then names each weight's file

Every weight has one writer. The others send it their parts, so that no process ever holds more of
the model than it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.training.file_names import in_files, one_by_one
from agenttrain.training.lora import WEIGHTS_FILE, adapter_weights, is_adapted
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import PART, WHOLE, gather_to, own_part, shard_of
from agenttrain.training.tensor_files import open_hashed, write_tensors
from agenttrain.utils.files import sync

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
AT_ONCE = 2**26
"""Bytes of weights that are sent to their writers at once."""


@dataclass(slots=True)
class Snapshot:
    """The files of a checkpoint that one process writes, with what goes into them.

    `take_snapshot` makes it, `take_weights` adds the weights, and `write` writes the files and
    drops them. A second call of `write` writes the files that were added since: a checkpoint that
    is not made in the background writes the other files while the weights are gathered.
    """

    writers: dict[str, Callable[[Path], str]] = field(default_factory=dict)
    """Name of a file -> function that writes it and returns its sha256."""
    weights: tuple[str, dict[str, int]] | None = None
    """For the index, if the weights are in several files: (name of this process's file, bytes of
    each weight in it)."""

    def take_weights(self, policy: Policy, *, copies: bool) -> None:
        """Add the weights that this process writes. All processes call it together.

        With `copies` they share no memory with the model, which may be trained before they are
        written. Of an adapted model only the adapters are written, by the main process: they are
        small. Other weights are divided among the processes if the model is sharded.
        """
        world, model = policy.world, policy.model
        if is_adapted(model):
            # In all processes, because sharded adapters are gathered.
            adapters = {n: _on_cpu(t, copies) for n, t in adapter_weights(model).items()}
            if world.is_main:
                self.writers[WEIGHTS_FILE] = partial(_save_weights, adapters)
            return
        file, tensors = own_weights(model, is_main=world.is_main, copies=copies)
        if tensors:
            self.writers[file] = partial(_save_weights, tensors)
        # Several files: `finish` writes an index of the weights in each.
        if shard_of(model) is not None and tensors:
            self.weights = (file, {name: t.nbytes for name, t in tensors.items()})

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files and force them to disk. Return their sha256 by name."""
        digests = {}
        # A file's tensors are free as soon as it is written.
        for name in list(self.writers):
            digests[name] = self.writers.pop(name)(folder / name)
        for name in digests:  # at the end, so that the disk writes while the others are hashed
            sync(folder / name)
        return digests


def take_snapshot(policy: Policy, rng: Mapping[str, Any], *, copies: bool) -> Snapshot:
    """Return a snapshot without weights. With `copies` it shares no memory with the policy.

    It has the random states `rng`, which are copies already, and the policy's state besides the
    weights: the optimizer's and the step. The state is in the file `WHOLE`, or in a `PART` by each
    process of a sharded policy.
    """
    world, shard = policy.world, shard_of(policy.model)
    snapshot = Snapshot()
    snapshot.writers[f"rng-{world.rank}.pt"] = partial(save_hashed, rng)
    if shard is None and world.is_main:
        state = policy.state_dict()
        state = own_part(state, copies=True) if copies else state  # without parts: only copies
        snapshot.writers[WHOLE] = partial(save_hashed, state)
    elif shard is not None and not shard.replica:  # other replicas hold the same parts
        # Sharded tensors become this process's part of them, also without copies.
        state = own_part(policy.state_dict(), copies=copies)
        snapshot.writers[PART.format(shard.index)] = partial(save_hashed, state)
    return snapshot


def save_hashed(state: Any, path: Path) -> str:
    """Write tensors and plain values as `torch.save` does. Return the file's sha256."""
    with open_hashed(path) as file:
        stream: Any = file  # torch needs `write` and `flush` only
        torch.save(state, stream)
    return file.digest


def _save_weights(tensors: Mapping[str, Tensor], path: Path) -> str:
    return write_tensors(path, tensors, METADATA)


def own_weights(
    model: PreTrainedModel, *, is_main: bool, copies: bool
) -> tuple[str, dict[str, Tensor]]:
    """Return the name of this process's file, and the weights that it writes into it, by name.

    The weights are on the CPU, with `copies` in memory of their own, which later updates of the
    model do not change. All processes that hold a sharded model call it together.
    """
    weights, shard = _weights_to_save(model), shard_of(model)
    tensors: dict[str, Tensor] = {}
    if shard is None:  # not sharded: the main process writes all
        if is_main:
            tensors = {n: _on_cpu(t.detach(), copies) for n, t in weights.items()}
        return "model.safetensors", _as_in_files(model, tensors)
    file = f"model-{shard.index + 1:05}-of-{shard.count:05}.safetensors"
    if not shard.replica:  # a replica writes nothing: another node's processes hold the same
        owners = _assign_owners(model, weights, shard.count)
        tensors = _gather_owned(weights, owners, shard.index, copies=copies)
    return file, _as_in_files(model, tensors)


def _gather_owned(
    weights: Mapping[str, Tensor], owners: Mapping[str, int], index: int, *, copies: bool
) -> dict[str, Tensor]:
    """Send each weight to its owner; return those that process `index` owns, on the CPU."""
    owned: dict[str, Tensor] = {}
    waiting: dict[str, Callable[[], Tensor | None]] = {}  # functions that `gather_to` returned
    size = 0  # bytes on their way

    def receive() -> None:
        """Wait for the weights that are on their way; store those that this process owns."""
        for name, wait in waiting.items():
            full = wait()
            if full is not None:
                owned[name] = _on_cpu(full, copies)
        waiting.clear()

    for name, tensor in weights.items():
        is_owner = owners[name] == index
        waiting[name] = gather_to(tensor.detach(), owners[name], is_owner=is_owner)
        size += tensor.nbytes
        if size > AT_ONCE:  # not after each weight, which would cost a round trip
            receive()
            size = 0
    receive()
    return owned


def weights_index(shares: Iterable[tuple[str, dict[str, int]]]) -> dict[str, Any]:
    """Return the content of the index file, from (file, {name: bytes}) of each process."""
    shares = list(shares)
    return {
        "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in shares)},
        "weight_map": dict(sorted((name, file) for file, sizes in shares for name in sizes)),
    }


def _weights_to_save(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's weights and buffers by name, tied ones only under the name in files.

    transformers has a table of ties: ``{"lm_head.weight": "model.embed_tokens.weight"}``. Both are
    one tensor, and its files have the second name. So a name that is a key of the table gives way
    to another name of its tensor.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = set(model.all_tied_weights_keys)
    saved_names: dict[int, str] = {}  # by the tensor's id
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        earlier_name = saved_names.get(id(tensor))
        # The first name of a tensor, unless that is a key of the table: then the next one.
        if name not in ignored and (earlier_name is None or earlier_name in tied):
            saved_names[id(tensor)] = name
    # In the order of `state`, each tensor under the name that was chosen for it.
    return {name: state[name] for name in state if saved_names.get(id(state[name])) == name}


def _on_cpu(tensor: Tensor, copies: bool) -> Tensor:
    """Return the tensor on the CPU. With `copies` it shares no memory with `tensor`."""
    on_cpu = tensor.cpu()
    return on_cpu.clone() if copies and on_cpu is tensor else on_cpu


def _as_in_files(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes that the model's files have."""
    return {name: tensor.contiguous() for name, tensor in in_files(model, weights).items()}


def _assign_owners(
    model: PreTrainedModel, weights: Mapping[str, Tensor], count: int
) -> dict[str, int]:
    """Return the index of the process that writes each weight, by the weight's name.

    All write about as many bytes: the largest weights first, each goes to the process with the
    fewest so far. If a tensor of the model's files is made of several weights, the first process
    writes all: a conversion needs its weights together.
    """
    if not one_by_one(model):
        return dict.fromkeys(weights, 0)
    loads = [0] * count  # bytes that each process writes
    owners = {}
    for name in sorted(weights, key=lambda name: (-weights[name].nbytes, name)):
        owners[name] = min(range(count), key=lambda rank: loads[rank])
        loads[owners[name]] += weights[name].nbytes
    return owners
