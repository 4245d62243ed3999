"""Exports a model to a folder in Hugging Face's format, in pieces of READ_ELEMENTS.

The model is never whole in memory, except a single matrix that is stored transposed (an expert of Qwen3-VL-MoE).
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.durable import committing, discard, free_bytes
from megatier.errors import CapacityError, ConfigError
from megatier.models.decoder import Unit
from megatier.models.dtypes import names_in_fp32
from megatier.models.expert_units import places_of
from megatier.models.safetensors_format import write_header
from megatier.models.weight_conversion import Assembly, TensorRun, hub_layout
from megatier.models.weight_files import INDEX_FILE, SINGLE_FILE
from megatier.models.weights import chunks, column_major

ReadElements = Callable[[Unit, int, int], Tensor]
"""Reads elements [start, stop) of a unit's layout as a flat fp32 CPU tensor."""


class Tokens(Protocol):
    """A tokenizer, or a processor with a tokenizer in it."""

    def save_pretrained(self, save_directory: str | Path) -> Any:  # noqa: ANN401 - transformers' own
        """Write its files into a folder."""


def export(
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: ReadElements,
    dtype: torch.dtype,
    shard_bytes: int,
    tokenizer: Tokens | None = None,
) -> None:
    """Write a folder for `from_pretrained`. It appears whole or not at all, even if power is lost.

    Leftovers of a killed process's export to the same folder are removed.

    Args:
        folder: a new or empty folder.
        model: the skeleton; its persistent buffers are written in their own dtype.
        units: all units of the model.
        read: reads weights; called from front to back if the written tensors are in that order.
        dtype: the dtype of the written weights, except those that the model's class keeps in fp32. Rounding is torch's,
            to nearest even.
        shard_bytes: the largest size of a file, which is cut between tensors.
        tokenizer: a tokenizer or processor to write into the folder too.

    Raises:
        ConfigError: the folder is not empty.
        CapacityError: the weights do not fit on this disk. Nothing is written.
        TransferError: writing failed. What was written is removed.
        UnsupportedModelError: no layout of the weights is known that loads back.
    """
    check_new(folder)

    # All names and sizes are known before anything is written, so what cannot be written is refused first.
    outgoing = _Outgoing(model, units, dtype)
    shards = _cut(outgoing.num_bytes, shard_bytes)
    total = sum(outgoing.num_bytes.values())

    with new_folder(folder, total) as partial:
        for file_name, names in shards.items():
            outgoing.write_shard(partial / file_name, names, read)
        if len(shards) > 1:
            _write_index(partial / INDEX_FILE, shards, total)
        _write_settings(partial, model, dtype, tokenizer)


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something, and what is none.

    Raises:
        ConfigError: it is not empty, or a file is in its place or above it.
    """
    # A folder above it may be missing too, and then the nearest one that is there has to be a folder.
    existing = (place for place in (folder, *folder.parents) if place.exists())
    nearest = next(existing, None)
    if nearest is not None and not nearest.is_dir():
        raise ConfigError(f"{nearest} is a file; export writes only to a new or empty folder. Choose another one.")
    if nearest == folder and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; export writes only to a new or empty folder. Choose another one.")


@contextmanager
def new_folder(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a folder that takes the name of another one when all of it is on the drive; or leave nothing of it.

    Args:
        folder: a new or empty folder.
        num_bytes: bytes of the weights that are written.

    Raises:
        CapacityError: they do not fit on this disk.
        TransferError: writing failed.
    """
    # A link stays, and what it leads to is written.
    folder = Path(os.path.realpath(folder))

    # Beside the folder, so that a rename is all that is left to do, and with the number of the process, so that it is
    # known later whether that still runs.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    with committing(partial, folder, "the export"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        free = free_bytes(folder.parent)
        if free < num_bytes:
            remedy = "Free space on this disk, or export to another one."
            raise CapacityError(f"the export in {folder.parent}", num_bytes, free, remedy)

        partial.mkdir()
        yield partial


def export_bytes(model: PreTrainedModel, units: Sequence[Unit], dtype: torch.dtype) -> int:
    """Return the bytes of the weights that `export` writes.

    Raises:
        UnsupportedModelError: no layout of the weights is known that loads back.
    """
    return sum(_Outgoing(model, units, dtype).num_bytes.values())


