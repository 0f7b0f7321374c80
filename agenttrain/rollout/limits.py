"""Limits on a rollout's calls: which are refused, and which repeat themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from agenttrain.types import ToolCall, ToolError, ToolResult


def refusals(
    calls: Sequence[ToolCall],
    before: Sequence[ToolResult],
    *,
    most: int | None,
    own_limit: Callable[[str], int | None],
) -> list[str | None]:
    """Why each call of a turn may not run, in words for the model; None: it may.

    `most` limits all calls of a rollout, `own_limit` those of a tool by its name; `before` are the
    results of earlier turns. Example: with ``most=None``, ``own_limit=lambda name: 1`` and nothing
    before, the calls ``[search, sql, search]`` give ``[None, None, "the limit of 1 call of search
    is reached"]``.
    """
    own = [own_limit(call.name) for call in calls]
    limited = any(limit is not None for limit in own)
    ran = Counter([result.call.name for result in before if _counts(result)] if limited else None)
    refused: list[str | None] = []
    for place, (call, limit) in enumerate(zip(calls, own, strict=True), start=len(before)):
        if most is not None and place >= most:
            refused.append(f"the limit of {most} tool calls is reached")
        elif limit is not None and call.malformed is None and ran[call.name] >= limit:
            plural = "" if limit == 1 else "s"
            refused.append(f"the limit of {limit} call{plural} of {call.name} is reached")
        else:
            ran[call.name] += 1
            refused.append(None)
    return refused


def limit_result(call: ToolCall, text: str) -> ToolResult:
    """What the model reads in place of a call that may not run."""
    return ToolResult(call=call, content=f"Error: {text}", error=ToolError.limit)


def _counts(result: ToolResult) -> bool:
    """Whether the tool ran; only those calls use up its own limit."""
    error = result.error
    return error not in (ToolError.limit, ToolError.parallel) and not (error and error.invalid_call)


def repeated(calls: Sequence[ToolCall], limit: int) -> bool:
    """Whether more than `limit` calls in a row are the same, the order of arguments aside."""
    return any(len(list(run)) > limit for _, run in groupby(map(_identity, calls)))


def _identity(call: ToolCall) -> str:
    if call.malformed is not None:
        return call.text
    try:
        return json.dumps([call.name, call.arguments], sort_keys=True)
    except (RecursionError, ValueError):  # nested as deeply as could just be parsed
        return call.text
