"""Weights as files: written by the trainer, verified and read by each worker of a server::

    <folder>/7/weights-00000.safetensors
    <folder>/7/manifest.json     {"version": 7, "tensors": {"lm_head.weight": {"file": …, "dtype":
                                  "float32", "shape": [512, 64], "sha256": …}, …}}

A folder is renamed from 7.part to 7 once it is complete. A server is sent the folder and the
manifest's digest. It loads nothing before every name, shape, format and digest has been checked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.engines.adapters import adapter_config
from agenttrain.utils.names import list_names

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
ADAPTERS = "adapter_model.safetensors"
FILE_BYTES = 1 << 28
"""Bytes of tensors after which a new file begins. The trainer holds copies of one file's tensors at
a time."""
KEPT = 2
"""Versions on disk: a server may still read the one before the newest."""


class BadWeights(ValueError):
    """Weight files differ from their manifest, or the weights from those of the first version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """One version of all weights on disk."""

    folder: Path
    version: int
    digest: str
    """SHA-256 of the manifest, or of the file of adapters."""
    adapters: bool = False
    """True: adapters. The base weights stay."""


@dataclass(slots=True)
class WeightWriter:
    """Writes versions of the weights into a folder, and removes old ones.

    The trainer's process calls `write` at each weight sync.
    """

    folder: Path
    alpha: float | None = None
    """Scale of adapters, if only adapters are written. None: the model's weights are written."""
    _forms: dict[str, str] = field(default_factory=dict)
    """Format and shape of every weight of the first version."""

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightFiles:
        """Write a version. Raises OSError, and BadWeights for other names or forms than before."""
        if self.alpha is not None:
            return self._write_adapters(dict(weights), version)
        unfinished = self.folder / f"{version}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tensors: dict[str, dict[str, Any]] = {}
        batch: dict[str, Tensor] = {}
        number = 0

        def write_batch() -> None:
            """Write the tensors of `batch` as the next file, and list them in the manifest."""
            nonlocal number
            name = f"weights-{number:05}.safetensors"
            _save(batch, unfinished / name)
            for key, tensor in batch.items():
                tensors[key] = {"file": name, **describe(tensor), "sha256": digest(tensor)}
            batch.clear()
            number += 1

        for name, tensor in weights:
            # Cloned: tied weights share memory, which safetensors refuses.
            batch[name] = tensor.detach().cpu().contiguous().clone()
            if sum(queued.nbytes for queued in batch.values()) >= FILE_BYTES:
                write_batch()
        if batch:
            write_batch()
        self._check_forms(tensors)
        text = json.dumps({"version": version, "tensors": tensors})
        (unfinished / MANIFEST).write_text(text, encoding="utf-8")
        complete = self.folder / str(version)
        shutil.rmtree(complete, ignore_errors=True)  # left by a run that was stopped
        unfinished.rename(complete)
        self._remove_old(version)
        manifest_digest = hashlib.sha256(text.encode()).hexdigest()
        return WeightFiles(folder=complete, version=version, digest=manifest_digest)

    def _write_adapters(self, weights: Mapping[str, Tensor], version: int) -> WeightFiles:
        """Write adapters as vLLM reads them. The fleet removes the folder once it is not used."""
        assert self.alpha is not None
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        self._check_forms({name: describe(tensor) for name, tensor in tensors.items()})
        unfinished, complete = self.folder / f"{version}.part", self.folder / str(version)
        for folder in (unfinished, complete):  # left by a run that was stopped
            shutil.rmtree(folder, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _save(tensors, unfinished / ADAPTERS)
        text = json.dumps(adapter_config(tensors, self.alpha))
        (unfinished / "adapter_config.json").write_text(text, encoding="utf-8")
        file_digest = hashlib.sha256((unfinished / ADAPTERS).read_bytes()).hexdigest()
        unfinished.rename(complete)
        return WeightFiles(folder=complete, version=version, digest=file_digest, adapters=True)

    def _check_forms(self, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise BadWeights for weights that differ from the first version's in name or form."""
        forms = {name: f"{form['dtype']} {form['shape']}" for name, form in tensors.items()}
        self._forms = self._forms or forms  # at the first version there is nothing to compare with
        differing = sorted(
            name for name in {*forms, *self._forms} if forms.get(name) != self._forms.get(name)
        )
        if differing:
            name = differing[0]
            raise BadWeights(
                f"{list_names(differing)}: {name} is {forms.get(name, 'missing')} now, and was "
                f"{self._forms.get(name, 'missing')} at the first weight sync"
            )

    def _remove_old(self, newest: int) -> None:
        """Remove all versions but the `KEPT` highest, and never the newest.

        After a resume the newest may be lower than versions that the stopped run left.
        """
        numbers = sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        for number in numbers[:-KEPT]:
            if number != newest:
                shutil.rmtree(self.folder / str(number), ignore_errors=True)


def read_verified(
    folder: Path, manifest_digest: str, *, verified: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over a version's tensors, after all of them were verified.

    `verified`: `verify` has passed before, and only the manifest is checked again. Raises OSError
    or BadWeights before the first tensor is read if anything differs from the manifest.
    """
    if not verified:
        verify(folder, manifest_digest)
    return _read(folder, _read_manifest(folder, manifest_digest))


def verify(folder: Path, manifest_digest: str) -> None:
    """Read a version; raises BadWeights or OSError if anything differs from the manifest."""
    tensors = _read_manifest(folder, manifest_digest)
    names_read = set()
    for name, tensor in _read(folder, tensors):
        expected = tensors.get(name)
        if expected is None:
            raise BadWeights(f"{folder}: {name} is not in the manifest")
        form = describe(tensor)
        if any(form[key] != expected[key] for key in form):
            raise BadWeights(f"{folder}: {name} is {form}, and the manifest has {expected}")
        if digest(tensor) != expected["sha256"]:
            raise BadWeights(f"{folder}: the bytes of {name} are not those that were written")
        names_read.add(name)
    if missing := sorted(tensors.keys() - names_read):
        raise BadWeights(f"{folder}: {list_names(missing)}: in the manifest, and in no file")


def _read_manifest(folder: Path, manifest_digest: str) -> dict[str, dict[str, Any]]:
    """Return the manifest's tensors: name -> file, form and digest. Raises BadWeights, OSError."""
    text = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != manifest_digest:
        raise BadWeights(f"{folder / MANIFEST}: is not the manifest that was announced")
    tensors: dict[str, dict[str, Any]] = json.loads(text)["tensors"]
    return tensors


def _read(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the files that a manifest names, also those that it does not list."""
    from safetensors import safe_open

    for file_name in sorted({str(form["file"]) for form in tensors.values()}):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as a safetensors file. Raises OSError, also for a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # for a full disk safetensors raises no OSError
        raise OSError(f"{path}: {error}") from error


def describe(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's format and shape: ``{"dtype": "float32", "shape": [512, 64]}``."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a CPU tensor's bytes."""
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