def _remove_leftovers(folder: Path) -> None:
    """Remove what exports to this folder have left whose processes are gone."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.partial")
    for path in folder.parent.iterdir():
        partial = pattern.fullmatch(path.name)
        if partial is None:
            continue

        # A folder with the number of this process is of an earlier one that had the same number.
        process = partial[1]
        is_own = process == str(os.getpid())
        if is_own or not Path("/proc", process).exists():
            discard(path)


class _Outgoing:
    """The tensors that are being written, by the names that they have on disk.

    Attributes:
        num_bytes: bytes of each, in the order in which they are written.
    """

    def __init__(self, model: PreTrainedModel, units: Sequence[Unit], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places = places_of(units)
        self._in_fp32 = names_in_fp32(model, self._places)

        # In the order of whole layers, however these are cut into units.
        state = model.state_dict(keep_vars=True)
        self._buffers = dict[str, Tensor]()
        parameters = list[str]()
        for name, tensor in state.items():
            if not isinstance(tensor, nn.Parameter):
                self._buffers[name] = tensor
            elif name in self._places:
                parameters.append(name)
        self._ranks = {name: rank for rank, name in enumerate((*self._buffers, *parameters))}

        # Wider dtypes first, so that every tensor of a file is aligned to its own element size. Among these, units come
        # from front to back, also if the hub's layout splits their tensors, so that a reader of chunks reads each once.
        tensors = {name: state[name] for name in (*self._places, *self._buffers)}
        layout = hub_layout(model, tensors)
        in_order = sorted(layout.items(), key=lambda item: self._order(item[1]))
        self._layout = dict(in_order)

        self.num_bytes = dict[str, int]()
        for name, assembly in in_order:
            num_elements = math.prod(assembly.shape)
            self.num_bytes[name] = num_elements * self._dtype_of(assembly).itemsize

    def write_shard(self, path: Path, names: Sequence[str], read: ReadElements) -> None:
        """Write a file: its header, then the tensors in the order of `names`. It is on disk when this returns."""
        tensors = {name: self._layout[name] for name in names}
        header = write_header((name, self._dtype_of(tensor), tensor.shape) for name, tensor in tensors.items())

        with path.open("wb") as file:
            file.write(header)
            for tensor in tensors.values():
                for run in tensor.runs:
                    for values in self._chunks(run, read):
                        # As bytes, because numpy has no bf16.
                        in_bytes = values.contiguous().view(torch.uint8)
                        file.write(in_bytes.numpy().data)

            # The folder gets its name when all files are written, which must not outlive bytes that power loss takes.
            file.flush()
            os.fsync(file.fileno())

    def _order(self, assembly: Assembly) -> tuple[int, int, int]:
        """Return a key that sorts tensors into the order in which they are written."""
        first = assembly.runs[0]
        return -self._dtype_of(assembly).itemsize, self._ranks[first.name], first.start

    def _dtype_of(self, assembly: Assembly) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        source = assembly.runs[0].name
        if source in self._buffers:
            return self._buffers[source].dtype
        if source in self._in_fp32:
            return torch.float32
        return self._dtype

    def _chunks(self, run: TensorRun, read: ReadElements) -> Iterator[Tensor]:
        """Yield the elements of a run, in chunks."""
        if run.num_columns:
            # The first column has elements of all rows, so the matrix is whole in memory.
            stop = run.start + run.num_elements
            parts = list(self._elements(run.name, run.start, stop, read))
            yield column_major(torch.cat(parts), run.num_columns)
            return

        for first, last in chunks(run.num_elements):
            start = run.start + first
            stop = run.start + last
            yield from self._elements(run.name, start, stop, read)

    def _elements(self, name: str, start: int, stop: int, read: ReadElements) -> Iterator[Tensor]:
        """Yield elements [start, stop) of a tensor of the model, flat, from each unit that holds some."""
        if name in self._buffers:
            yield self._buffers[name].flatten()[start:stop]
            return

        for unit, tensor in self._places[name]:
            # Of experts that are cut into parts, each unit holds some.
            first, end = tensor.elements
            lower = max(start, first)
            upper = min(stop, end)
            if lower < upper:
                values = read(unit, tensor.place(lower), tensor.place(upper))
                yield values if name in self._in_fp32 else values.to(self._dtype)


def _cut(num_bytes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return names by file: consecutive tensors up to `shard_bytes`, which only a larger single tensor exceeds."""
    shards: list[list[str]] = []
    left_bytes = 0

    # A tensor is never cut. One that is larger than a file has a file of its own.
    for name, size in num_bytes.items():
        if size > left_bytes:
            shards.append([])
            left_bytes = shard_bytes
        shards[-1].append(name)
        left_bytes -= size

    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}

    # The names that save_pretrained gives.
    count = len(shards)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, start=1)}


def _write_index(path: Path, shards: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Write the index, which says in which file each tensor lies."""
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def _write_settings(folder: Path, model: PreTrainedModel, dtype: torch.dtype, tokenizer: Tokens | None) -> None:
    """Write config, generation settings and tokenizer. The cache that training switched off is on again."""
    # A copy, since a model that is in training goes on with its own.
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.use_cache = True

    # Not by save_pretrained(), which refuses settings that loading accepts. After a training run that is too late.
    config.to_json_file(folder / "config.json", use_diff=True)
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
