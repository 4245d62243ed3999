"""Reads weights from a folder of safetensors files, in pieces of READ_ELEMENTS.

The model is never whole in memory, except a single matrix that is stored transposed (an expert of Qwen3-VL-MoE) or
quantised.

`SafetensorsFolder` and `Initialiser` provide a run's first weights. As `WeightReader`s they read a unit as a stream of
(first element in the unit's layout, fp32 values), without the layout's padding. A piece is valid until the next one is
read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO, RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.errors import TransferError, UnsupportedModelError
from megatier.foreign import printable
from megatier.layout import Layout, TensorSlice
from megatier.models.decoder import Unit
from megatier.models.safetensors_format import SAFETENSORS_DTYPES, StoredTensor
from megatier.models.weight_conversion import Assembly, TensorRun, assemble, runs_holding
from megatier.models.weight_files import read_generation_config, read_headers

READ_ELEMENTS = 4 << 20
"""The elements that are read, converted or written at once: 16 MiB in fp32."""

FULL_PRECISION_NAMES = ("F32", "BF16", "F16")
"""Stored dtypes of unquantised weights."""
_NO_DECODING: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
"""No quantised tensors."""


ReadPart = Callable[[Layout], Iterator[tuple[int, Tensor]]]
"""Yields (first element, flat fp32 tensor) pieces of a part of a unit, in increasing order."""


class WeightReader(Protocol):
    """A source of weights."""

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, flat fp32 CPU tensor) pieces, in increasing order.

        Args:
            unit: the unit.
            shard: the layout of a rank's shard of the unit, to read only that; None: the whole unit.

        Raises:
            TransferError: a file has become shorter or unreadable meanwhile.
        """


@runtime_checkable
class PartReader(WeightReader, Protocol):
    """A source of weights whose parts several threads may read at once."""

    def part_reader(self, unit: Unit) -> ReadPart:
        """Return a function that reads any part of a unit in any thread, as `read` does. One thread calls this."""


