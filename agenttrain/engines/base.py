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
    """The engine was started again and needs the weights, in all training processes."""


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

        `session` names the trajectory. A later call of the same session extends the ids of the
        calls before it, so that its cache can be kept between the turns. `parent` is the session
        that waits for this one: an engine that decodes a fixed number of sessions together decodes
        this one in its parent's place. `images` stand in `token_ids` at their placeholders, in
        order. Raises EngineError, and ImagesRefused where the engine reads token ids alone.
        """

    async def release(self, session: str) -> None:
        """End a session; its cache may be dropped."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; every token sampled from now on carries `version`."""

    async def aclose(self) -> None:
        """Free what the engine holds; calls still waiting fail with EngineError."""


@runtime_checkable
class Separate(Protocol):
    """An engine with weights of its own: they are sent to it, and its copy is checked."""

    takes_adapters: bool
    """True: `update` takes only a model's adapters, by peft's names. False: it takes all weights,
    with the adapters merged into them, by the names in the model's files."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every id after the first, given those before it, at temperature 1."""

    async def sleep(self) -> None:
        """Free memory until the next `update`. Nothing may be called in between."""


@runtime_checkable
class Replicated(Protocol):
    """A `Separate` engine with several copies of the weights, each of which is checked."""

    async def verify(
        self, token_ids: Sequence[int], find_problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Check that the last update has reached every copy, and let the good copies sample.

        Every copy scores the ids, as in `score`. `find_problem` says why its scores are wrong: they
        are not those of the weights that were sent. It returns None for a good copy. Bad copies are
        taken out of service, if a good one is left. The check is kept until the next update, for
        copies that start later. Return the scores of a good copy, or those of a bad one if none is
        good: the caller then raises an error about them.
        """


@runtime_checkable
class ReadsFiles(Protocol):
    """A `Separate` engine whose copies read new weights from files.

    Used if the policy is in another process. That process writes files as `writer` does, and then
    `load` is called instead of `update`.
    """

    @property
    def writer(self) -> WeightWriter:
        """Return the writer of the files. Their folder is removed when the engine closes."""

    async def load(self, files: WeightFiles) -> None:
        """Have every copy load a version that was written."""


@runtime_checkable
class OwnNumberFormat(Protocol):
    """A `Separate` engine whose weights may have another number format than the policy's."""

    dtype: torch.dtype
    """Weights are cast to it before they are sent: half as many bytes cross between processes."""


@runtime_checkable
class ModelNames(Protocol):
    """A `Separate` engine whose model is transformers' own."""

    model_names: bool
    """True: it takes weights by their names in the model in memory. False, or no such attribute:
    by their names in the model's files, and split as in the files."""


@runtime_checkable
class Quantized(Protocol):
    """A `Separate` engine that may round its weights to a coarser format."""

    quantized: bool
    """True: a small change of the policy's weights may not change the engine's."""


@runtime_checkable
class Forgetful(Protocol):
    """A `Separate` engine that takes adapters, and drops its base weights in `sleep`."""

    lacks_base: bool
    """True: the next update has to send the base weights too, before the adapters."""


@runtime_checkable
class Metered(Protocol):
    """An engine with metrics of its own."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""


@runtime_checkable
class Placed(Protocol):
    """An engine of several servers."""

    def server_of(self, session: str) -> int | None:
        """Return the number of the server that got the last request of a session."""


@runtime_checkable
class Streaming(Protocol):
    """An engine that reports tokens while it samples them."""

    def watch(self, session: str, listener: Callable[[int], None]) -> None:
        """Call `listener` on the event loop with every token that is sampled for a session."""


@runtime_checkable
class Lockstep(Protocol):
    """An engine that repeats a run bit for bit if it knows which sessions to wait for."""

    def expect(self, sessions: Sequence[str]) -> None:
        """Expect each of these sessions, in this order, to call `generate` and then `release`.

        A session with a `parent` among them need not be expected itself.
        """
