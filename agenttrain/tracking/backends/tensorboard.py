"""TensorBoard: event files in the run folder, written without TensorFlow and without torch."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.tracking.backends.base import (
    Description,
    ExperimentTracker,
    TrackedRun,
    rollout_table,
)
from agenttrain.utils.json_lines import dumps

DT_STRING = 7


class TensorBoard(ExperimentTracker):
    """Writes a run to event files."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> int | None:
        """Open a new event file; return the last step in those of earlier starts."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.events, self.summaries, self.tensors = event_pb2, summary_pb2, tensor_pb2
        self.shape = tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]
        )
        self.text = metadata.create_summary_metadata(display_name=None, description=None)
        folder = run.folder / "tensorboard"
        steps = [
            event_pb2.Event.FromString(content).step
            for file in folder.glob("events.out.tfevents.*")
            for content in RawEventFileLoader(str(file)).Load()
        ]
        self.writer = EventFileWriter(str(folder))
        if not run.started:
            self._write(0, [self._text("config", f"```\n{dumps(config)}\n```")])
        return max(steps, default=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event, so that a step is in the file completely or not at all."""
        value = self.summaries.Summary.Value
        self._write(step, [value(tag=n, simple_value=v) for n, v in metrics.items()])

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the rollouts as a table of the page `text`."""
        columns, rows = rollout_table(records)
        cells = [
            columns,
            ["---"] * len(columns),
            *([_cell(value) for value in row] for row in rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        self._write(step, [self._text("rollouts", table)])

    def flush(self) -> None:
        """Write what the writer's thread has queued."""
        self.writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self.writer.close()

    def describe(self, run: TrackedRun) -> Description:
        """Return the command that shows all runs of the experiment."""
        return Description(view=shlex.join(["tensorboard", "--logdir", str(run.shared)]))

    def _write(self, step: int, values: list[Any]) -> None:
        summary = self.summaries.Summary(value=values)
        event = self.events.Event(wall_time=time.time(), step=step, summary=summary)
        self.writer.add_event(event)

    def _text(self, tag: str, text: str) -> Any:
        content = text.encode("utf-8", "replace")
        tensor = self.tensors.TensorProto(
            dtype=DT_STRING, string_val=[content], tensor_shape=self.shape
        )
        return self.summaries.Summary.Value(tag=tag, metadata=self.text, tensor=tensor)


def _cell(value: object) -> str:
    """Return a value as a cell of a Markdown table, with markup escaped."""
    text = "" if value is None else str(value)
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(mark, entity)
    return text.replace("\n", "<br>")
