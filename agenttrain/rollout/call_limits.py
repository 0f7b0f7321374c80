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
    max_calls: int | None,
    tool_limit: Callable[[str], int | None],
) -> list[str | None]:
    """Return for each call of a turn why a limit forbids it, in words for the model, or None.

    `max_calls` limits all calls of a rollout, `tool_limit(name)` those of one tool. `before` are
    the results of earlier turns. Example: with no `max_calls`, a limit of 1 for each tool and
    nothing before, the calls ``[search, sql, search]`` give ``[None, None, "the limit of 1 call of
    search is reached"]``.
    """
    tool_limits = [tool_limit(call.name) for call in calls]
    run_counts: Counter[str] = Counter()
    if any(limit is not None for limit in tool_limits):
        # Calls that never reached the tool do not use up its own limit.
        for result in before:
            error = result.error
            refused = error in (ToolError.limit, ToolError.parallel)
            if not refused and not (error and error.invalid_call):
                run_counts[result.call.name] += 1
    refusals: list[str | None] = []
    for index, (call, limit) in enumerate(zip(calls, tool_limits, strict=True)):
        if max_calls is not None and len(before) + index >= max_calls:
            refusals.append(f"the limit of {max_calls} tool calls is reached")
        elif limit is not None and call.malformed is None and run_counts[call.name] >= limit:
            plural = "" if limit == 1 else "s"
            refusals.append(f"the limit of {limit} call{plural} of {call.name} is reached")
        else:
            if call.malformed is None:
                run_counts[call.name] += 1
            refusals.append(None)
    return refusals


def repeats_a_call(calls: Sequence[ToolCall], limit: int) -> bool:
    """Return True if more than `limit` calls in a row are equal.

    Malformed calls are equal if their texts are. Others are equal if they have the same name and
    the same arguments, whatever the order of the arguments.
    """
    texts = []
    for call in calls:
        text = call.text
        if call.malformed is None:
            # Fails for arguments that are nested too deeply: then the texts are compared.
            with suppress(RecursionError, ValueError):
                text = json.dumps([call.name, call.arguments], sort_keys=True)
        texts.append(text)
    return any(len(list(run)) > limit for _, run in groupby(texts))
