"""`RecordedToolbox`: answers calls with what tools answered once, and runs none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import ToolCall, ToolContext, ToolResult, ToolUnavailable


class RecordedToolbox(Toolbox):
    """The schemas, limits and stop tools of toolboxes, with the recorded results of one rollout."""

    def __init__(self, toolboxes: Sequence[Toolbox], results: Iterable[ToolResult]) -> None:
        """`results` are found by the ids of their calls, which turns may repeat."""
        named = [(name, toolbox) for toolbox in toolboxes for name in toolbox.names]
        super().__init__(
            {name: toolbox.tool(name) for name, toolbox in named},
            limits={name: toolbox.limits(name) for name, toolbox in named},
            stop_tools=sorted(name for name, toolbox in named if name in toolbox.stop_tools),
        )
        self._results: dict[str, list[ToolResult]] = {}
        for result in results:
            self._results.setdefault(result.call.id, []).append(result)

    async def execute(
        self,
        calls: Sequence[ToolCall],
        context_of: Callable[[ToolCall], ToolContext],
        *,
        allowed: Sequence[str] | None = None,
    ) -> list[ToolResult]:
        """The recorded results; raises ToolUnavailable for a call that has none."""
        for call in calls:
            if not self._results.get(call.id):
                raise ToolUnavailable(f"no result was recorded for the call {call.id} {call.name}")
        return [replace(self._results[call.id].pop(0), call=call) for call in calls]

    async def release(self, rollout_id: str) -> None:
        """Do nothing: no tool was used."""
