"""Weights & Biases: online with an API key, else files in the run folder that can be sent later."""

from __future__ import annotations

import json
import netrc
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from agenttrain.tracking.backends.base import (
    Description,
    ExperimentTracker,
    RunEnd,
    TrackedRun,
    rollout_table,
)
from agenttrain.utils.redaction import hide_secrets

STEP = "step"
"""Metric on the x-axis of all others. wandb's own counter refuses an earlier step, which an
evaluation after a restart may have."""
WRITTEN_EVERY_S = 0.5
"""Seconds between two writes of wandb's own process, whose memory is lost when it is killed."""
ARRIVAL_S = 60.0
"""Longest wait for it."""
CLOUD = "https://api.wandb.ai"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandB(ExperimentTracker):
    """Writes a run to wandb.

    wandb's own `step` only numbers the rows (`rows`); the training step is the metric STEP.
    """

    def __init__(
        self, project: str | None = None, entity: str | None = None, mode: str = "auto"
    ) -> None:
        """`mode` is wandb's own, or ``auto``: $WANDB_MODE, else online if there is an API key."""
        self.project = project
        self.entity = entity
        chosen = os.environ.get("WANDB_MODE") if mode == "auto" else mode
        self.is_keyless = chosen is None and not _has_key()
        self.exit_code = 0
        self.mode: Any = chosen or ("offline" if self.is_keyless else "online")

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> int | None:
        """Open the run under its id; return its last step, from the server or the local files."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.wandb = wandb
        if wandb.run is not None:
            # An earlier attempt in this process has failed, and has left its run open.
            wandb.teardown(exit_code=1)
        # The files of the run's earlier starts; one start writes one file.
        earlier = [WandBFile(path) for path in run.folder.glob(f"wandb/*-{run.id}/*.wandb")]
        self.run = wandb.init(
            project=self.project or run.project,
            entity=self.entity,
            name=run.name,
            group=run.group,
            id=run.id,
            resume="allow",
            mode=self.mode,
            dir=run.folder,
            config=dict(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                # We send the machine's load as metrics of ours (`following.follow`).
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=WRITTEN_EVERY_S,
            ),
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self.file = WandBFile(Path(self.run.dir).parent / f"run-{run.id}.wandb")
        earlier_rows = [file.read() for file in earlier]  # sets `step` of each file, too
        # Number of the next row. Each start of an offline run writes a file, and all are later sent
        # one after the other, as one run: so the numbers go on over all starts.
        self.rows = max(self.run.step, *earlier_rows, 0)
        if self.mode == "online":
            return int(self.run.summary.get(STEP) or 0)
        return max((file.step for file in earlier), default=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row."""
        self._row({**metrics, STEP: step})

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log the rollouts as a table."""
        columns, rows = rollout_table(records)
        self._row({"rollouts": self.wandb.Table(columns=columns, data=rows), STEP: step})

    def flush(self) -> None:
        """Wait until all rows are in the file, which wandb's own process writes."""
        end = time.monotonic() + ARRIVAL_S
        while self.mode != "disabled" and self.file.read() < self.rows:
            if time.monotonic() > end:
                raise TimeoutError(f"wandb did not write {self.file.path} in {ARRIVAL_S:.0f} s")
            time.sleep(0.1)

    def ended(self, how: RunEnd) -> None:
        """Set the run's state: finished, preempted, or failed for every other end."""
        self.exit_code = 0 if how is RunEnd.finished else 1
        self.run.summary["status"] = str(how)
        if how is RunEnd.preempted:
            self.run.mark_preempting()

    def finish(self) -> None:
        """Send what is left, and end wandb's own process."""
        self.run.finish(exit_code=self.exit_code)

    def describe(self, run: TrackedRun) -> Description:
        """Return the command that sends an offline run, or the address of the project."""
        if self.mode == "online":
            host = hide_secrets(os.environ.get("WANDB_BASE_URL", "https://wandb.ai")).rstrip("/")
            path = "/".join(part for part in (self.entity, self.project or run.project) if part)
            return Description(view=f"{host}/{path}" if self.entity else f"{host}/home")
        if self.mode != "offline":
            return Description()
        folders = shlex.quote(str(run.folder / "wandb"))
        note = "wandb: the run stays offline without an API key (wandb login, or WANDB_API_KEY)"
        return Description(
            view=f"wandb sync {folders}/offline-run-*", notes=(note,) if self.is_keyless else ()
        )

    def _row(self, values: dict[str, Any]) -> None:
        self.run.log(values, step=self.rows, commit=True)
        self.rows += 1


class WandBFile:
    """Reads how much of a run wandb has written to its file, which has LevelDB's log format.

    https://github.com/google/leveldb/blob/main/doc/log_format.md: a block of 32 kB has entries: a
    header (checksum, length, kind) and content. An entry of kind 1 is a whole record of wandb's.
    A record that does not fit a block is split: kinds 2 to 4 are its first, middle and last part.
    """

    BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
    COMPLETE, FIRST, MIDDLE, LAST = b"\1", b"\2", b"\3", b"\4"
    """Kinds of entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        """Number of the row after the last one."""
        self.step = 0
        """Largest step of a row."""
        self._position = self.FILE_HEADER
        """Bytes of the file that were read: the next entry begins here."""
        self._parts = b""
        """Content of the parts of a record whose last part was not read yet."""

    def read(self) -> int:
        """Read the records that were added since the last call; return `rows`.

        An entry that is not completely written stays unread: the next call begins with it. The
        parts of a record that were read before it are kept meanwhile. `_add` updates `rows` and
        `step`.
        """
        from wandb.proto.wandb_internal_pb2 import Record

        with suppress(FileNotFoundError), self.path.open("rb") as file:
            while True:
                left_in_block = self.BLOCK - self._position % self.BLOCK
                if left_in_block < self.HEADER:  # padding, because no header is split
                    self._position += left_in_block
                file.seek(self._position)
                header = file.read(self.HEADER)  # 4 bytes checksum, 2 bytes length, 1 byte kind
                length, kind = int.from_bytes(header[4:6], "little"), header[6:]
                content = file.read(length)
                is_entry = kind in (self.COMPLETE, self.FIRST, self.MIDDLE, self.LAST)
                if not is_entry or len(content) < length:
                    break  # not written yet: `_position` stays
                self._position += self.HEADER + length
                self._parts += content
                if kind in (self.COMPLETE, self.LAST):
                    self._add(Record.FromString(self._parts))
                    self._parts = b""
        return self.rows

    def _add(self, record: Any) -> None:
        """Count a record, if it is a row of the run's history."""
        for item in record.history.item:
            key = item.key or ".".join(item.nested_key)
            if key == STEP:
                self.step = max(self.step, int(json.loads(item.value_json)))
        if record.HasField("history"):
            self.rows = max(self.rows, record.history.step.num + 1)


def _has_key() -> bool:
    """Return True if wandb would log in without asking."""
    if any(os.environ.get(name) for name in KEYS):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", CLOUD)).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(str(file)).authenticators(host) is not None
    return False
