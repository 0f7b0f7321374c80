"""`Engine`, the interface behind which tokens are sampled, and protocols of special engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agenttrain.engines.config import Sampling
from agenttrain.types import AgenttrainError, Completion, PlacedImage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from agenttrain.engines.weight_files import WeightFiles, WeightWriter


class EngineError(AgenttrainError):
    """The engine cannot serve a request; it fails that rollout only."""


class EngineDead(EngineError):
    """The engine will never serve a request again: the run ends."""

    everywhere = False
    """True: all training processes raise it at this point, and can save together."""


class EngineRestarted(EngineError):
    """The engine died and was started again: it needs the policy's weights, then the request again.

    All training processes raise it at this point.
    """


class ImagesRefused(EngineError):
    """Images were sent to an engine that reads token ids alone."""


def refuse_images(engine: object, images: Sequence[object], session: str) -> None:
    """Raise ImagesRefused if there are any images, for an engine that cannot read them."""
    if images:
        raise ImagesRefused(
            f"session={session!r}: {len(images)} images were sent, and {type(engine).__name__} "
            "reads token ids alone. Use rows and tools without images."
        )


class Engine(Protocol):
    """Samples completions of token ids.

    Cancelling the task that awaits `generate` aborts the request.
    """

    max_context: int
    """Most tokens (prompt and completion) of one sequence."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Continue `token_ids` by at most `sampling.max_tokens` tokens.

        `session` names the trajectory: a later call of the same session extends what it sent and
        got before, so that its cache can be kept between the turns. `parent` is the session that
        waits for this one, which takes its seat where an engine gives out seats. `images` stand in
        `token_ids` at their placeholders, in order; raises ImagesRefused where the engine reads
        token ids alone.
        """
        ...

    async def release(self, session: str) -> None:
        """End a session; its cache may be dropped."""
        ...

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; every token sampled from now on carries `version`."""
        ...

    async def aclose(self) -> None:
        """Free what the engine holds; calls still waiting fail with EngineError."""
        ...


@runtime_checkable
class Separate(Protocol):
    """An engine with weights of its own: they are sent to it, and its copy is checked."""

    takes_adapters: bool
    """True: `update` takes a model's adapters as they are, by peft's names, and no other weights;
    False: it takes all weights, with the adapters merged into them, by the names in the model's
    files."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every id after the first, given those before it, at temperature 1."""
        ...

    async def sleep(self) -> None:
        """Give memory back until the next `update`; the engine takes no calls in between."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """A `Separate` engine with several copies of the weights, each of which is checked.

    After `update` it samples nothing for rollouts before `verify` has passed a copy.
    """

    async def verify(
        self, token_ids: Sequence[int], problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Score the ids by every copy, as `score`, and sample from those without a problem.

        `problem` says what is wrong with a copy's scores; None: nothing. It is kept until the next
        update, for copies that come later. Return the scores of a good copy; if there is none,
        those of a bad one.
        """
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A `Separate` engine whose copies read new weights from files.

    For weights of another process: it writes them as `writer` does, and `load` takes the place of
    `update`.
    """

    @property
    def writer(self) -> WeightWriter:
        """Return the writer of its files, whose folder goes when the engine does."""
        ...

    async def load(self, files: WeightFiles) -> None:
        """Have every copy load a version, as `update` does once it has written one."""
        ...


@runtime_checkable
class OwnNumberFormat(Protocol):
    """A `Separate` engine whose weights may have another number format than the policy's."""

    dtype: torch.dtype
    """Weights are cast to it before they are sent: half as many bytes cross between processes."""


@runtime_checkable
class ModelNames(Protocol):
    """A `Separate` engine whose model is transformers' own."""

    model_names: bool
    """True: it takes weights by their names in the model in memory; False, as without the
    attribute: by those of the model's files, in the files' pieces."""


@runtime_checkable
class Quantized(Protocol):
    """A `Separate` engine that may round the weights that it is sent to a coarser format."""

    quantized: bool
    """True: its weights may stay the same where the policy's changed a little."""


@runtime_checkable
class Forgetful(Protocol):
    """A `Separate` engine that takes adapters, and forgets the weights under them in `sleep`."""

    lacks_base: bool
    """True: the next update has to bring the weights under the adapters too, before them."""


@runtime_checkable
class Metered(Protocol):
    """An engine with metrics of its own."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        ...


@runtime_checkable
class Placed(Protocol):
    """An engine of several servers."""

    def server_of(self, session: str) -> int | None:
        """Return the number of the server that had the last request of a session."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An engine that reports tokens while it samples them."""

    def watch(self, session: str, listener: Callable[[int], None]) -> None:
        """Call `listener` with every token that is sampled for a session, until its release.

        The calls are made on the event loop of `generate`, in order; those of a completion come
        before `generate` returns it.
        """
        ...


@runtime_checkable
class Lockstep(Protocol):
    """An engine that can repeat a run bit for bit if it knows which rollouts to wait for."""

    def expect(self, sessions: Sequence[str]) -> None:
        """These sessions, in this order, will each call `generate` and finally `release`.

        A session that one of them waits for need not be expected: it names it as its `parent`.
        """
        ...
