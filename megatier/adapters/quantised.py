"""Quantised bases: folders whose matrices are FP8 or NF4, for adapters over them.

The linear layers keep what the files hold, codes and scales, on every tier (`compute.quantised`). Whatever else is
quantised, such as a head or fused experts, is decoded as it is read. Activations are not quantised, whatever the
config says of them.

Formats: `float-quantized` of compressed-tensors (with scales for each channel, tensor, block or group), `fp8` of
transformers (the blocks of DeepSeek and Qwen), and `nf4` of bitsandbytes, with nested scales or without.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from megatier.compute.quantised import CODES, Fp8, Nf4, Part, QuantisedLinear, Scheme, decode
from megatier.errors import UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, parse_json, shown
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.dtypes import names_in_fp32
from megatier.models.folder import read_headers
from megatier.models.shards import DTYPES, StoredTensor
from megatier.models.weights import SafetensorsFolder, TensorReader, chunks, read_exactly

SETTINGS = "quantization_config"
"""The setting of a model's config that says how its weights are quantised."""
TAKEN = "FP8 of compressed-tensors or of transformers' fp8, and NF4 of bitsandbytes"
"""What is decoded here."""
REMEDY = f"Decoded are {TAKEN}. Take such a version of the model, or one in bf16."
"""Ends refusals."""
SCALES = ("_scale", "_scale_inv")
"""Ends of the names of the scales of FP8, after that of the weight."""
IN_NF4 = ".quant_state.bitsandbytes__nf4"
"""End of the name of the tensor whose bytes are the settings of a matrix in NF4, as JSON."""
PARTS_OF_NF4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Ends of the names of its scales and tables."""
OFFSET = "nested_offset"
"""What is added to scales that are quantised themselves, among those settings."""
OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Ends of the names of scales that belong to activations, which stay as they are."""
STORED_SCALES = ("F32", "BF16", "F16")
"""Dtypes of scales."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix in a folder."""

    scheme: Scheme
    """The way in which it is quantised."""
    parts: Mapping[str, StoredTensor | Tensor]
    """Where its codes and scales lie, by the scheme's names. What stands in the files as text is a tensor."""

    def decode(self) -> Tensor:
        """Read the matrix and decode it; returns its numbers row by row: flat, fp32.

        Raises:
            TransferError: a file has become shorter or unreadable meanwhile.
        """
        raw = [_read(self.parts[name], 0, part.num_bytes) for name, part in self.scheme.parts.items()]
        return decode(self.scheme, raw, torch.float32).flatten()


