"""Token ids and other lists per token of long rollouts, as arrays beside their step's records.

``rollouts/step-000001-9f2b0c11d2e3.npz`` has numpy's format, which ``np.load`` reads. A record
names the file, and has the name of an array in place of each list::

    {"arrays": "step-000001-9f2b0c11d2e3.npz", "trajectories": [
        {"token_ids": {"array": "0/0/token_ids"}, "logprobs": {"array": "0/0/logprobs"}, ...}]}

The digits in the file's name are a hash of its content: a step that is written again gets another
file, and no record can name arrays of other rollouts.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from agenttrain.types import AgenttrainError
from agenttrain.utils.files import write_atomically

ARRAYS = "arrays"
"""Key of a record that names its file of arrays."""
PER_TOKEN = ("token_ids", "logprobs", "trainer_logprobs", "entropies")
"""Keys of a trajectory whose values are lists with an item per token."""
TRAINER_SCORES = ("trainer_logprobs", "entropies")
"""Keys of `PER_TOKEN` that the trainer computes: of sampled tokens only, rounded to 6 decimals."""
SHORTEST = 64
"""Items of the shortest list that becomes an array: in JSON it is as long as an array's headers."""
MOST_TOKENS = 4_194_304
"""Tokens of the longest rollout with arrays: of somebody else's files no more is unpacked. Longer
rollouts stay JSON."""
LISTS = 5
"""Most lists of a token: those of `PER_TOKEN`, and its advantage."""
DAMAGE = (
    *(OSError, EOFError, LookupError, TypeError, ValueError),
    *(RuntimeError, zlib.error, zipfile.BadZipFile),  # RuntimeError: the file is encrypted
)
"""Errors of numpy and zipfile for a file that is cut, changed or not of their format."""


class ArraysMissing(AgenttrainError):
    """A file of arrays is missing or damaged. The message names it and the remedy."""


def take_arrays(record: dict[str, Any], line: int) -> dict[str, np.ndarray]:
    """Replace the long lists of a record by references, and return them as arrays by name.

    `line` is the record's place in its file, from 0. Example of a name: ``0/1/logprobs``, the list
    `logprobs` of trajectory 1 in line 0.
    """
    arrays: dict[str, np.ndarray] = {}
    for index, trajectory in enumerate(record["trajectories"]):
        for holder, key, place in _find_lists(trajectory):
            values = holder[key]
            if not isinstance(values, list) or len(values) < SHORTEST:
                continue
            # Readers refuse an array of another length.
            if len(values) == _expected_length(trajectory, holder, key):
                name = f"{line}/{index}/{place}"
                arrays[name] = _exact_array(values, key)
                holder[key] = {"array": name}
    return arrays


