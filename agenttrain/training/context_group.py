"""The processes that compute one packed tree together, and what they send each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agenttrain.training.world import World
from agenttrain.types import ConfigError

Value = TypeVar("Value")


class ContextGroup:
    """`size` successive ranks of a world, as one of them sees them.

    Example: of 4 processes in groups of 2, rank 3 is `rank` 1 of the second group. All members call
    each method together, in the same order.
    """

    def __init__(self, world: World, size: int) -> None:
        """Make the groups of a world; all its processes call this together. Raises ConfigError."""
        if size < 1 or world.size % size:
            raise ConfigError(
                f"distributed.context_parallel={size}: {world.size} processes cannot be divided "
                f"into groups of {size}; set it to a divisor of {world.size}"
            )
        self.size, self.rank = size, world.rank % size
        self.sent_bytes = 0
        """Bytes of tensors that this process has sent to single members."""
        self._first = world.rank - self.rank
        """Rank in the world of the group's rank 0."""
        self._group: Any = None
        """torch's group of the members. None: this process is alone."""
        timeout = timedelta(seconds=world.timeout_s)
        # A process alone needs no group of torch's: with `size` 1 the loop has no round.
        for first in range(0, world.size if size > 1 else 0, size):
            # Every process of torch's default group has to make every group.
            group = dist.new_group(list(range(first, first + size)), timeout=timeout)
            if first == self._first:
                self._group = group
        if size > 1:
            # NCCL needs all members for a group's first operation, but `exchanging` may have only
            # two of them send and receive. So make the first one here: an all-reduce of all.
            device = "cpu" if dist.get_backend(self._group) == "gloo" else "cuda"
            self.add(torch.zeros(1, device=device))

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all members, by rank."""
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value, group=self._group)
        return parts

    def add(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the members, in place; return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def add_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of a model's trained weights over the members."""
        for weight in model.parameters():
            if weight.requires_grad:
                weight.grad = self.add(
                    torch.zeros_like(weight) if weight.grad is None else weight.grad
                )

    @contextmanager
    def exchanging(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Iterator[None]:
        """Send tensors to members and fill others from members, by rank, while the block runs.

        The block must not touch these tensors. They are complete after it.
        """
        operations = [
            dist.P2POp(dist.isend, tensor, self._first + rank, self._group)
            for rank, tensor in sends.items()
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, self._first + rank, self._group)
            for rank, tensor in receives.items()
        ]
        self.sent_bytes += sum(tensor.nbytes for tensor in sends.values())
        works = dist.batch_isend_irecv(operations) if operations else []
        yield
        for work in works:
            work.wait()

    def send(self, tensor: Tensor, rank: int) -> Any:
        """Begin to send a tensor to a member; return the work to wait for.

        The caller keeps the tensor unchanged until then.
        """
        self.sent_bytes += tensor.nbytes
        return dist.isend(tensor, self._first + rank, group=self._group)

    def receive(self, shape: Sequence[int], like: Tensor, rank: int) -> Tensor:
        """Return the next tensor that a member sends, of this shape and the format of `like`."""
        tensor = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        dist.recv(tensor, self._first + rank, group=self._group)
        return tensor
