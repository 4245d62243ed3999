"""Weights read from a folder of safetensors, in pieces of CHUNK_ELEMENTS: the model is never whole in memory.

A matrix that is stored transposed (an expert of Qwen3-VL-MoE), or is quantised, is whole in memory while it is read.

`SafetensorsFolder` and `Initialiser` are the two sources of a run's first weights, `WeightReader`s both. They read a
unit as a stream of (first element in the unit's layout, fp32 values), without the layout's padding. A piece is valid
until the next one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.errors import TransferError, UnsupportedModelError
from megatier.foreign import shown
from megatier.layout import Layout, TensorSlice
from megatier.models.conversion import Assembly, TensorRun, assemble, holding
from megatier.models.decoder import Unit
from megatier.models.folder import read_generation_config, read_headers
from megatier.models.shards import DTYPES, StoredTensor

CHUNK_ELEMENTS = 4 << 20
"""Elements that are read, converted or written at once: 16 MiB in fp32."""

FULL_PRECISION = ("F32", "BF16", "F16")
"""Dtypes of files that hold weights as they were trained."""
NOTHING: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
"""Decodes no tensor."""


ReadPart = Callable[[Layout], Iterator[tuple[int, Tensor]]]
"""Yields (first element, flat fp32 tensor) pieces of a part of a unit, in increasing order."""


class WeightReader(Protocol):
    """A source of weights."""

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, flat fp32 CPU tensor) pieces, in increasing order.

        Args:
            unit: the unit.
            shard: the layout of a rank's shard of it, which is read then; None: the whole unit is.

        Raises:
            TransferError: a file has become shorter or unreadable meanwhile.
        """


@runtime_checkable
class PartReader(WeightReader, Protocol):
    """A source of weights of which several threads may read different parts at once."""

    def parts(self, unit: Unit) -> ReadPart:
        """Return what reads any part of a unit, in any thread, as `read` does. One thread asks for it, unit by unit."""