class TensorReader:
    """A source of weights that reads parameter by parameter."""

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a unit, or of a rank's shard of it; see `WeightReader`."""
        for tensor in (shard or unit.layout).tensors:
            yield from self.read_tensor(unit, tensor)

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter of a unit, or of a run of its elements; see `WeightReader`."""
        raise NotImplementedError

    def read_whole(self, unit: Unit, tensor: TensorSlice) -> Tensor:
        """Return a parameter of a unit, or a run of its elements, at once: flat, fp32."""
        values = torch.empty(tensor.num_elements, dtype=torch.float32, device="cpu")
        for first, piece in self.read_tensor(unit, tensor):
            # Copied, since a piece is valid only until the next one.
            start = first - tensor.start
            values[start : start + piece.numel()] = piece
        return values


class SafetensorsFolder(TensorReader):
    """The weights of a folder in Hugging Face's format: `model.safetensors`, or shards with an index.

    Files are read through one buffer, so memory does not grow with their size.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        stored: Mapping[str, StoredTensor] | None = None,
        decoding: Mapping[str, Callable[[], Tensor]] = _NO_DECODING,
    ) -> None:
        """Check every header against the skeleton, and read persistent buffers and generation settings into it.

        Args:
            folder: the model's folder.
            model: the skeleton.
            stored: the tensors of the folder, with quantised ones described as decoded; None: as in the files' headers.
            decoding: functions that decode quantised tensors, by stored name; they return flat fp32.

        Raises:
            UnsupportedModelError: a file is damaged or malicious, or a tensor is missing, unknown, of another shape, or
                not in full precision. The message names file and tensor.
        """
        self.stored = read_headers(folder) if stored is None else stored
        self._decoding = decoding
        self._last_decoded: tuple[str, Tensor] | None = None
        shapes = {name: tensor.shape for name, tensor in self.stored.items()}
        self._assemblies = assemble(model, shapes)
        self._folder = folder

        # Buffers are small and read at once, but only after all names and shapes are checked, so an error changes
        # nothing.
        self._check(model)
        self._read_buffers(model)

        settings = read_generation_config(folder)
        if settings is not None:
            model.generation_config = settings

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter, or of a run of its elements; see `WeightReader.read`.

        Only the bytes of these elements are read. A matrix that is stored transposed is read whole if one of its
        elements is needed.
        """
        first, runs = runs_holding(self._assemblies[tensor.name], *tensor.elements)
        position = tensor.place(first)
        for piece in self._read(runs):
            # A transposed matrix may begin before the wanted elements and end after them.
            lower = max(tensor.start - position, 0)
            upper = max(tensor.stop - position, 0)
            wanted = piece[lower:upper]
            if wanted.numel():
                yield max(position, tensor.start), wanted
            position += piece.numel()

    def stored_name(self, name: str) -> str | None:
        """Return the name of the stored tensor that a parameter of the skeleton is as a whole; None: it is no such."""
        match self._assemblies.get(name):
            case Assembly(shape, (run,)) if not run.num_columns and self.stored[run.name].shape == shape:
                return run.name
            case _:
                return None

    def _read(self, runs: Sequence[TensorRun], dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Yield the elements of runs in a dtype. Buffers are reused: a piece is valid until the next one.

        Raises:
            TransferError: see `read`.
        """
        # As large as the largest piece, since a tiny tensor needs no buffer of megabytes.
        longest = max((run.num_elements for run in runs), default=0)
        widest_bytes = max((SAFETENSORS_DTYPES[self.stored[run.name].dtype].itemsize for run in runs), default=0)
        num_elements = min(READ_ELEMENTS, longest)
        raw = torch.empty(num_elements * widest_bytes, dtype=torch.uint8, device="cpu")
        values = torch.empty(num_elements, dtype=dtype, device="cpu")

        for run in runs:
            if run.name in self._decoding:
                decoded = self._decoded(run)
                yield from decoded.to(dtype).split(READ_ELEMENTS)
            elif run.num_columns:
                matrix = self._transposed(run)
                yield from matrix.to(dtype).split(READ_ELEMENTS)
            else:
                yield from self._as_they_lie(run, raw, values)

    def _as_they_lie(self, run: TensorRun, raw: Tensor, values: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a run, converted piece by piece from one buffer into another."""
        stored = self.stored[run.name]
        dtype = SAFETENSORS_DTYPES[stored.dtype]
        with open_at(stored, run.start * dtype.itemsize) as file:
            for start, stop in chunks(run.num_elements):
                # The last piece may be shorter than the buffers.
                count = stop - start
                piece = raw[: count * dtype.itemsize]
                read_exactly(file, piece, stored)
                yield values[:count].copy_(piece.view(dtype))

    def _transposed(self, run: TensorRun) -> Tensor:
        """Return the elements of a run that is a matrix read column by column."""
        stored = self.stored[run.name]
        dtype = SAFETENSORS_DTYPES[stored.dtype]

        # Columns span the whole matrix, so it must be read before its first column is known.
        start = run.start * dtype.itemsize
        stop = start + run.num_elements * dtype.itemsize
        raw = read_bytes(stored, start, stop)
        return column_major(raw.view(dtype), run.num_columns)

    def _decoded(self, run: TensorRun) -> Tensor:
        """Return the elements of a run of a quantised tensor, decoded."""
        # The last tensor is cached, since it may be read in several runs.
        if self._last_decoded is None or self._last_decoded[0] != run.name:
            # The previous one is freed first, so that two are never in memory.
            self._last_decoded = None
            decode = self._decoding[run.name]
            self._last_decoded = run.name, decode()

        _, tensor = self._last_decoded
        stop = run.start + run.num_elements
        numbers = tensor[run.start : stop]
        return column_major(numbers, run.num_columns) if run.num_columns else numbers

    def _check(self, model: PreTrainedModel) -> None:
        """Check names, shapes and dtypes against the skeleton, and resolve the names of tied weights.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        # A tied tensor is one object with several names, any of which may be stored. Without `keep_vars` each name
        # would have its own object.
        aliases: defaultdict[int, list[str]] = defaultdict(list)
        for name, tensor in model.state_dict(keep_vars=True).items():
            aliases[id(tensor)].append(name)

        state = model.state_dict()
        unknown = [name for name in self._assemblies.keys() - state.keys() if not _is_ignored(model, name)]
        if unknown:
            raise UnsupportedModelError(
                f"{self._where(min(unknown))} is not part of {type(model).__name__} "
                f"({len(unknown)} such tensors). Does config.json belong to these files?"
            )

        for names in aliases.values():
            stored_names = [name for name in names if name in self._assemblies]
            if not stored_names:
                raise UnsupportedModelError(
                    f"{self._folder}: tensor {names[0]} is missing. Does config.json belong to these files?"
                )
            for name in stored_names:
                self._check_tensor(name, state[name])

            # If it is stored under several names, the values must be equal.
            for name in stored_names[1:]:
                self._refuse_unequal(stored_names[0], name)

            # Units use only the first of its names.
            self._assemblies[names[0]] = self._assemblies[stored_names[0]]

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        """Check a stored tensor against its parameter or buffer. An integer buffer accepts integers that fit.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        assembly = self._assemblies[name]
        if assembly.shape != tensor.shape:
            raise UnsupportedModelError(
                f"{self._where(name)} has shape {assembly.shape}; the config asks for {tuple(tensor.shape)}."
            )

        is_float = tensor.is_floating_point()
        for run in assembly.runs:
            dtype = self.stored[run.name].dtype
            if is_float and dtype not in FULL_PRECISION_NAMES:
                raise UnsupportedModelError(
                    f"{self._where(name)} is {printable(dtype)}; full-precision training starts from "
                    f"{', '.join(FULL_PRECISION_NAMES)}."
                )
            if not is_float and not _is_held_by(dtype, tensor.dtype):
                raise UnsupportedModelError(
                    f"{self._where(name)} is {printable(dtype)}; the model takes {tensor.dtype} there."
                )

    def _refuse_unequal(self, first: str, second: str) -> None:
        """Refuse a tied weight that is stored twice with different values, one of which would be lost.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        # Compared piece by piece, since neither may be whole in memory.
        one = self._read(self._assemblies[first].runs)
        other = self._read(self._assemblies[second].runs)
        is_equal = all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        if not is_equal:
            raise UnsupportedModelError(
                f"{self._where(second)} differs from {first}, but the config ties them. Set tie_word_embeddings: false."
            )

    def _read_buffers(self, model: PreTrainedModel) -> None:
        """Read the skeleton's persistent buffers, in their own dtypes unless they are floats."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, buffer in model.state_dict().items():
            if name in parameters:
                continue

            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            flat = buffer.view(-1)
            position = 0
            for piece in self._read(self._assemblies[name].runs, dtype):
                stop = position + piece.numel()
                flat[position:stop] = piece
                position = stop

    def _where(self, name: str) -> str:
        """Return file and stored name of a tensor, for messages."""
        run = self._assemblies[name].runs[0]
        stored = self.stored[run.name]
        return f"{stored.path}: tensor {printable(stored.name)}"


def _is_held_by(stored: str, dtype: torch.dtype) -> bool:
    """Return whether a non-float dtype can represent every value of a stored dtype."""
    # Two non-float dtypes are promoted to the narrowest one that represents all values of both.
    return stored in SAFETENSORS_DTYPES and torch.promote_types(SAFETENSORS_DTYPES[stored], dtype) is dtype


def _is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Return whether a stored tensor is a leftover of old files, or a buffer that is computed from the config."""
    patterns = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
        r"(^|\.)position_ids$",
    ]
    return any(re.search(pattern, name) for pattern in patterns)