class CodesReader(TensorReader):
    """The weights of a base whose linear layers keep their codes."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        plain: SafetensorsFolder,
        held: Mapping[str, StoredTensor | Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Keep what gives the weights.

        Args:
            stored: all tensors of the folder.
            plain: gives those that are no codes or scales, and decoded ones by the names that they have in plain
                models.
            held: the stored codes and scales, by the names of their parameters.
            dtype: of the unit's weights, whose elements carry the bytes.
        """
        self.stored = stored
        self._plain = plain
        self._held = held
        self._item = dtype.itemsize

    def pieces(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`.

        Elements that carry bytes may be any numbers, and also such that are none: their bits are what counts.
        """
        stored = self._held.get(tensor.name)
        if stored is None:
            yield from self._plain.pieces(unit, tensor)
            return
        first, last = tensor.elements
        for start, stop in chunks(last - first):
            raw = _read(stored, (first + start) * self._item, (first + stop) * self._item)
            yield tensor.start + start, raw.view(torch.float32) if self._item > 2 else _widened(raw)


def is_quantised(config: PretrainedConfig) -> bool:
    """Return whether a model's config says that its weights are quantised."""
    return getattr(config, SETTINGS, None) is not None


def open_quantised(
    folder: Path, config: PretrainedConfig, attention: str, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, SafetensorsFolder | CodesReader]:
    """Return the skeleton of a quantised model, and the reader of its weights.

    Args:
        folder: the model's folder.
        config: its config.
        attention: as for `build_skeleton`.
        dtype: in which it computes: linear layers keep their codes. None: a plain model, decoded as it is read.

    Raises:
        UnsupportedModelError: it is quantised in another way, or the files do not fit the config.
    """
    config = copy.deepcopy(config)
    settings = getattr(config, SETTINGS)
    delattr(config, SETTINGS)
    model = build_skeleton(config, attention)
    stored = read_headers(folder)
    matrices = find_matrices(folder, settings if isinstance(settings, dict) else settings.to_dict(), stored)

    # As they are when they are decoded, so that names and shapes are compared as those of any model.
    parts = [part for matrix in matrices.values() for part in matrix.parts.values()]
    sides = {part.name for part in parts if isinstance(part, StoredTensor)} - matrices.keys()
    sides |= {f"{name}{IN_NF4}" for name in matrices}
    plain = {name: tensor for name, tensor in stored.items() if name not in sides and not _is_of_activations(name)}
    plain |= {name: replace(stored[name], dtype="F32", shape=m.scheme.shape) for name, m in matrices.items()}
    reader = SafetensorsFolder(folder, model, plain, {name: matrix.decode for name, matrix in matrices.items()})
    if dtype is None:
        return model, reader
    return model, CodesReader(stored, reader, _holding_codes(model, reader, matrices, dtype), dtype)


def find_matrices(
    folder: Path, settings: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredMatrix]:
    """Return the quantised matrices of a folder, by the stored names of their weights.

    Args:
        folder: the folder, for messages.
        settings: says how they are quantised.
        stored: all tensors of the folder.

    Raises:
        UnsupportedModelError: they are quantised in another way, or a scale is missing. Names it.
    """
    method = settings.get("quant_method")
    block = None
    if method == "compressed-tensors":
        block = _checked_groups(folder, settings)
    elif method == "fp8":
        block = _pair(settings.get("weight_block_size"))
    elif method != "bitsandbytes":
        raise UnsupportedModelError(f"{folder}: its weights are quantised by {shown(str(method))}. {REMEDY}")

    weights = [tensor for name, tensor in stored.items() if name.endswith(".weight")]
    if method == "bitsandbytes":
        found = {tensor.name: _nf4(tensor, stored) for tensor in weights if f"{tensor.name}{IN_NF4}" in stored}
    else:
        found = {tensor.name: _fp8(tensor, stored, block) for tensor in weights if tensor.dtype == "F8_E4M3"}
    if not found:
        raise UnsupportedModelError(
            f"{folder}: its config says {shown(str(method))}, but no tensor is FP8 or NF4. {REMEDY}"
        )
    return found


def _holding_codes(
    model: PreTrainedModel, reader: SafetensorsFolder, matrices: Mapping[str, StoredMatrix], dtype: torch.dtype
) -> dict[str, StoredTensor | Tensor]:
    """Let the linear layers of a skeleton keep the codes of their weights; returns these by their parameters' names."""
    held: dict[str, StoredTensor | Tensor] = {}
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}

    # The loss computes with the head's weight itself. What stays in fp32 lies in units of another dtype.
    in_fp32 = names_in_fp32(model, [f"{name}.weight" for name in linear])
    for name, module in linear.items():
        matrix = matrices.get(reader.stored_name(f"{name}.weight") or "")
        if module is head or f"{name}.weight" in in_fp32 or matrix is None:
            continue
        model.set_submodule(name, QuantisedLinear(module, matrix.scheme, dtype.itemsize))
        held |= {f"{name}.{part}": tensor for part, tensor in matrix.parts.items()}
    return held


def _checked_groups(folder: Path, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the blocks of weights that compressed-tensors notes; None: scales are of rows or whole matrices.

    Raises:
        UnsupportedModelError: a group of layers is quantised in another way.
    """
    groups = settings.get("config_groups")
    found = None
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind = f"{weights.get('type')} of {weights.get('num_bits')} bits, {settings.get('format')}"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or weights.get("symmetric") is False:
            raise UnsupportedModelError(f"{folder}: its weights are quantised as {shown(kind)}. {REMEDY}")
        size = weights.get("group_size")
        found = _pair(weights.get("block_structure")) or ((1, size) if type(size) is int and size > 0 else found)
    return found


def _fp8(tensor: StoredTensor, stored: Mapping[str, StoredTensor], block: tuple[int, int] | None) -> StoredMatrix:
    """Return a matrix in FP8.

    Raises:
        UnsupportedModelError: its scale is missing, or does not fit.
    """
    scale = next((stored[name] for end in SCALES if (name := f"{tensor.name}{end}") in stored), None)
    if scale is None or scale.dtype not in STORED_SCALES or len(tensor.shape) != 2 or not math.prod(tensor.shape):
        what = "has no scale" if scale is None else f"has the shape {tensor.shape}, and scales of {shown(scale.dtype)}"
        raise _refused(tensor, f"is FP8 and {what}")

    rows, columns = shape = tensor.shape
    if math.prod(scale.shape) == 1:
        block = shape
    elif scale.shape in ((rows,), (rows, 1)):
        block = 1, columns
    elif block is None or scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise _refused(tensor, f"is FP8 of shape {shape}, and has scales of shape {scale.shape}, in blocks of {block}")
    scheme = Fp8((rows, columns), Part(DTYPES[scale.dtype], scale.shape), block)
    return StoredMatrix(scheme, {CODES: tensor, "scale": scale})


def _nf4(tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> StoredMatrix:
    """Return a matrix in NF4.

    Raises:
        UnsupportedModelError: a part of it is missing, or does not fit.
    """
    noted = stored[f"{tensor.name}{IN_NF4}"]
    if noted.num_bytes > SETTINGS_BYTES_MAX:
        raise _refused(noted, "is too large for settings")
    raw = bytes(_read(noted, 0, noted.num_bytes).numpy())
    settings = parse_json(raw, f"{noted.path}: tensor {shown(noted.name)}", UnsupportedModelError)
    match settings:
        case {"quant_type": "nf4", "shape": [int(rows), int(columns)], "blocksize": int(block)} if (
            min(rows, columns, block) > 0 and rows * columns % 2 == 0
        ):
            nested, offset = settings.get("nested_blocksize"), settings.get(OFFSET, 0.0)
        case _:
            raise _refused(noted, "has no settings of a matrix in NF4")
    if not (nested is None or (type(nested) is int and nested > 0)) or not isinstance(offset, float):
        raise _refused(noted, "has no settings of nested scales")

    scheme = Nf4((rows, columns), block, nested)
    parts = {CODES: tensor, **{end: stored[n] for end in PARTS_OF_NF4 if (n := f"{tensor.name}.{end}") in stored}}
    wanted = {name: part for name, part in scheme.parts.items() if name != OFFSET}
    wrong = sorted(parts.keys() ^ wanted.keys())
    wrong += [name for name, part in wanted.items() if name in parts and parts[name].num_bytes != part.num_bytes]
    if wrong:
        raise _refused(tensor, f"is NF4 of shape {scheme.shape}, and does not fit its part {wrong[0]}")
    return StoredMatrix(
        scheme, {**parts, **({OFFSET: torch.tensor([offset], dtype=torch.float32, device="cpu")} if nested else {})}
    )


def _is_of_activations(name: str) -> bool:
    """Return whether a stored tensor is a scale of activations."""
    return name.rpartition(".")[2] in OF_ACTIVATIONS


def _pair(value: object) -> tuple[int, int] | None:
    """Return two sizes above 0; None: the value is something else."""
    match value:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case _:
            return None


def _refused(tensor: StoredTensor, what: str) -> UnsupportedModelError:
    """Return the error about a stored tensor."""
    return UnsupportedModelError(f"{tensor.path}: tensor {shown(tensor.name)} {what}. {REMEDY}")


def _read(stored: StoredTensor | Tensor, start: int, stop: int) -> Tensor:
    """Return bytes [start, stop) of a stored tensor, or of one in RAM, with 0 beyond its end.

    Raises:
        TransferError: the file has become shorter or unreadable meanwhile.
    """
    raw = torch.zeros(stop - start, dtype=torch.uint8, device="cpu")
    if isinstance(stored, Tensor):
        found = stored.view(torch.uint8)[start:stop]
        raw[: found.numel()] = found
        return raw

    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.offset + start)
        read_exactly(file, raw[: max(0, min(stop, stored.num_bytes) - start)], stored)
    return raw


def _widened(raw: Tensor) -> Tensor:
    """Return the fp32 numbers whose bits end with 0 and begin with two bytes each, which a bf16 has."""
    return (raw.view(torch.int16).int() << 16).view(torch.float32)
