"""Experts that vLLM returns beside a completion, as `Routes`.

Written for vLLM 0.32 (`enable_return_routed_experts`), whose Model Runner V2 records the experts of
every token that it feeds: an array [tokens - 1, layers, top_k] without a row for the last sampled
token, which was fed to nobody. With `routed_experts_prompt_start` rows of earlier prompt tokens are
left out. Layers without experts have rows of zeros.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from agenttrain.engines.base import EngineError
from agenttrain.types import Routes


def read_routes(experts: Any, sampled: int) -> Routes:
    """Return the routes by which a completion's `sampled` tokens were sampled.

    `experts` is vLLM's array [fed tokens, layers, top_k]. A token is sampled from the row of the
    token before it. The last token was never fed and has no row, so that the last `sampled` rows
    are those of the completion. Raises EngineError without an array, or for one that has too
    few rows.
    """
    if experts is None:
        raise EngineError(
            "algorithm.router_replay=rollout: vLLM returned a completion without its experts. It "
            "has to run with --enable-return-routed-experts"
        )
    if experts.ndim != 3 or len(experts) < sampled or experts.dtype.kind not in "iu":
        raise EngineError(
            f"algorithm.router_replay=rollout: vLLM returned experts as {experts.dtype} of shape "
            f"{list(experts.shape)} with {sampled} sampled tokens; expected integers, at least a "
            "row for each, by layer and expert. agenttrain reads those of vLLM 0.32"
        )
    rows = experts[len(experts) - sampled :]
    _, layers, top_k = rows.shape
    return Routes(experts=rows.astype("<u2").tobytes(), layers=layers, top_k=top_k)


def read_encoded_routes(text: str | None, sampled: int) -> Routes:
    """Return the routes of a server's answer: the base64 text of a .npy file. See `read_routes`."""
    if text is None:
        return read_routes(None, sampled)
    try:
        experts = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except ValueError as error:
        raise EngineError(
            f"algorithm.router_replay=rollout: vLLM returned experts that are no array ({error})"
        ) from error
    return read_routes(experts, sampled)
