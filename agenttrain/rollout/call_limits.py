"""Limits on the calls of a rollout: how many, of which tool, and how often the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

from agenttrain.types import ToolCall, ToolError, ToolResult


def over_limits(
    calls: Sequence[ToolCall],
    before: Sequence[ToolResult],
    *,
    most: int | None,
    own_limit: Callable[[str], int | None],
) -> list[str | None]:
    """Return, for each call of a turn, the limit that forbids it in words for the model, or None.

    `most` limits all calls of a rollout, `own_limit(name)` those of one tool. `before` are the
    results of earlier turns. Example: with ``most=None``, ``own_limit=lambda name: 1`` and nothing
    before, the calls ``[search, sql, search]`` give ``[None, None, "the limit of 1 call of search
    is reached"]``.
    """
    own = [own_limit(call.name) for call in calls]
    ran: Counter[str] = Counter()
    if any(limit is not None for limit in own):
        # Calls that never reached the tool do not use up its own limit.
        for result in before:
            error = result.error
            if error not in (ToolError.limit, ToolError.parallel) and not (
                error and error.invalid_call
            ):
                ran[result.call.name] += 1
    refusals: list[str | None] = []
    for place, (call, limit) in enumerate(zip(calls, own, strict=True), start=len(before)):
        if most is not None and place >= most:
            refusals.append(f"the limit of {most} tool calls is reached")
        elif limit is not None and call.malformed is None and ran[call.name] >= limit:
            plural = "" if limit == 1 else "s"
            refusals.append(f"the limit of {limit} call{plural} of {call.name} is reached")
        else:
            ran[call.name] += call.malformed is None
            refusals.append(None)
    return refusals


def repeats_a_call(calls: Sequence[ToolCall], limit: int) -> bool:
    """Return True if more than `limit` calls in a row are equal, the order of arguments aside."""
    texts = []
    for call in calls:
        text = call.text
        if call.malformed is None:
            # Arguments may be nested as deeply as could just be parsed.
            with suppress(RecursionError, ValueError):
                text = json.dumps([call.name, call.arguments], sort_keys=True)
        texts.append(text)
    return any(len(list(run)) > limit for _, run in groupby(texts))