def write_arrays(step_file: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays beside `step_file`, the file of the step's records. Return the file's name."""
    buffer = BytesIO()
    # As np.savez_compressed, at the fastest level: its own saves 2 to 7 % more in twice the time.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    content = buffer.getvalue()
    name = f"{step_file.stem}-{hashlib.sha256(content).hexdigest()[:12]}.npz"
    write_atomically(step_file.with_name(name), content)
    return name


def remove_former_arrays(step_file: Path, current: str | None) -> None:
    """Remove the files of arrays beside `step_file` that its records no longer name.

    Parts of such files, which a killed run has left, are removed too.
    """
    for pattern in (f"{step_file.stem}-*.npz", f".{step_file.stem}-*.npz.*"):
        for path in step_file.parent.glob(pattern):
            if path.name != current:
                path.unlink(missing_ok=True)


class ArrayReader:
    """Reads the lists of records from their files of arrays.

    The last file stays open for the records that follow: it lists the arrays of its whole step.
    """

    def __init__(self) -> None:
        """No file is open yet."""
        self._path: Path | None = None
        self._file: zipfile.ZipFile | None = None

    def with_arrays(self, record: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return a rollout's object with its lists read from the file of arrays in `folder`.

        It then equals the object of a rollout that was written without arrays. The trajectories of
        `record` are changed: use only what is returned. Raises ArraysMissing.
        """
        if ARRAYS not in record:
            return record
        # A record of somebody else may name arrays without end: at most as many items are read as
        # MOST_TOKENS tokens have in all their lists.
        items_left = MOST_TOKENS * LISTS
        with self._opened(record, folder) as file:
            for trajectory in record["trajectories"]:
                if "spans" not in trajectory:
                    continue  # a broken record, which the readers of spans refuse
                # `holder` is the trajectory, or a span of it, that has the list as holder[key].
                for holder, key, _ in _find_lists(trajectory):
                    if isinstance(holder[key], dict):  # {"array": name}; a short list is in place
                        length = _expected_length(trajectory, holder, key)
                        items_left -= length
                        if items_left < 0:
                            raise ValueError(f"the rollout has more than {MOST_TOKENS} tokens")
                        array = _read_array(file, holder[key]["array"], key, length)
                        holder[key] = _as_list(array, key)
        return {key: value for key, value in record.items() if key != ARRAYS}

    def check(self, record: Mapping[str, Any], folder: Path) -> None:
        """Raise ArraysMissing if the record's file of arrays is not in `folder`, or is cut."""
        if ARRAYS in record:
            with self._opened(record, folder):
                pass

    def close(self) -> None:
        """Close the file that is open, if there is one."""
        if self._file is not None:
            self._file.close()
        self._path = self._file = None

    @contextmanager
    def _opened(self, record: Mapping[str, Any], folder: Path) -> Iterator[zipfile.ZipFile]:
        """Open a record's file of arrays in `folder` for the block.

        Raises ArraysMissing if the file is missing, and for errors of the block like those of
        reading a damaged file (DAMAGE).
        """
        path = folder / Path(str(record[ARRAYS])).name
        remedy = (
            "copy it from the run that recorded the rollouts; it belongs beside its step's .jsonl"
        )
        holds = f"the token ids and log-probabilities of rollout {record.get('rollout_id')}"
        try:
            if self._file is None or path != self._path:
                self.close()
                if not path.is_file():  # a pipe would be waited for
                    raise FileNotFoundError
                self._path, self._file = path, zipfile.ZipFile(path)
            yield self._file
        except FileNotFoundError:
            # Without a cause: a tracker would take an OSError for trouble that passes, and try
            # forever.
            raise ArraysMissing(f"{path}: is missing, and holds {holds}; {remedy}") from None
        except DAMAGE as error:
            raise ArraysMissing(
                f"{path}: is damaged ({error}), and holds {holds}; {remedy}"
            ) from error


def _expected_length(trajectory: Mapping[str, Any], holder: Mapping[str, Any], key: str) -> int:
    """Return the number of items that the list `key` has by the spans of its trajectory.

    `holder` is the object with the list: the trajectory itself, or the span of advantages.
    """
    spans = trajectory["spans"]
    if holder is not trajectory:
        return int(holder["end"] - holder["start"])
    if key in TRAINER_SCORES:  # lists of the sampled tokens alone
        return sum(span["end"] - span["start"] for span in spans if span["origin"] == "sampled")
    return int(spans[-1]["end"]) if spans else 0


def _allowed_formats(key: str) -> tuple[str, str]:
    """Return numpy's codes of the formats that a record's `key` may have in the file."""
    return ("i4", "i8") if key == "token_ids" else ("f4", "f8")


def _read_array(file: zipfile.ZipFile, name: str, key: str, length: int) -> np.ndarray:
    """Return the array `name` of a record's `key`. Raises an error of DAMAGE.

    Nothing is unpacked before its size is known to be `length` items: a file of some kilobytes can
    hold gigabytes of zeros.
    """
    info = file.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that np.savez does not use")
    with file.open(info) as member:
        if (version := np.lib.format.read_magic(member)) != (1, 0):
            raise ValueError(f"{name} is in version {version} of the npy format, not 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        if shape != (length,) or dtype.str[1:] not in _allowed_formats(key):
            raise ValueError(
                f"{name} has the shape {shape} and the format {dtype.str[1:]}, and its record "
                f"needs {length} items of {' or '.join(_allowed_formats(key))}"
            )
        content = member.read(length * dtype.itemsize)
        # One byte beyond the end, where zipfile compares the checksum.
        if len(content) < length * dtype.itemsize or member.read(1):
            raise ValueError(f"{name} has not the size of its {length} items")
    return np.frombuffer(content, dtype)


def _find_lists(trajectory: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (object, key, name) of each place in a trajectory that may hold a list per token.

    The list, or a reference to its array, is object[key]. The name is part of an array's name.
    `PER_TOKEN` names those of the trajectory itself. A span has a list of advantages where its
    tokens differ.
    """
    for key in PER_TOKEN:
        if key in trajectory:
            yield trajectory, key, key
    for number, span in enumerate(trajectory.get("spans", ())):  # a broken record has none
        if "advantage" in span:
            yield span, "advantage", f"spans/{number}/advantage"


def _exact_array(values: list[Any], key: str) -> np.ndarray:
    """Return the smallest array that holds exactly the `values` of a record's `key`.

    Ids become int32 if they fit, else int64. Numbers become float32 if a reader gets the same back,
    else float64: an engine of the user's may give more digits than float32 has. `_to_float64` reads
    them back, and needs the key, because the numbers of some keys are rounded to 6 decimals.
    """
    if key == "token_ids":
        ids = np.array(values, np.int64)
        small = ids.astype(np.int32)
        return small if np.array_equal(small, ids) else ids
    numbers = np.array(values, np.float64)
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and so unequal
        single = numbers.astype(np.float32)
    return single if np.array_equal(_to_float64(single, key), numbers, equal_nan=True) else numbers


def _to_float64(array: np.ndarray, key: str) -> np.ndarray:
    """Return the float64 numbers that an array of a record's `key` stands for.

    Keys of TRAINER_SCORES have numbers of 6 decimals: their float32, 0.30000001192…, is rounded
    back to 0.3.
    """
    numbers = array.astype(np.float64)
    return numbers.round(6) if key in TRAINER_SCORES and array.dtype == np.float32 else numbers


def _as_list(array: np.ndarray, key: str) -> list[Any]:
    """Return an array as the list of a record's `key`: null, as in JSON, if not finite."""
    if key == "token_ids":
        return array.tolist()
    values: list[Any] = _to_float64(array, key).tolist()
    return [value if math.isfinite(value) else None for value in values]