def open_at(stored: StoredTensor, start: int) -> FileIO:
    """Open the file of a stored tensor at one of the tensor's bytes."""
    # Unbuffered, since Python's buffer would copy all bytes once more.
    file = stored.path.open("rb", buffering=0)
    file.seek(stored.offset + start)
    return file


def read_bytes(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Return bytes [start, stop) of a stored tensor, uint8.

    Raises:
        TransferError, FileChangedError: see `read_exactly`.
    """
    raw = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
    with open_at(stored, start) as file:
        read_exactly(file, raw, stored)
    return raw


def read_exactly(file: RawIOBase, piece: Tensor, stored: StoredTensor) -> None:
    """Fill a uint8 tensor from the file's position, even if a system call returns less than was asked for.

    Raises:
        TransferError: the file is too short, or cannot be read.
        FileChangedError: the file is not the one whose header was read, or was written since.
    """
    # A view of the tensor's memory, so that bytes are copied once.
    view = piece.numpy().data
    while view:
        position = file.tell()
        try:
            count = file.readinto(view)
        except OSError as error:
            raise TransferError("reading weights", "disk", str(stored.path), position, error.errno or 0) from error

        if not count:
            raise TransferError("reading weights", "disk", str(stored.path), position, 0)
        view = view[count:]

    # Checked afterwards, so that bytes that were written meanwhile are noticed too.
    stored.check(file.fileno())


def column_major(elements: Tensor, num_columns: int) -> Tensor:
    """Return the elements of a row-major matrix in column-major order, flat."""
    columns: Tensor = elements.view(-1, num_columns).t()
    return columns.flatten()


def chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of at most READ_ELEMENTS."""
    for start in range(0, num_elements, READ_ELEMENTS):
        yield start, min(start + READ_ELEMENTS, num_elements)