class TensorReader:
    """A source of weights that are read parameter by parameter."""

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a unit, or of a rank's shard of it; see `WeightReader`."""
        for tensor in (shard or unit.layout).tensors:
            yield from self.pieces(unit, tensor)

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter of a unit, or of a run of its elements; see `WeightReader`."""
        raise NotImplementedError


class SafetensorsFolder(TensorReader):
    """The weights of a folder in Hugging Face's format: `model.safetensors`, or shards with an index.

    Files are read with plain buffered reads into one buffer, so memory does not grow with their size.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        stored: Mapping[str, StoredTensor] | None = None,
        decoding: Mapping[str, Callable[[], Tensor]] = NOTHING,
    ) -> None:
        """Check every header against the skeleton, and read persistent buffers and generation settings into it.

        Args:
            folder: the model's folder.
            model: the skeleton.
            stored: the tensors of the folder, with quantised ones as they are when they are decoded; None: those that
                its files name.
            decoding: gives quantised tensors by their stored names: decoded, flat, in fp32.

        Raises:
            UnsupportedModelError: a file is damaged or hostile, or a tensor is missing, superfluous, of another shape,
                or not in full precision. The message names file and tensor.
        """
        self._stored = self.stored = read_headers(folder) if stored is None else stored
        self._decoding = decoding
        self._last: tuple[str, Tensor] | None = None
        self._assemblies = assemble(model, {name: stored.shape for name, stored in self._stored.items()})
        self._folder = folder
        self._check(model)
        self._read_buffers(model)
        if (found := read_generation_config(folder)) is not None:
            model.generation_config = found

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter, or of a run of its elements; see `WeightReader.read`.

        Of the files, the bytes of these elements are read and no others. A matrix that is stored transposed is read
        whole if one of its elements is wanted.
        """
        first, runs = holding(self._assemblies[tensor.name], *tensor.elements)
        position = tensor.place(first)
        for piece in self._read(runs):
            wanted = piece[max(tensor.start - position, 0) : max(tensor.stop - position, 0)]
            if wanted.numel():
                yield max(position, tensor.start), wanted
            position += piece.numel()

    def stored_name(self, name: str) -> str | None:
        """Return the name of the stored tensor that a parameter of the skeleton is as a whole; None: it is no such."""
        match self._assemblies.get(name):
            case Assembly(shape, (run,)) if not run.num_columns and self._stored[run.name].shape == shape:
                return run.name
            case _:
                return None

    def _read(self, runs: Sequence[TensorRun], wanted: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Yield the elements of runs in the wanted dtype. Buffers are reused: a piece is valid until the next one.

        Raises:
            TransferError: see `read`.
        """
        # As large as the largest piece, and no larger: a tiny tensor needs no buffer of megabytes.
        most = min(CHUNK_ELEMENTS, max((run.num_elements for run in runs), default=0))
        widest = max((DTYPES[self._stored[run.name].dtype].itemsize for run in runs), default=0)
        raw = torch.empty(most * widest, dtype=torch.uint8, device="cpu")
        values = torch.empty(most, dtype=wanted, device="cpu")

        for run in runs:
            if run.name in self._decoding:
                numbers = self._decoded(run.name)[run.start : run.start + run.num_elements]
                whole = by_columns(numbers, run.num_columns) if run.num_columns else numbers
                yield from whole.to(wanted).split(CHUNK_ELEMENTS)
                continue

            stored = self._stored[run.name]
            dtype = DTYPES[stored.dtype]

            # Without Python's own buffer, through which all bytes would be copied once more.
            with stored.path.open("rb", buffering=0) as file:
                file.seek(stored.offset + run.start * dtype.itemsize)
                if run.num_columns:
                    # Columns lie across the whole matrix, so it has to be read before its first column is known.
                    matrix = torch.empty(run.num_elements * dtype.itemsize, dtype=torch.uint8, device="cpu")
                    read_exactly(file, matrix, stored)
                    yield from by_columns(matrix.view(dtype), run.num_columns).to(wanted).split(CHUNK_ELEMENTS)
                    continue

                for start, stop in chunks(run.num_elements):
                    piece = raw[: (stop - start) * dtype.itemsize]
                    read_exactly(file, piece, stored)
                    yield values[: stop - start].copy_(piece.view(dtype))

    def _decoded(self, name: str) -> Tensor:
        """Return a quantised tensor, decoded. The last one stays, since it may be read in several runs."""
        if self._last is None or self._last[0] != name:
            # The one before goes first, so that no two of them are in memory.
            self._last = None
            self._last = name, self._decoding[name]()
        return self._last[1]

    def _check(self, model: PreTrainedModel) -> None:
        """Compare names, shapes and dtypes with the skeleton, and find tied weights under all their names.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        # A tied tensor has one object and several names, any of which may be stored.
        aliases: defaultdict[int, list[str]] = defaultdict(list)
        for name, tensor in model.state_dict(keep_vars=True).items():
            aliases[id(tensor)].append(name)

        known = {name for names in aliases.values() for name in names}
        if unknown := sorted(name for name in self._assemblies.keys() - known if not _ignored(model, name)):
            raise UnsupportedModelError(
                f"{self._where(unknown[0])} is not part of {type(model).__name__} "
                f"({len(unknown)} such tensors). Does config.json belong to these files?"
            )

        state = model.state_dict()
        for names in aliases.values():
            found = [name for name in names if name in self._assemblies]
            if not found:
                raise UnsupportedModelError(
                    f"{self._folder}: tensor {names[0]} is missing. Does config.json belong to these files?"
                )
            for name in found:
                self._check_tensor(name, state[name])

            # Stored under several names, it has to hold the same values under all of them.
            for name in found[1:]:
                self._refuse_unequal(found[0], name)
            self._assemblies[names[0]] = self._assemblies[found[0]]

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with the parameter or buffer that it is for. A buffer of integers takes integers that fit.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        assembly = self._assemblies[name]
        if assembly.shape != tensor.shape:
            raise UnsupportedModelError(
                f"{self._where(name)} has shape {assembly.shape}; the config asks for {tuple(tensor.shape)}."
            )

        for stored in (self._stored[run.name].dtype for run in assembly.runs):
            if tensor.is_floating_point() and stored not in FULL_PRECISION:
                raise UnsupportedModelError(
                    f"{self._where(name)} is {shown(stored)}; full-precision training starts from "
                    f"{', '.join(FULL_PRECISION)}."
                )

            if not tensor.is_floating_point() and not _is_held_by(stored, tensor.dtype):
                raise UnsupportedModelError(
                    f"{self._where(name)} is {shown(stored)}; the model takes {tensor.dtype} there."
                )

    def _refuse_unequal(self, first: str, second: str) -> None:
        """Refuse a tied weight that is stored twice with different values, one of which would be lost.

        Raises:
            UnsupportedModelError: names file and tensor.
        """
        one = self._assemblies[first].runs
        other = self._assemblies[second].runs
        pairs = zip(self._read(one), self._read(other), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            raise UnsupportedModelError(
                f"{self._where(second)} differs from {first}, but the config ties them. Set tie_word_embeddings: false."
            )

    def _read_buffers(self, model: PreTrainedModel) -> None:
        """Read the skeleton's persistent buffers, in their own dtypes unless they are floats."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, buffer in model.state_dict().items():
            if name not in parameters:
                wanted = torch.float32 if buffer.is_floating_point() else buffer.dtype
                flat = buffer.view(-1)
                position = 0
                for piece in self._read(self._assemblies[name].runs, wanted):
                    flat[position : position + piece.numel()] = piece
                    position += piece.numel()

    def _where(self, name: str) -> str:
        """Return file and stored name of a tensor, for messages."""
        stored = self._stored[self._assemblies[name].runs[0].name]
        return f"{stored.path}: tensor {shown(stored.name)}"


def _is_held_by(stored: str, dtype: torch.dtype) -> bool:
    """Return whether every value of a stored dtype is one of a dtype that is no float."""
    return stored in DTYPES and torch.promote_types(DTYPES[stored], dtype) is dtype


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """Return whether a tensor is one that authors left in old files, or a buffer that is computed from the config."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def read_exactly(file: RawIOBase, piece: Tensor, stored: StoredTensor) -> None:
    """Fill a uint8 tensor from the file's position; a system call may return less than was asked for.

    Raises:
        TransferError: the file is too short, or cannot be read.
        FileChangedError: it is another one than its header was read from, or was written since.
    """
    # A view of the tensor's own memory, so that the bytes are copied once.
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

    # Asked afterwards, so that bytes that were written meanwhile are found too.
    stored.check(file.fileno())


def by_columns(elements: Tensor, num_columns: int) -> Tensor:
    """Return the elements of a matrix that lies row by row in the order of its columns, flat."""
    columns: Tensor = elements.view(-1, num_columns).t()
    return columns.flatten()


def chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of at most CHUNK_ELEMENTS."""
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, num_elements)
