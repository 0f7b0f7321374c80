"""`Codec`: values and records of known classes as bytes, exactly and without pickle.

    codec = Codec((Span, Origin))
    codec.decode(codec.encode({"spans": (span,), "ids": array("q", [1, 2])}))

The bytes are JSON and, behind it, the numbers of arrays and of long tuples as they are in memory.
All numbers keep their bits, tuples stay tuples, and nothing but a known class is ever made. Lists
map to JSON lists, and every other type that JSON lacks maps to ``{kind: content}``::

    {"record": ["Span", [{"enum": ["Origin", "sampled"]}, {"ints": 0}, …]]}     0: first raw array
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

LENGTH = 8
"""Bytes of the number that says how long the JSON is."""
RAW = {"ints": "q", "floats": "d"}
"""Kinds of tuples that are sent as arrays, with the arrays' type codes."""


class Codec:
    """Encodes values of the plain types, and records and enums of the classes that it is given.

    The bytes: LENGTH bytes with the JSON's length, the JSON, and the numbers of all arrays. In the
    JSON an object has one key, the kind of its value: ``{"ints": 0}`` is a tuple of integers that
    are the first array, ``{"record": ["Span", [value of each field]]}`` a dataclass.
    """

    def __init__(self, classes: Sequence[type], other: Callable[[Any], Any] | None = None) -> None:
        """Take the enums and dataclasses to encode, whose names must differ.

        `other` is called with a value of any other type and returns one to encode in its place;
        without it, such a value is a TypeError.
        """
        self._classes = {cls.__name__: cls for cls in classes}
        assert len(self._classes) == len(classes), "two classes have the same name"
        self._fields = {
            cls: tuple(field.name for field in fields(cls) if field.init)
            for cls in classes
            if is_dataclass(cls)
        }
        self._other = other

    def encode(self, value: Any) -> bytes:
        """Return a value as bytes. Raises TypeError for a value that it does not know."""
        arrays: list[array[Any]] = []
        packed = self._pack(value, arrays)
        sizes = [[numbers.typecode, len(numbers)] for numbers in arrays]
        text = json.dumps({"value": packed, "arrays": sizes}, separators=(",", ":")).encode()
        return b"".join([len(text).to_bytes(LENGTH, "little"), text, *map(bytes, arrays)])

    def decode(self, content: bytes) -> Any:
        """Return the value that `encode` turned into these bytes.

        They are the length of the JSON in `LENGTH` bytes, the JSON, and the numbers of its arrays.
        """
        start = LENGTH + int.from_bytes(content[:LENGTH], "little")
        message = json.loads(content[LENGTH:start])
        arrays = []
        for typecode, count in message["arrays"]:
            numbers = array(typecode)
            end = start + count * numbers.itemsize
            numbers.frombytes(content[start:end])
            arrays.append(numbers)
            start = end
        return self._unpack(message["value"], arrays)

    def _pack(self, value: Any, arrays: list[array[Any]]) -> Any:
        """Return `value` as JSON data. Adds its arrays to `arrays`; the data has their indices.

        Examples: ``[1, None]`` -> ``[1, None]``; ``Path("a")`` -> ``{"path": "a"}``; ``b"ab"`` ->
        ``{"bytes": 0}`` if its bytes are the first array.
        """
        kind = type(value)
        if value is None or kind in (str, bool, int, float):
            return value
        if kind is list:
            return [self._pack(item, arrays) for item in value]
        if kind in self._fields:
            values = [self._pack(getattr(value, name), arrays) for name in self._fields[kind]]
            return {"record": [kind.__name__, values]}
        if isinstance(value, Enum) and kind.__name__ in self._classes:
            return {"enum": [kind.__name__, value.value]}
        if kind is array:
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if kind is bytes:
            arrays.append(array("B", value))
            return {"bytes": len(arrays) - 1}
        if kind is tuple:
            return self._pack_tuple(value, arrays)
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, Mapping):
            items = [[self._pack(part, arrays) for part in item] for item in value.items()]
            return {"mapping": items}
        for plain in (int, float, str):  # numpy's float64 is a float
            if isinstance(value, plain):
                return plain(value)
        if self._other is None:
            raise TypeError(f"{kind.__name__}: cannot be sent: {value!r}")
        return self._pack(self._other(value), arrays)

    def _pack_tuple(self, value: tuple[Any, ...], arrays: list[array[Any]]) -> Any:
        """Return a tuple as JSON data: as an array if all items are integers, or all floats."""
        kinds = {*map(type, value)}
        for name, number_type in (("ints", int), ("floats", float)):
            if kinds == {number_type}:
                try:
                    arrays.append(array(RAW[name], value))
                except OverflowError:  # more than 64 bits
                    break
                return {name: len(arrays) - 1}
        return {"tuple": [self._pack(item, arrays) for item in value]}

    def _unpack(self, value: Any, arrays: Sequence[array[Any]]) -> Any:
        """Return the value that `_pack` packed."""
        if isinstance(value, list):
            return [self._unpack(item, arrays) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "mapping":
            return {self._unpack(k, arrays): self._unpack(v, arrays) for k, v in content}
        if kind == "tuple":
            return tuple(self._unpack(item, arrays) for item in content)
        if kind == "array":
            return arrays[content]
        if kind == "bytes":
            return arrays[content].tobytes()
        if kind in RAW:
            return tuple(arrays[content])
        if kind == "path":
            return Path(content)
        name, content = content  # a record or an enum: [name of its class, fields or value]
        cls = self._classes[name]
        if kind == "enum":
            return cls(content)
        values = (self._unpack(item, arrays) for item in content)
        return cls(**dict(zip(self._fields[cls], values, strict=True)))
