"""trackio: a dashboard in one SQLite file per project, local unless a Space or server is named."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agenttrain.tracking.backends.base import (
    Description,
    ExperimentTracker,
    TrackedRun,
    rollout_table,
    spoken,
)
from agenttrain.tracking.pictures import image_path, shown_text
from agenttrain.utils.redaction import hide_secrets

REMOTE_VARIABLES = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_WEBHOOK_URL",
    "TRACKIO_DATASET_ID",
    "TRACKIO_BUCKET_ID",
)
"""Any of these would make trackio send data to other machines."""
OURS = {"TRACKIO_SPACE_ID": "space", "TRACKIO_SERVER_URL": "server_url"}
"""Variables that a setting replaces, each with this setting's name."""
ARRIVAL_S = 60.0
"""Longest wait for trackio's own thread, which writes or sends what was logged."""
SYSTEM = "system/"
"""Beginning of the names of metrics that trackio shows on a page of their own."""


class Trackio(ExperimentTracker):
    """Writes a run to trackio."""

    def __init__(self, space: str | None = None, server_url: str | None = None) -> None:
        self.remote = {"space": space, "server_url": server_url}
        self.is_local = space is None and server_url is None

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> int | None:
        """Open the run; return the last step in the database, or None for a remote one."""
        for name in REMOTE_VARIABLES:  # they would send the run elsewhere than its settings say
            os.environ.pop(name, None)
        # trackio reads it when it is imported.
        os.environ["TRACKIO_DIR"] = str(_folder(run).absolute())
        if self.is_local:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it looks the user's account up at every start
            _folder(run).mkdir(parents=True, exist_ok=True)
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        package = Path(trackio.__file__).parent
        self.trackio, self.folder = trackio, run.folder / "rollouts"
        self.failures: list[str] = []

        # trackio swallows its exceptions and warns instead, also from its writer thread.
        def record(message: Any, category: Any, filename: str, *_: Any) -> None:
            if package in Path(filename).parents:
                self.failures.append(str(message))

        warnings.simplefilter("always")
        warnings.showwarning = record  # type: ignore[assignment]
        self.run = trackio.init(
            project=run.project,
            name=run.name,
            group=run.group,
            resume="allow" if run.started else "never",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            space_id=self.remote["space"],
            server_url=self.remote["server_url"],
        )
        self._raise_failure()
        self._stored_step = lambda: SQLiteStorage.get_max_step_for_run(
            run.project, run.name, run_id=self.run.id
        )
        self.last: int | None = None
        """Last step that was logged."""
        return (self._stored_step() or 0) if self.is_local else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; metrics of the machine go to the page of the system."""
        system = {n.removeprefix(SYSTEM): v for n, v in metrics.items() if n.startswith(SYSTEM)}
        if system:
            self.run.log_system(system)
        self.run.log({n: v for n, v in metrics.items() if not n.startswith(SYSTEM)}, step=step)
        self.last = max(step, self.last or 0)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log the rollouts as traces, and as a table."""
        import pandas

        columns, rows = rollout_table(records)
        table = self.trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))
        traces = [self.trackio.Trace(**trace(record, self._picture)) for record in records]
        self.run.log({"rollouts": traces, "rollouts_table": table}, step=step)

    def _picture(self, part: Mapping[str, Any]) -> Any:
        """Return a recorded image as trackio's, which copies its file; None if the file is gone."""
        path = image_path(part, self.folder)
        caption = shown_text([part])
        return self.trackio.Image(path, caption=caption) if path.is_file() else None

    def flush(self) -> None:
        """Wait until trackio's thread has written or sent everything; raises TimeoutError."""
        run, deadline = self.run, time.monotonic() + ARRIVAL_S
        while time.monotonic() < deadline:
            self._raise_failure()
            # The buffer keeps rows for a server that does not answer.
            if not (run._queued_logs or run._sending_batch or run._has_local_buffer):
                if self.last is None or not self.is_local:  # a server has all that was logged
                    return
                # The thread may have taken rows from its queue, and not written them yet.
                stored = self._stored_step()
                if stored is not None and stored >= self.last:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"step {self.last} was not written within {ARRIVAL_S:.0f} s")

    def finish(self) -> None:
        """End trackio's thread."""
        self.trackio.finish()
        self._raise_failure()

    def describe(self, run: TrackedRun) -> Description:
        """Return the command that opens the dashboard, and notes on variables without effect.

        Runs stay on this machine unless a setting sends them to another one: the variables by which
        trackio itself would do so are not used.
        Example: ``TRACKIO_DIR=outputs/shop/trackio trackio show --project shop``
        """
        notes = []
        for name in REMOTE_VARIABLES:
            # OURS: variable -> its setting, if there is one. self.remote: setting -> value. A user
            # who has set the setting does not rely on the variable, and needs no note.
            value, setting = os.environ.get(name), OURS.get(name)
            is_replaced = setting is not None and self.remote[setting] is not None
            if value and not is_replaced:
                remedy = f"; tracker.trackio.{setting} sends a run there" if setting else ""
                notes.append(f"trackio: {name} is set and not used{remedy}")
        if not self.is_local:
            space = f"https://huggingface.co/spaces/{self.remote['space']}"
            view = hide_secrets(self.remote["server_url"] or space)
            return Description(view=view, notes=tuple(notes))
        # Run by a path into a virtual environment that is not activated, `trackio` is not on PATH.
        beside = str(Path(sys.executable).parent / "trackio")
        program = "trackio" if shutil.which("trackio") else beside
        command = [program, "show", "--project", run.project]
        folder = shlex.quote(str(_folder(run)))
        return Description(view=f"TRACKIO_DIR={folder} {shlex.join(command)}", notes=tuple(notes))

    def _raise_failure(self) -> None:
        if self.failures:
            raise RuntimeError(self.failures[-1])


def _folder(run: TrackedRun) -> Path:
    """Return the folder of the database: the user's, or the experiment's."""
    users_folder = os.environ.get("TRACKIO_DIR")
    return Path(users_folder).expanduser() if users_folder else run.shared / "trackio"


def trace(
    record: Mapping[str, Any], picture: Callable[[Mapping[str, Any]], Any] = lambda part: None
) -> dict[str, Any]:
    """Return the arguments of a `trackio.Trace` for a rollout record.

    `picture` converts a recorded image to trackio's. Where it returns None, a text takes the
    image's place: ``[image of 640x480 pixels (9f2b0c11)]``.
    """

    def shown_part(part: Mapping[str, Any]) -> Any:
        """Return a part of a message's content as trackio shows it."""
        is_image = "sha256" in part  # the record names an image's file by its hash
        shown = picture(part) if is_image else None
        return shown or {"type": "text", "text": shown_text([part])}

    keys = ("rollout_id", "task_id", "reward", "rewards", "stop_reason")
    messages = [dict(m) for trajectory in record["trajectories"] for m in trajectory["messages"]]
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [shown_part(part) for part in content]
        else:
            # The dashboard shows only contents. So a message without a text, of tool calls alone,
            # gets the calls as its content: add({"a":3}).
            message["content"] = shown_text(content) or spoken(message)
    return {"messages": messages, "metadata": {key: record[key] for key in keys}}
