"""First weights, drawn or read in pieces of CHUNK_ELEMENTS: the model is never whole in memory.

A matrix that is stored transposed (an expert of Qwen3-VL-MoE) is whole in memory while it is read.

`Initialiser` and `SafetensorsFolder` are the two sources of a run's first weights. Both read a unit as a stream of
(first element in the unit's layout, fp32 values), without the layout's padding. A piece is valid until the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from megatier.errors import ConfigError, TransferError, UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, TABLE_BYTES_MAX, read_object, reading, shown
from megatier.models.buffers import constructed_value
from megatier.models.conversion import TensorRun, assemble, taken
from megatier.models.decoder import Unit, bindings
from megatier.models.shards import DTYPES, StoredTensor, read_header

CHUNK_ELEMENTS = 4 << 20
"""Elements read, converted or written at once: 16 MiB in fp32."""

FULL_PRECISION = ("F32", "BF16", "F16")
"""Dtypes of checkpoints that hold weights as they were trained."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"


class Initialiser:
    """Weights as Hugging Face's own `_init_weights` draws them, one unit at a time.

    A unit's values depend on the seed and on its own name alone. A unit exists whole in fp32 while it is read.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Keep the skeleton, whose parameters are back on meta after each read."""
        self._model = model
        self._seed = seed
        self._pretrained = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the unit's layout, flat fp32 CPU tensor), in order.

        Raises:
            UnsupportedModelError: the model's own initialisation leaves a parameter unset.
        """
        values = self._initialised(unit)
        for tensor in unit.layout.tensors:
            value = values.pop(tensor.name)
            if value.isnan().any():
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} has no initial value for {tensor.name}. Start from a checkpoint."
                )

            for start, stop in chunks(tensor.num_elements):
                yield tensor.start + start, value[start:stop]

    @torch.no_grad()
    def _initialised(self, unit: Unit) -> dict[str, Tensor]:
        """Put real tensors in the unit's places for as long as the initialisation runs."""
        modules = unit.module_names if unit.is_layer else unit.module_names[:1]  # a tied head has nothing of its own
        places = [place for module in modules for place in bindings(self._model, unit, module)]
        before = [parameters[leaf] for parameters, leaf, _ in places]
        values = {
            tensor.name: nn.Parameter(self._constructed(tensor.name, tensor.shape)) for tensor in unit.layout.tensors
        }
        for parameters, leaf, tensor in places:
            parameters[leaf] = values[tensor.name]

        try:
            # Modules above the unit initialise what they own as well. That lies on meta, where writing changes nothing,
            # and where a streamed model would refuse it.
            with torch.random.fork_rng(devices=[]), torch._C.DisableTorchFunctionSubclass():
                torch.manual_seed(_seed_of(self._seed, unit.name))
                for module in modules:
                    self._init_weights(module, alone=unit.is_round)
        finally:
            for (parameters, leaf, _), parameter in zip(places, before, strict=True):
                parameters[leaf] = parameter

        return {name: value.detach().flatten() for name, value in values.items()}

    def _constructed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What the model's constructor gave a parameter, else NaN: a part of one, such as of experts, has nothing."""
        value = constructed_value(self._model.get_parameter(name))
        initial = torch.full(shape, math.nan)
        return initial if value is None or value.shape != shape else initial.copy_(value)

    def _init_weights(self, name: str, *, alone: bool) -> None:
        """Children before parents (not if alone), then upwards to the root: parents may set what lies below them.

        Each module is initialised by the nearest PreTrainedModel at or above it. What is on meta stays as it is.
        """
        children = [""] if alone else [child for child, _ in self._model.get_submodule(name).named_modules()]
        below = [f"{name}.{child}".rstrip(".") for child in children]
        for module_name in (*reversed(below), *list(_upwards(name))[1:]):
            owner = next(self._pretrained[above] for above in _upwards(module_name) if above in self._pretrained)
            owner._init_weights(self._model.get_submodule(module_name))


