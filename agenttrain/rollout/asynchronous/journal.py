"""`Journal`: the groups that a run has sampled, on disk until no resume can need them.

    <run>/rollouts/journal.jsonl     one line per group, in the order in which they were finished
    <run>/rollouts/groups/000012-5f3a.bin     the group itself, every bit of it

A line::

    {"serial": 12, "step": 7, "task_id": "shop-4", "versions": [5, 6], "begun": 1764142000.1,
     "ended": 1764142003.9, "digest": "9c…", "path": "groups/000012-5f3a.bin", "settings": "41…"}

`begun` and `ended` are seconds since 1970. A line is written once its group is: group and line
survive a crash of the machine. Lines stay as the run's record when their group's file is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agenttrain.rollout.collector import Collected
from agenttrain.tracking.rollouts import policy_versions
from agenttrain.types import Task
from agenttrain.utils.codec import Codec
from agenttrain.utils.files import sync, write_atomically
from agenttrain.utils.json_lines import dumps

FILE = "journal.jsonl"
GROUPS = "groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the journal: where a sampled group is, and what it was sampled with."""

    serial: int
    """Number of the task in the run, from 0."""
    step: int
    """The step that trains on the group."""
    task_id: str
    versions: tuple[int, ...]
    """Policy versions that sampled its tokens, in order; empty without a rollout."""
    begun: float
    """Seconds since 1970, as `ended`."""
    ended: float
    digest: str
    """SHA-256 of the file."""
    path: str
    """The group's file, relative to the folder of the journal."""
    settings: str
    """Digest of the settings that the group was made with."""


