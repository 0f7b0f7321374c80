"""Weights of a model that is sharded before they are read: each process reads only its rows.

The model has no storage (the meta device) until it is sharded. Weights that transformers converts
are converted here by the same operations, one at a time. Fused experts are made from the files of
this process's experts alone. Copies of a model on several machines are compared by checksums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from agenttrain.engines.mixers import keep_float32, keeping_float32
from agenttrain.training.checkpoint_files import auto_class, loading_options
from agenttrain.training.lora import base_name
from agenttrain.training.quantization import (
    QuantizedLinear,
    gather_scales,
    pack,
    quantized_layers,
)
from agenttrain.training.sharding import RowRange, give_storage, local_part, own_rows
from agenttrain.training.tensor_files import (
    BadTensorFile,
    StoredTensor,
    bytes_of,
    read_header,
    read_rows,
)
from agenttrain.training.world import World
from agenttrain.types import AgenttrainError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WrongWeights(AgenttrainError):
    """The files do not hold the model's weights. The message names file, tensor and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Weights that transformers makes of tensors with other names or shapes."""

    converter: WeightConverter
    sources: tuple[tuple[str, StoredTensor], ...]
    """Pairs (pattern of the converter, tensor), in the order that transformers collects them in."""
    first: str
    """Name of the first weight that it makes, by which the converter names the others."""

    @property
    def by_expert(self) -> bool:
        """True if row i of the weight (expert i) is made of the i-th tensor of each pattern."""
        # If so, the first operation stacks tensors, and later ones join patterns within a row.
        stack, *later = self.converter.operations
        is_stack = isinstance(stack, MergeModulelist) and stack.dim == 0
        return is_stack and all(isinstance(op, Concatenate) and op.dim != 0 for op in later)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A weight of the model, and the tensors of the files that it is read from."""

    name: str
    source: StoredTensor | Conversion
    shape: tuple[int, ...]
    """Full shape of the weight in the model."""
    dtype: torch.dtype
    """Format of the weight in the model."""


def why_not_sliced(folder: Path) -> str | None:
    """Return why the weights in `folder` cannot be read in slices. None if they can."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        return "its weights are quantized, and only whole ones can be dequantized"
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return "its weights are not in safetensors files"
    return None


