"""Memory that an engine takes, for `agenttrain plan`: its parts, at each moment of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class When(StrEnum):
    """Moments of a run."""

    start = "start"
    """The model is loaded, and the engine has measured itself."""
    rollouts = "rollouts"
    update = "update"
    sync = "sync"
    """The engine is awake and gets new weights."""
    checkpoint = "checkpoint"


EVER = tuple(When)
AWAKE = (When.start, When.rollouts, When.sync, When.checkpoint)
"""Moments at which an engine that sleeps during updates holds its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """A part of a process's memory, and the moments at which it is held."""

    name: str
    bytes: int
    why: str
    """Contents, as the plan prints them."""
    when: tuple[When, ...] = EVER
    on_host: bool = False
    """The memory is the host's."""
    once: bool = False
    """Only one process of a node takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that an engine has for its KV cache, and the least that it needs to start."""

    has: int
    """Bytes. Below 0 if the engine's weights alone exceed its share."""
    needs: int
    """Bytes of one sequence of `tokens`."""
    tokens: int
    """engine.max_context."""

    @property
    def missing(self) -> int:
        """Bytes short of `needs`; above 0 the engine refuses to start."""
        return max(0, self.needs - self.has)


class ModelSizes(Protocol):
    """Sizes of the model that a run trains; each is computed when it is first read."""

    @property
    def weights(self) -> int:
        """Bytes of all weights if none is quantised: 2 a number in bfloat16, 4 in float32."""

    @property
    def held(self) -> int:
        """Bytes of all weights as the trainer stores them: fewer than `weights` with QLoRA."""

    @property
    def largest_weight(self) -> int:
        """Bytes of the largest weight."""

    @property
    def gathered(self) -> int:
        """Bytes of sharded weights that a weight sync gathers at once: a layer, or embeddings."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the weights."""

    @property
    def width(self) -> int:
        """Numbers of one token's hidden state."""

    @property
    def inner_width(self) -> int:
        """Most numbers per token that go into or out of a linear layer of a decoder layer."""

    @property
    def vocabulary(self) -> int:
        """Entries of the language-model head."""

    @property
    def token_cache(self) -> int:
        """Bytes of one token in the KV cache of all layers, in the policy's number format."""

    def key_cache(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` in the KV cache of all layers.

        A layer with a sliding window holds at most the window's tokens.
        """

    @property
    def states(self) -> int:
        """Bytes of a sequence's states in convolutions and recurrent layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Work and machine of one process, on which an engine's memory depends."""

    rows: int
    """Rollouts in flight."""
    prompt: int
    """Tokens of a prompt."""
    sampled: int
    """Most tokens of one sequence, prompt and completion, in training or evaluation."""
    limit: int
    """The engine's context, to which rows of its cache may grow."""
    on_gpu: bool
    memory: int | None
    """Bytes of a GPU, or of a node without GPUs; None: not known."""
    taken: int
    """Bytes that the process takes of a node without GPUs before the engine starts."""
    sharded: bool
    """The policy's weights are divided among the processes."""
    adapters: bool
    """The engine is sent the policy's adapters as they are, not all weights."""
    broadcast: bool = False
    """Weights reach servers by weight_sync.transport=nccl."""
    shares_gpu: bool = False
    """The server, or the copy of the policy, is on the trainer's GPU."""


Saving = tuple[str, Sequence[Any]]
"""A setting with values that need less memory, the mildest first: ``("sleep", [True])``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of an engine under its settings."""

    items: tuple[MemoryItem, ...] = ()
    room: Room | None = None
    """Room for the KV cache. None: the engine starts with any."""
    savings: tuple[Saving, ...] = ()
    """Settings of the engine that need less memory, in the order in which to try them."""


def shorter_context(max_context: int | None, load: EngineLoad) -> tuple[Saving, ...]:
    """Return the saving of a context as short as the run's sequences; () if it is not longer."""
    is_longer = max_context is None or max_context > load.sampled
    return (("max_context", [load.sampled]),) if is_longer else ()