class Journal:
    """Sampled groups on disk: a run that was stopped resumes with those it may still train on.

    `resume` is called once at the start, and `read` for each file that it returned. Then `add` is
    called for each sampled group, `prune` after steps, and `close` at the end. A group has the
    serial of its task: the task's number in the run, from 0.

    Files have names of this process's own: a rollout process whose trainer was killed may write a
    last group while the resumed run has begun.
    """

    def __init__(self, folder: Path, codec: Codec, settings: str) -> None:
        """Keep the journal in `folder`, the run's `rollouts`; `resume` opens it.

        `settings` is a digest of the settings that rollouts depend on: groups that were sampled
        with others are not trained on.
        """
        self._folder, self._codec, self._settings = folder, codec, settings
        self._nonce = secrets.token_hex(2)
        """Part of this process's file names."""
        self._entries: dict[int, Entry] = {}
        """Entries whose group is on disk, by serial."""
        self._log: int | None = None
        """File descriptor of the open journal; None before `resume` and after `close`."""
        self._writing = threading.Lock()

    def resume(self, *, step: int, version: int, max_staleness: int) -> tuple[dict[int, Path], int]:
        """Begin at `step` with the weights of `version`, and open the journal for `add`.

        Returns the files of the usable groups, by serial (the number of the task in the run), and
        the number of dropped groups. Groups of `step` and later are usable, unless they were
        sampled with other settings, by weights that are too old for their step, or by weights newer
        than `version`, which the stop has lost, or unless their line or file is broken.

        Only usable groups keep their files. The journal is written anew: their lines, and those of
        steps before `step`, which stay as the run's record.
        """
        path = self._folder / FILE
        (self._folder / GROUPS).mkdir(parents=True, exist_ok=True)
        entries, unreadable = _read_entries(path)
        earlier = [entry for entry in entries if entry.step < step]
        later = [entry for entry in entries if entry.step >= step]
        usable: dict[int, Entry] = {}
        for entry in later:  # of several lines with one serial, the last usable one counts
            weights_fit = _weights_fit(entry, version, max_staleness)
            if weights_fit and entry.settings == self._settings and self._is_intact(entry):
                usable[entry.serial] = entry
        # By path, which each line has for itself: a serial may have a usable and a dropped line.
        usable_paths = {entry.path for entry in usable.values()}
        dropped = [entry for entry in later if entry.path not in usable_paths]
        for file in (self._folder / GROUPS).iterdir():
            if f"{GROUPS}/{file.name}" not in usable_paths:
                file.unlink()
        lines = [dumps(asdict(entry)) + "\n" for entry in (*earlier, *usable.values())]
        write_atomically(path, "".join(lines))
        self._entries = usable
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND)
        sync(self._folder)
        files = {serial: self._folder / entry.path for serial, entry in usable.items()}
        return files, len(dropped) + unreadable

    def read(self, path: Path) -> Collected:
        """Return the group of a file that `resume` has returned."""
        collected = self._codec.decode(path.read_bytes())
        assert isinstance(collected, Collected)
        return collected

    def add(
        self, serial: int, step: int, task: Task, collected: Collected, begun: float, ended: float
    ) -> None:
        """Write a group to disk and add its line. Does nothing once the journal is closed.

        The group was sampled from `begun` to `ended`, in seconds of `time.time`. Callable from any
        thread. A crash after the return loses nothing.
        """
        content = self._codec.encode(collected)
        name = f"{GROUPS}/{serial:06d}-{self._nonce}.bin"
        entry = Entry(
            serial=serial,
            step=step,
            task_id=task.task_id,
            versions=tuple(sorted(policy_versions(collected.rollouts))),
            begun=begun,
            ended=ended,
            digest=hashlib.sha256(content).hexdigest(),
            path=name,
            settings=self._settings,
        )
        with self._writing:  # a thread may go on after the task that waited for it was cancelled
            if self._log is None:
                return
            file = self._folder / name
            part = file.with_suffix(".part")
            part.write_bytes(content)
            sync(part)
            part.replace(file)
            sync(file.parent)
            os.write(self._log, (dumps(asdict(entry)) + "\n").encode())
            os.fsync(self._log)
            self._entries[serial] = entry

    def prune(self, *, step: int, oldest: int, newest: int) -> None:
        """Remove files of groups that no resume can use, once `step` was trained.

        `oldest` and `newest` are the steps of the run's checkpoints. A resume begins at one of
        them, or at one that is saved later. An entry's `versions` are those of the weights that
        sampled its group: version n is what step n made.
        """
        for serial, entry in list(self._entries.items()):
            trained_in_every_checkpoint = entry.step <= oldest
            # A resume from today's checkpoints has no weights after `newest`, and refuses groups
            # that such weights sampled. A resume from a later checkpoint does not need this group
            # either: `step` was trained, and with it the group.
            was_trained = entry.step <= step
            sampled_after_newest = max(entry.versions, default=0) > newest
            if trained_in_every_checkpoint or (was_trained and sampled_after_newest):
                del self._entries[serial]
                with suppress(FileNotFoundError):
                    (self._folder / entry.path).unlink()

    def close(self) -> None:
        """Close the file."""
        with self._writing:
            if self._log is not None:
                os.close(self._log)
                self._log = None

    def _is_intact(self, entry: Entry) -> bool:
        try:
            content = (self._folder / entry.path).read_bytes()
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == entry.digest


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return a digest of settings that are plain values."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_fit(entry: Entry, version: int, max_staleness: int) -> bool:
    """Return True if the weights that sampled a group are neither lost nor too old for its step."""
    if not entry.versions:  # no rollout, so no weights
        return True
    return max(entry.versions) <= version and entry.step - 1 - min(entry.versions) <= max_staleness


def _read_entries(path: Path) -> tuple[list[Entry], int]:
    """Return the entries of a journal, and the number of its lines that cannot be read.

    A last line without its newline was cut off by a crash and is ignored.
    """
    entries, unreadable = [], 0
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
            entries.append(Entry(**{**row, "versions": tuple(row["versions"])}))
        except (ValueError, TypeError, KeyError):
            unreadable += 1
    return entries, unreadable