def empty_model(folder: Path, dtype: torch.dtype, *, uniform: bool = False) -> PreTrainedModel:
    """Return the model in `folder` on the meta device, with its buffers on the CPU.

    Two sets of weights may be in float32 beside others in `dtype`: those of the modules that
    transformers keeps so for this family (`_get_dtype_plan`), and the decays of recurrent layers
    (`keep_float32`). `uniform` leaves out the second set, because FSDP2 shards the weights of a
    layer together and needs one format for them.
    """
    config = AutoConfig.from_pretrained(folder)
    config.name_or_path = str(folder)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(folder).from_config(config, dtype=dtype)
    model.tie_weights()
    dtype_plan = model._get_dtype_plan(dtype)  # by transformers' own choice, also if `uniform`
    for name, parameter in model.named_parameters():
        if any(part in dtype_plan for part in name.split(".")):
            parameter.data = parameter.data.to(torch.float32)
    if not uniform:
        keep_float32(model)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a model's folder by name. Raises BadTensorFile."""
    if not (folder / INDEX).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise BadTensorFile(f"{index}: is no index of weights: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(file_of.values())):
        if not (folder / name).is_file():
            raise BadTensorFile(f"{index}: names {name}, which the folder lacks; copy it too")
        tensors.update(read_header(folder / name))
    for name, file in file_of.items():
        if name not in tensors:
            raise BadTensorFile(f"{folder / file}: lacks {name}, which {INDEX} says it has")
    return tensors


def load_whole(folder: Path, dtype: torch.dtype | str, *, uniform: bool = False) -> Any:
    """Load the model in a folder with all of its weights.

    `uniform`: all weights in one format, also those that `keeping_float32` keeps in float32. FSDP2
    trains only such a model.

    Raises WrongWeights for weights that the files lack (transformers would draw them at random) or
    hold as integers (it would cast them), for other shapes and for truncated files.
    """
    try:
        is_safetensors = any((folder / name).is_file() for name in (INDEX, SINGLE))
        stored = stored_tensors(folder) if is_safetensors else {}
    except BadTensorFile as error:
        raise WrongWeights(str(error)) from error
    with nullcontext() if uniform else keeping_float32():
        model, info = auto_class(folder).from_pretrained(
            folder,
            dtype=dtype,
            # Other shapes are reported in `info` instead of raised, for the errors below.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **loading_options(folder),
        )
    if missing := sorted(info["missing_keys"]):
        suffix = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WrongWeights(
            f"{folder}: none of its files holds {missing[0]}{suffix}, of {type(model).__name__}. "
            "Is config.json that of these files? Copy the whole model again"
        )
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise WrongWeights(_wrong_shape(f"{folder}: {name}", shape, name, expected))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("quantization_config"):
        for name, weight in model.named_parameters():
            if name in stored:
                _check_format(f"{stored[name].file}: {name}", weight, stored[name])
    return model


def _wrong_shape(where: str, shape: Sequence[int], name: str, expected: Sequence[int]) -> str:
    return (
        f"{where} has shape {list(shape)}, and by config.json {name} has {list(expected)}. Copy "
        "config.json and weights of the same model"
    )


def _check_format(where: str, weight: Tensor, stored: StoredTensor) -> None:
    """Raise WrongWeights for a tensor of integers, or of single bytes, for a weight of floats."""
    is_unquantized = stored.dtype.is_floating_point and stored.dtype.itemsize > 1
    if weight.dtype.is_floating_point and not is_unquantized:
        raise WrongWeights(
            f"{where} has the format {stored.format}, and config.json names no quantization "
            "that would explain it. Give model.path a folder of float32, float16 or bfloat16 "
            "weights"
        )


class SlicedWeights:
    """Where each weight of a model is in the files of a folder.

    With it, each process of a sharded policy or teacher reads only the rows that it holds.
    `read_shards` makes these calls, in all processes:

    1. `fill` reads this process's rows, and packs those that are stored in 4 bits.
    2. `share_scales` gives every process the scales of all rows in 4 bits.
    3. `check_copies` compares the files of several machines.

    A weight is a tensor of the files, or transformers makes it of several (`Conversion`), which
    this class does with transformers' own converters.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, rank: int = 0) -> None:
        """Find each weight of `model`, which has no adapters yet, in the files of `folder`.

        Raises WrongWeights, in which `rank` names this process.
        """
        self.folder, self.rank = folder, rank
        self._own_scales: dict[str, Tensor] = {}
        """Name of a weight in 4 bits -> the scales of this process's rows, which `fill` reads."""
        try:
            self._stored = stored_tensors(folder)  # by name; `_find_sources` reads it
        except (BadTensorFile, OSError) as error:
            raise WrongWeights(f"rank {rank}: {error}") from error
        self._model = model
        self._sources = {source.name: source for source in self._find_sources(model)}
        """Name of a weight -> what it is read from: a tensor of the files, or several that
        transformers converts."""
        for name, weight in model.named_parameters(remove_duplicate=False):
            # Files hold tied weights under one of their names.
            if name in self._sources or self._tied_source(name) is not None:
                continue
            raise WrongWeights(
                f"rank {rank}: {folder}: none of its {len(self._files)} safetensors files holds "
                f"{name}, a weight of {type(model).__name__} with shape {list(weight.shape)}. Is "
                "config.json that of these files? Copy the whole model again"
            )

    @property
    def _files(self) -> list[Path]:
        return sorted({stored.file for stored in self._stored.values()})

    def _tied_source(self, name: str) -> WeightSource | None:
        """Return the source of a weight that is tied to `name`. None: the files lack it too."""
        pairs = self._model.all_tied_weights_keys.items()
        partners = chain((b for a, b in pairs if a == name), (a for a, b in pairs if b == name))
        sources = (self._sources[partner] for partner in partners if partner in self._sources)
        return next(sources, None)

    def _find_sources(self, model: PreTrainedModel) -> Iterator[WeightSource]:
        """Yield the source of each weight and buffer, matching names as transformers does.

        transformers has two kinds of transforms from files to a model: renamings, of a weight's
        name alone, and converters, which make weights of several tensors.
        """
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        state, prefix = model.state_dict(), model.base_model_prefix
        sources_of: dict[str, list[tuple[str, StoredTensor]]] = {}  # by a conversion's first weight
        for key in sorted(self._stored, key=dot_natural_key):
            # The weight's name in the model, and the pattern of a converter that needs this tensor.
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            # Some renamings are meant for files of another version: these have the model's names.
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                continue  # as transformers does: weights of another task
            if pattern is not None:
                # One of the tensors of a conversion. transformers gives all of them the name of the
                # first weight that the conversion makes.
                sources_of.setdefault(name, []).append((pattern, self._stored[key]))
                continue
            self._check(name, state[name], self._stored[key].shape, self._stored[key])
            yield WeightSource(name, self._stored[key], tuple(state[name].shape), state[name].dtype)
        # As `from_pretrained` records them: saving the model reverts them.
        model._weight_conversions = [transform for transform in transforms if transform.was_used()]
        # Convert shapes alone, on the meta device, to see which weights each conversion makes.
        for first_name, sources in sources_of.items():
            first_pattern, _ = sources[0]
            converter = by_pattern[first_pattern]  # each pattern belongs to one converter
            conversion = Conversion(converter=converter, sources=tuple(sources), first=first_name)
            weights = self._convert(conversion, conversion.sources, torch.device("meta"))
            for name, tensor in weights.items():
                self._check(name, state[name], tuple(tensor.shape), sources[0][1])
                yield WeightSource(name, conversion, tuple(tensor.shape), state[name].dtype)

    def _check(
        self, name: str, weight: Tensor, shape: tuple[int, ...], stored: StoredTensor
    ) -> None:
        """Raise WrongWeights for a tensor that cannot be the weight `name`."""
        where = f"rank {self.rank}: {stored.file}: {stored.name}"
        if shape != tuple(weight.shape):
            raise WrongWeights(_wrong_shape(where, shape, name, weight.shape))
        _check_format(where, weight, stored)

    def fill(self, model: nn.Module, world: World) -> None:
        """Read buffers, and this process's rows of every weight, into a model that has storage.

        Each weight counts as progress of `world`: the watchdog sees that this process works.
        Adapters are left alone. Layers in 4 bits get their scales from `share_scales`. Raises
        WrongWeights for a file that changed or is truncated.
        """
        in_4_bits = _layers_in_4_bits(model)
        try:
            for name, tensor, source in self._weights_of(model):
                rows, part = own_rows(tensor), local_part(tensor)
                if name in in_4_bits:
                    packed, self._own_scales[name] = self._read_packed(source, rows, part.device)
                    part.copy_(packed)
                else:
                    self._read(source, rows, part)
                world.progress += 1
        except (BadTensorFile, OSError) as error:
            raise WrongWeights(f"rank {self.rank}: {error}") from error

    def share_scales(self, model: nn.Module) -> None:
        """Give the layers in 4 bits the scales of all rows. All processes call it together."""
        for name, layer in _layers_in_4_bits(model).items():
            gather_scales(layer, self._own_scales[name])

    def _read_packed(
        self, weight: WeightSource, rows: RowRange, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Read rows of a weight; return them in 4 bits, and the scale of each of their blocks."""
        shape = (rows.stop - rows.start, *weight.shape[1:])
        values = torch.empty(shape, dtype=weight.dtype, device=device)
        self._read(weight, rows, values)
        return pack(values)

    def _weights_of(self, model: nn.Module) -> Iterator[tuple[str, Tensor, WeightSource]]:
        """Yield each weight once: its name without adapters, the weight, and its source."""
        yielded_ids: set[int] = set()
        # `keep_vars`: otherwise tied weights would be tensors with different ids.
        for full_name, tensor in model.state_dict(keep_vars=True).items():
            name = base_name(full_name)
            source = self._sources.get(name) or self._tied_source(name)
            if source is not None and id(tensor) not in yielded_ids:
                yielded_ids.add(id(tensor))
                yield name, tensor, source

    @torch.no_grad()
    def _read(self, weight: WeightSource, rows: RowRange, into: Tensor) -> None:
        """Read rows of a weight into `into`, which has the weight's format.

        A weight's source is one tensor of the files, or a `Conversion`, which makes it of several.
        For example row i of a packed weight of experts is made of the tensors of expert i.
        """
        source = weight.source
        if isinstance(source, StoredTensor):
            read_rows(source, rows.start, into)
            return
        if rows.stop == rows.start:
            return
        # The conversion's tensors, as (pattern, tensor): the pattern says what a tensor is. They
        # are all converted, and the rows taken from the result, which begins with row 0.
        sources, start = source.sources, rows.start
        if source.by_expert:
            # A row is an expert, made of the expert's tensor of each pattern, such as gate and up.
            # Convert the tensors of these experts alone: only their rows are made.
            by_pattern: dict[str, list[tuple[str, StoredTensor]]] = {}
            for pattern, tensor in sources:
                by_pattern.setdefault(pattern, []).append((pattern, tensor))
            experts = (pairs[rows.start : rows.stop] for pairs in by_pattern.values())
            sources = tuple(chain(*experts))
            start = 0  # the result then begins with the first of these rows
        weights = self._convert(source, sources, torch.device("cpu"), weight.dtype)
        into.copy_(weights[weight.name][start : start + rows.stop - rows.start])

    def _convert(
        self,
        conversion: Conversion,
        sources: Sequence[tuple[str, StoredTensor]],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Return the weights that a conversion of transformers makes of `sources`, by name.

        A conversion makes weights of the model from tensors of the files with other names or
        shapes, for example one weight of all experts from one tensor for each expert. `sources` are
        its tensors, each with the pattern of the converter that its name matches: all of them, or
        those of some experts. `dtype` is the format in which they are read; None: that of the
        files. On the meta device nothing is read, and only the shapes are right.
        """
        converter = deepcopy(conversion.converter)  # it collects the tensors that are added to it
        for pattern, stored in sources:
            tensor = torch.empty(stored.shape, dtype=dtype or stored.dtype, device=device)
            if device.type != "meta":
                read_rows(stored, 0, tensor)
            # The converter collects tensors by pattern, for the weight `first`. If it makes several
            # weights, it derives the other names from that one.
            converter.add_tensor(conversion.first, stored.name, pattern, tensor)
        weights = converter.convert(conversion.first, model=self._model, config=self._model.config)
        # As transformers does: some operations return a tensor in a list.
        return {name: t[0] if isinstance(t, list) else t for name, t in weights.items()}

    def check_copies(self, model: nn.Module, world: World) -> None:
        """Raise WrongWeights in all processes if a rank's files differ from those of rank 0.

        Ranks with other files than rank 0 (by `_identity`: inode, size, time) send checksums of the
        rows that they have read. Each rank that shares rank 0's files takes some of them: it reads
        the same rows from rank 0's files and compares checksums. The ranks wait for one another
        without a time limit (`patient`), because reading files may take long.
        """
        identities = world.gather([self._identity()], "the files of the weights")
        main_files = identities[0]
        main_readers = [rank for rank, files in enumerate(identities) if files == main_files]
        copy_readers = [rank for rank, files in enumerate(identities) if files != main_files]
        if not copy_readers:
            return
        # Of the rows in memory, as they were read from this rank's copy.
        digests = {} if self.rank in main_readers else self._digests(model, rows=None)
        share = (str(self.folder), rows_of(model), digests)
        shares = world.exchange([share], "the checksums of shards", patient=True)
        ranks_to_check: list[int] = []
        if self.rank in main_readers:  # they divide the readers of copies among themselves
            ranks_to_check = copy_readers[main_readers.index(self.rank) :: len(main_readers)]
        with world.together("the comparison of shards", WrongWeights, patient=True):
            for rank in ranks_to_check:
                folder, rows, copy_digests = shares[rank]
                main_digests = self._digests(model, rows)  # of that rank's rows in rank 0's files
                for name, digest in copy_digests.items():
                    if main_digests[name] != digest:
                        raise WrongWeights(
                            f"rank {rank}: {Path(folder, self._file_name(name))}: its copy of "
                            f"{name} differs from that of rank {self.rank}. Copy the model to "
                            "every machine again, or give all of them one shared folder"
                        )

    def _file_name(self, name: str) -> str:
        """Return the name of the file that holds a weight."""
        weight = self._sources.get(name) or self._tied_source(name)
        assert weight is not None
        source = weight.source
        stored = source if isinstance(source, StoredTensor) else source.sources[0][1]
        return stored.file.name

    def _identity(self) -> list[tuple[str, int, int, int]]:
        """Return name, inode, size and time of each file: equal for processes that share files."""
        stats = [(file.name, file.stat()) for file in self._files]
        return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def _digests(self, model: nn.Module, rows: dict[str, RowRange] | None) -> dict[str, str]:
        """Return the checksum of some rows of each weight, by the weight's name.

        `rows` None: of the rows that this process holds in memory. Otherwise `rows` are those that
        another process holds, and they are read from this process's files. `check_copies` compares
        the two, to see that both processes have the same files.
        """
        checksums, in_4_bits = {}, _layers_in_4_bits(model)
        for name, tensor, source in self._weights_of(model):
            parts: tuple[Tensor, ...]
            if rows is None:
                scales = (self._own_scales[name],) if name in in_4_bits else ()
                parts = (local_part(tensor), *scales)
            elif name in in_4_bits:
                # (packed rows, scales). Packed on the device of this process's rows, of the same
                # kind as the other's: another kind might round to other bits.
                parts = self._read_packed(source, rows[name], local_part(tensor).device)
            else:
                is_scalar = not source.shape
                shape = (rows[name].stop - rows[name].start, *source.shape[1:])
                values = torch.empty(() if is_scalar else shape, dtype=source.dtype)
                self._read(source, rows[name], values)
                parts = (values,)
            checksum = sha256()
            for part in parts:
                checksum.update(bytes_of(part.detach().cpu()))
            checksums[name] = checksum.hexdigest()
        return checksums


def _layers_in_4_bits(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers in 4 bits by the names of their weights without adapters."""
    return {base_name(f"{name}.weight"): layer for name, layer in quantized_layers(model)}


def rows_of(model: nn.Module) -> dict[str, RowRange]:
    """Return this process's rows of every weight, by its name without adapters."""
    state = model.state_dict(keep_vars=True)
    return {base_name(name): own_rows(tensor) for name, tensor in state.items()}


def read_shards(weights: SlicedWeights, scorer: Any, device: torch.device, world: World) -> None:
    """Give the sharded model of a `Scorer` storage on `device` and read its weights.

    Processes wait for one another without a time limit, because a file system may take minutes to
    answer for the first time. Raises WrongWeights, or PeerFailed if another process failed.
    """
    give_storage(scorer, device)
    # An error of one process ends all. The block itself must not communicate.
    with world.together("the weights in every process", WrongWeights, patient=True):
        weights.fill(scorer.model, world)
    # The next two communicate. Layers in 4 bits: each process has the scales of the rows that it
    # has read, and needs those of all rows.
    weights.share_scales(scorer.model)
    # Machines may have copies of the files that differ.
    weights.check_copies(scorer.model, world)


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace weights on the meta device by CPU tensors of one number, for the block.

    The number is expanded to the weight's shape, which takes no memory. peft then gives new
    adapters memory and random values, as it does beside real weights.
    """

    def one_number(weight: Tensor) -> Tensor:
        return torch.zeros((), dtype=weight.dtype).expand(weight.shape)

    def without_storage(weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    _replace(model, one_number, on_device="meta")
    # A stand-in has less memory than its shape needs, other weights have as much. Adapters that the
    # block adds are not among the stand-ins, and stay.
    stand_in_ids = {id(p) for p in model.parameters() if p.untyped_storage().nbytes() < p.nbytes}
    try:
        yield
    finally:
        _replace(model, without_storage, on_device="cpu", only=stand_in_ids)


def _replace(
    model: nn.Module,
    make: Callable[[Tensor], Tensor],
    *,
    on_device: str,
    only: set[int] | None = None,
) -> None:
    """Replace each weight on a device by what `make` returns for it. Ties are kept.

    With `only`, replace those weights alone whose ids it holds.
    """
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or weight.device.type != on_device:
                continue
            if only is not None and id(weight) not in only:
                continue
            if id(weight) not in replacements:
                grad = weight.requires_grad
                replacements[id(weight)] = nn.Parameter(make(weight.detach()), requires_grad=grad)
            module._parameters[name] = replacements[id(weight)]