class SafetensorsFolder:
    """The weights of a folder in Hugging Face's format: `model.safetensors`, or shards with an index.

    Files are read with plain buffered reads into one buffer, so memory does not grow with their size.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Check every header against the skeleton; read its persistent buffers and generation settings, if any.

        Raises:
            UnsupportedModelError: a damaged or hostile file, or a tensor that is missing, superfluous, of another
                shape, or not in full precision. Names file and tensor.
        """
        self._stored = _headers(folder)
        self._assemblies = assemble(model, {name: stored.shape for name, stored in self._stored.items()})
        self._folder = folder
        self._check(model)
        self._read_buffers(model)
        if (found := _generation_config(folder)) is not None:
            model.generation_config = found

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element in the unit's layout, flat fp32 CPU tensor), in order.

        Raises:
            TransferError: the file became shorter or unreadable meanwhile.
        """
        for tensor in unit.layout.tensors:
            position = tensor.start
            for piece in self._read(taken(self._assemblies[tensor.name], tensor.offset, tensor.num_elements)):
                yield position, piece
                position += piece.numel()

    def _read(self, runs: Sequence[TensorRun], wanted: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Their elements in the wanted dtype. The two buffers are reused, so a piece is valid until the next."""
        most = min(CHUNK_ELEMENTS, max((run.num_elements for run in runs), default=0))
        widest = max((DTYPES[self._stored[run.name].dtype].itemsize for run in runs), default=0)
        raw = torch.empty(most * widest, dtype=torch.uint8)
        values = torch.empty(most, dtype=wanted)

        for run in runs:
            stored = self._stored[run.name]
            dtype = DTYPES[stored.dtype]

            with stored.path.open("rb", buffering=0) as file:
                file.seek(stored.offset + run.start * dtype.itemsize)
                if run.num_columns:
                    matrix = torch.empty(run.num_elements * dtype.itemsize, dtype=torch.uint8)
                    _read_exactly(file, matrix, stored)
                    yield from by_columns(matrix.view(dtype), run.num_columns).to(wanted).split(CHUNK_ELEMENTS)
                    continue

                for start, stop in chunks(run.num_elements):
                    piece = raw[: (stop - start) * dtype.itemsize]
                    _read_exactly(file, piece, stored)
                    yield values[: stop - start].copy_(piece.view(dtype))

    def _check(self, model: PreTrainedModel) -> None:
        """Compare names, shapes and dtypes with the skeleton, and resolve names of tied weights."""
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
                raise UnsupportedModelError(f"{self._folder}: tensor {names[0]} is missing.")
            for name in found:
                self._check_tensor(name, state[name])
            for name in found[1:]:
                self._refuse_unequal(found[0], name)
            self._assemblies[names[0]] = self._assemblies[found[0]]

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        """Compare one with the parameter or buffer that it is for. A buffer of integers takes integers that fit."""
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
        """A tied weight that is stored twice must be stored with the same values, else one of them would be lost."""
        one = self._assemblies[first].runs
        other = self._assemblies[second].runs
        pairs = zip(self._read(one), self._read(other), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            raise UnsupportedModelError(
                f"{self._where(second)} differs from {first}, but the config ties them. Set tie_word_embeddings: false."
            )

    def _read_buffers(self, model: PreTrainedModel) -> None:
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
        """File and stored name, for messages."""
        stored = self._stored[self._assemblies[name].runs[0].name]
        return f"{stored.path}: tensor {shown(stored.name)}"


def resolve(path_or_id: str) -> Path:
    """The folder of a model: a local one, else a snapshot of a hub repository, downloaded where it is not cached.

    Raises:
        ConfigError: there is neither.
    """
    folder = Path(path_or_id).expanduser()
    with contextlib.suppress(OSError):  # a name that is too long, for one
        if folder.is_dir():
            return folder

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_id) or path_or_id.startswith("."):
        raise ConfigError(f"no such model folder: {shown(path_or_id)}")
    # Only here: the client is slow to import, and most runs never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise ConfigError(
            f"{path_or_id} is no local folder, and the hub could not be read ({type(error).__name__}). "
            "Give the path of a downloaded model, or check the name, the network and your access rights."
        ) from error


def _headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by their stored name."""
    single = folder / SINGLE_FILE
    index = folder / INDEX_FILE
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise UnsupportedModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. Convert other formats with save_pretrained()."
        )

    stored: dict[str, StoredTensor] = {}
    weight_map = _weight_map(index)

    for file_name in sorted(set(weight_map.values())):
        # Names only: the hub's cache links files to another folder, so a resolved path says nothing.
        if Path(file_name).name != file_name or not _is_file(folder / file_name):
            raise UnsupportedModelError(f"{index}: {shown(file_name)!r} is no file in this folder.")
        for name, tensor in read_header(folder / file_name).items():
            if name in stored:
                raise UnsupportedModelError(f"{tensor.path}: tensor {shown(name)} is also in {stored[name].path}.")
            stored[name] = tensor

    for name, file_name in weight_map.items():
        if name not in stored or stored[name].path.name != file_name:
            raise UnsupportedModelError(f"{folder / file_name}: tensor {shown(name)} is missing; the index lists it.")

    return stored


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, TABLE_BYTES_MAX, UnsupportedModelError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnsupportedModelError(f"{index}: weight_map must give a file name for each tensor.")
    return weight_map


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _generation_config(folder: Path) -> GenerationConfig | None:
    """How a model's text is generated, which is exported with it as it came; None where the folder says nothing."""
    path = folder / GENERATION_FILE
    with contextlib.suppress(FileNotFoundError):
        read_object(path, SETTINGS_BYTES_MAX, UnsupportedModelError)
        with reading(f"{path}: transformers does not take these settings", UnsupportedModelError):
            found = GenerationConfig.from_pretrained(folder)
            found.to_json_string()  # now, not when the trained model is written
            return found

    return None


def _is_held_by(stored: str, dtype: torch.dtype) -> bool:
    """Whether every value of a stored dtype is one of another, which is no float."""
    return stored in DTYPES and torch.promote_types(DTYPES[stored], dtype) is dtype


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """Tensors that the model's authors left in old checkpoints, and buffers that are computed from the config."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _read_exactly(file: RawIOBase, piece: Tensor, stored: StoredTensor) -> None:
    """Fill a uint8 tensor from the file's position; a system call may return less than was asked for."""
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


def by_columns(elements: Tensor, num_columns: int) -> Tensor:
    """The elements of a matrix that lies row by row, flat."""
    columns: Tensor = elements.view(-1, num_columns).t()
    return columns.flatten()


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def _upwards(name: str) -> Iterator[str]:
    """A module's name, its parent's, and so on to the root, which is the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most CHUNK_ELEMENTS."""
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, num_elements)
