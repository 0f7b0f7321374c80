"""Safetensors files, read and written in parts.

A process that holds a part of each weight reads only its rows of a tensor, straight into the
memory where they stay. The library maps files into memory instead, and every mapped page that was
read counts as the process's own.

    8 bytes     length of the header, little-endian
    header      JSON: {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}, ...}
    data        the tensors' bytes, one after the other
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from agenttrain.types import AgenttrainError
from agenttrain.utils.files import start_writeback

FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Number formats by their names in a header."""
NAMES = {dtype: name for name, dtype in FORMATS.items()}
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
CHUNK = 2**24
"""Bytes that are read before they are converted or copied to a device, and that are written before
the system is asked to bring them to disk."""
LENGTH_BYTES = 8
"""Bytes at the start of a file with the header's length."""
ALIGNMENT = 8
"""The data begins at a multiple of this."""
HASHED_BESIDE = 2**20
"""Bytes from which on a write is hashed in a thread of its own."""


class BadTensorFile(AgenttrainError):
    """A safetensors file does not hold what it should. The message names file and tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place and format of a tensor in a safetensors file."""

    file: Path
    name: str
    format: str
    """Name of its number format, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Place of its first byte in the file."""
    size: int
    """Number of its bytes."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format. Raises BadTensorFile for one that torch does not have."""
        if self.format not in FORMATS:
            raise BadTensorFile(f"{self.file}: {self.name}: unknown number format {self.format}")
        return FORMATS[self.format]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    The file is 8 bytes with the header's length, the header as JSON, and the data. Raises
    BadTensorFile for a truncated file and for one of another format.
    """
    length = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if header_bytes > min(LONGEST_HEADER, length):
            raise BadTensorFile(f"{file}: is no safetensors file, or is cut; copy it again")
        try:
            header = json.loads(stream.read(header_bytes))
            data = LENGTH_BYTES + header_bytes
            tensors = {
                name: StoredTensor(
                    file=file,
                    name=name,
                    format=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    start=data + entry["data_offsets"][0],
                    size=entry["data_offsets"][1] - entry["data_offsets"][0],
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadTensorFile(f"{file}: is no safetensors file: {error}") from error
    for tensor in tensors.values():
        if tensor.start + tensor.size > length:
            raise BadTensorFile(f"{file}: is cut before the end of {tensor.name}; copy it again")
    return tensors


def read_rows(stored: StoredTensor, start: int, into: Tensor) -> None:
    """Fill `into` with rows of the first dimension from `start` on, converted to its format.

    It may have any number of rows. A scalar counts as one row.
    """
    rows = stored.shape[0] if stored.shape else 1
    row_bytes = stored.size // max(rows, 1)  # `size` and `start` of a stored tensor are bytes
    target = into.detach().reshape(-1)
    if target.numel() == 0:
        return
    assert into.is_contiguous(), "rows would be read into a copy"
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start + start * row_bytes)
        if target.dtype is stored.dtype and target.device.type == "cpu":
            _read_exactly(file, target, stored)
            return
        # Otherwise by way of a buffer, which is cast or copied to the device piece by piece.
        chunk_numbers = CHUNK // stored.dtype.itemsize
        buffer = torch.empty(min(chunk_numbers, target.numel()), dtype=stored.dtype)
        for begin in range(0, target.numel(), len(buffer)):
            piece = buffer[: target.numel() - begin]
            _read_exactly(file, piece, stored)
            target[begin : begin + len(piece)].copy_(piece)


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor on the CPU as a buffer, without copying them."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _read_exactly(file: Any, target: Tensor, stored: StoredTensor) -> None:
    """Fill `target` from the file. Raises BadTensorFile if the file ends before."""
    view = memoryview(bytes_of(target))
    while view:
        count = file.readinto(view)
        if not count:
            raise BadTensorFile(f"{stored.file}: is cut within {stored.name}; copy it again")
        view = view[count:]


class HashedFile:
    """Writable file, of which each write is hashed and soon brought to disk.

    torch.save and `write_tensors` write checkpoints into it, from start to end.
    """

    def __init__(self, file: BinaryIO, hash_thread: ThreadPoolExecutor) -> None:
        self._file, self._hash_thread = file, hash_thread
        self._hash = hashlib.sha256()
        self._size = 0
        """Bytes written."""
        self._writeback_end = 0
        """Bytes, from the start of the file, that the system was asked to bring to disk."""

    @property
    def digest(self) -> str:
        """The sha256 of the bytes so far, in hex."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Write bytes, or any buffer of them, and hash them meanwhile."""
        view = memoryview(data).cast("B")
        if len(view) < HASHED_BESIDE:  # too short to be worth a thread
            self._hash.update(view)
            self._write(view)
            return len(view)
        hashing = self._hash_thread.submit(self._hash.update, view)
        try:
            self._write(view)
        finally:
            hashing.result()  # wait: torch reuses the buffer once this returns or raises
        return len(view)

    def _write(self, view: memoryview) -> None:
        """Write all bytes. Every `CHUNK` of them, ask the system to bring them to disk."""
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            while piece:  # an unbuffered write may take a part only
                count = self._file.write(piece)
                piece, self._size = piece[count:], self._size + count
            unsynced = self._size - self._writeback_end
            if unsynced >= CHUNK:
                start_writeback(self._file.fileno(), self._writeback_end, unsynced)
                self._writeback_end = self._size

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


@contextmanager
def open_hashed(path: Path) -> Iterator[HashedFile]:
    """Open a new file whose bytes are hashed as they are written."""
    with (
        ThreadPoolExecutor(1, thread_name_prefix="hash") as hash_thread,
        path.open("wb", buffering=0) as file,
    ):
        yield HashedFile(file, hash_thread)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file of tensors on the CPU. Return its sha256."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    # Larger formats first, so that every tensor is aligned to its own.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open_hashed(path) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in names:
            if math.prod(tensors[name].shape):
                file.write(bytes_of(tensors[name].contiguous()))
    return file.digest
