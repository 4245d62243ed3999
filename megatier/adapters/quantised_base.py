"""Reads quantised bases, whose matrices are stored in FP8 or NF4, for adapters over them.

Linear layers keep the stored codes and scales on every tier (`compute.quantised_linear`). Everything else that is
quantised, such as a head or fused experts, is decoded while it is read. Activations are not quantised, whatever the
config says.

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

from megatier.compute.quantised_linear import CODES, Fp8, Nf4, QuantisedLinear, Scheme, StoredPart, decode
from megatier.errors import UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, parse_json, printable
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.dtypes import names_in_fp32
from megatier.models.safetensors_format import SAFETENSORS_DTYPES, StoredTensor
from megatier.models.weight_files import read_headers
from megatier.models.weights import SafetensorsFolder, TensorReader, chunks, open_at, read_exactly

_CONFIG_KEY = "quantization_config"
"""The key of a model's config that describes its quantisation."""
_SUPPORTED = "FP8 of compressed-tensors or of transformers' fp8, and NF4 of bitsandbytes"
"""The supported formats."""
_REMEDY = f"Decoded are {_SUPPORTED}. Take such a version of the model, or one in bf16."
"""The remedy at the end of error messages."""
_SCALE_SUFFIXES = ("_scale", "_scale_inv")
"""Suffixes of the names of FP8 scales, after the weight's name."""
IN_NF4 = ".quant_state.bitsandbytes__nf4"
"""Suffix of the name of the tensor whose bytes are an NF4 matrix's settings, as JSON."""
PARTS_OF_NF4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Suffixes of the names of its scales and tables."""
OFFSET = "nested_offset"
"""The setting with the offset that is added to nested scales."""
OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Suffixes of the names of activation scales, which are ignored."""
STORED_SCALES = ("F32", "BF16", "F16")
"""The stored dtypes of scales."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix in a folder."""

    scheme: Scheme
    """The way in which it is quantised."""
    parts: Mapping[str, StoredTensor | Tensor]
    """Its codes and scales, by the scheme's names. A number that is stored as text is a tensor here."""

    def decode(self) -> Tensor:
        """Read and decode the matrix. Return its numbers row by row: flat, fp32.

        Raises:
            TransferError: a file has become shorter or unreadable meanwhile.
        """
        raw = list[Tensor]()
        for name, part in self.scheme.parts.items():
            stored = self.parts[name]

            # In the order of the scheme's parts, as `decode` expects.
            raw.append(_read(stored, 0, part.num_bytes))

        matrix = decode(self.scheme, raw, torch.float32)
        return matrix.flatten()


class CodesReader(TensorReader):
    """The weights of a base whose linear layers keep their codes."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        plain: SafetensorsFolder,
        codes: Mapping[str, StoredTensor | Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Take the sources of the weights.

        Args:
            stored: all tensors of the folder.
            plain: reads all other tensors, and decoded ones by their names in plain models.
            codes: the stored codes and scales, by the names of their parameters.
            dtype: the dtype of the unit's weights, whose elements carry the bytes.
        """
        self.stored = stored
        self._plain = plain
        self._codes = codes
        self._item_bytes = dtype.itemsize

    def read_tensor(self, unit: Unit, tensor: TensorSlice) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a parameter; see `WeightReader`.

        Elements that carry bytes may have any bits, NaN included.
        """
        stored = self._codes.get(tensor.name)
        if stored is None:
            yield from self._plain.read_tensor(unit, tensor)
            return

        first, _ = tensor.elements
        for start, stop in chunks(tensor.num_elements):
            first_byte = (first + start) * self._item_bytes
            end_byte = (first + stop) * self._item_bytes
            raw = _read(stored, first_byte, end_byte)

            # Readers return fp32, of which a bf16 unit keeps the upper halves.
            values = raw.view(torch.float32) if self._item_bytes > 2 else _widened(raw)
            yield tensor.start + start, values


def is_quantised(config: PretrainedConfig) -> bool:
    """Return whether a model's config says that its weights are quantised."""
    return getattr(config, _CONFIG_KEY, None) is not None


def open_quantised(
    folder: Path, config: PretrainedConfig, attention: str, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, SafetensorsFolder | CodesReader]:
    """Return the skeleton of a quantised model, and the reader of its weights.

    Args:
        folder: the model's folder.
        config: its config.
        attention: as for `build_skeleton`.
        dtype: the compute dtype, with which linear layers keep their codes; None: a plain model, decoded while it is
            read.

    Raises:
        UnsupportedModelError: the format is not supported, or the files do not match the config.
    """
    # The skeleton is that of a plain model, so its config must not mention quantisation.
    config = copy.deepcopy(config)
    settings = getattr(config, _CONFIG_KEY)
    delattr(config, _CONFIG_KEY)
    if not isinstance(settings, dict):
        settings = settings.to_dict()

    model = build_skeleton(config, attention)
    stored = read_headers(folder)
    matrices = find_matrices(folder, settings, stored)
    decoding = {name: matrix.decode for name, matrix in matrices.items()}
    reader = SafetensorsFolder(folder, model, _as_decoded(stored, matrices), decoding)

    # Decoded while it is read, for callers that need the numbers and train no adapters.
    if dtype is None:
        return model, reader

    codes = _holding_codes(model, reader, matrices, dtype)
    return model, CodesReader(stored, reader, codes, dtype)


def _as_decoded(stored: Mapping[str, StoredTensor], matrices: Mapping[str, StoredMatrix]) -> dict[str, StoredTensor]:
    """Return a folder's tensors, with quantised ones described as decoded and without their scales.

    So names and shapes can be checked as for any model.
    """
    # NF4's settings are stored as a tensor too, which no model has.
    scales = {f"{name}{IN_NF4}" for name in matrices}
    for matrix in matrices.values():
        for part_name, part in matrix.parts.items():
            if part_name != CODES and isinstance(part, StoredTensor):
                scales.add(part.name)

    decoded = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if name in matrices:
            decoded[name] = replace(tensor, dtype="F32", shape=matrices[name].scheme.shape)
        elif name not in scales and not _is_of_activations(name):
            decoded[name] = tensor
    return decoded


def find_matrices(
    folder: Path, settings: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredMatrix]:
    """Return the quantised matrices of a folder, by the stored names of their weights.

    Args:
        folder: the folder, for messages.
        settings: the quantisation config.
        stored: all tensors of the folder.

    Raises:
        UnsupportedModelError: the format is not supported, or a scale is missing. The message names it.
    """
    weights = [tensor for name, tensor in stored.items() if name.endswith(".weight")]
    in_fp8 = [tensor for tensor in weights if tensor.dtype == "F8_E4M3"]
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        block = _checked_groups(folder, settings)
        matrices = {tensor.name: _fp8(tensor, stored, block) for tensor in in_fp8}
    elif method == "fp8":
        block = _pair(settings.get("weight_block_size"))
        matrices = {tensor.name: _fp8(tensor, stored, block) for tensor in in_fp8}
    elif method == "bitsandbytes":
        # The codes are plain bytes, so a matrix is recognised by the settings that are stored with it.
        in_nf4 = [tensor for tensor in weights if f"{tensor.name}{IN_NF4}" in stored]
        matrices = {tensor.name: _nf4(tensor, stored) for tensor in in_nf4}
    else:
        raise UnsupportedModelError(f"{folder}: its weights are quantised by {printable(str(method))}. {_REMEDY}")

    if not matrices:
        raise UnsupportedModelError(
            f"{folder}: its config says {printable(str(method))}, but no tensor is FP8 or NF4. {_REMEDY}"
        )
    return matrices


def _holding_codes(
    model: PreTrainedModel, reader: SafetensorsFolder, matrices: Mapping[str, StoredMatrix], dtype: torch.dtype
) -> dict[str, StoredTensor | Tensor]:
    """Replace linear layers of a skeleton by ones that keep codes. Return the stored parts by parameter name."""
    codes: dict[str, StoredTensor | Tensor] = {}
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}

    # The loss uses the head's weight itself. Layers that stay in fp32 lie in units of another dtype.
    in_fp32 = names_in_fp32(model, [f"{name}.weight" for name in linear])
    for name, module in linear.items():
        weight = f"{name}.weight"
        matrix = matrices.get(reader.stored_name(weight) or "")
        if module is head or weight in in_fp32 or matrix is None:
            continue

        model.set_submodule(name, QuantisedLinear(module, matrix.scheme, dtype.itemsize))
        for part_name, part in matrix.parts.items():
            codes[f"{name}.{part_name}"] = part
    return codes


def _checked_groups(folder: Path, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block size in a compressed-tensors config; None: scales are for rows or whole matrices.

    Raises:
        UnsupportedModelError: a group of layers has an unsupported format.
    """
    # The file may be malformed, so each level is checked before it is used.
    groups = settings.get("config_groups")
    block: tuple[int, int] | None = None
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue

        kind = weights.get("type")
        bits = weights.get("num_bits")
        is_symmetric = weights.get("symmetric") is not False
        if (kind, bits) != ("float", 8) or not is_symmetric:
            form = f"{kind} of {bits} bits, {settings.get('format')}"
            raise UnsupportedModelError(f"{folder}: its weights are quantised as {printable(form)}. {_REMEDY}")

        # Groups are runs within a row, so blocks of one row.
        structure = _pair(weights.get("block_structure"))
        group_size = weights.get("group_size")
        if structure is not None:
            block = structure
        elif type(group_size) is int and group_size > 0:
            block = 1, group_size
    return block


def _fp8(tensor: StoredTensor, stored: Mapping[str, StoredTensor], block: tuple[int, int] | None) -> StoredMatrix:
    """Return a matrix in FP8.

    Raises:
        UnsupportedModelError: its scale is missing or does not match.
    """
    # Both compressed-tensors and transformers store the factor of the codes, though transformers calls it inverse.
    names = [f"{tensor.name}{end}" for end in _SCALE_SUFFIXES]
    scale = next((stored[name] for name in names if name in stored), None)
    if scale is None:
        raise _refused(tensor, "is FP8 and has no scale")

    shape = tensor.shape
    is_matrix = len(shape) == 2 and math.prod(shape) > 0
    if not is_matrix or scale.dtype not in STORED_SCALES:
        raise _refused(tensor, f"is FP8 and has the shape {shape}, and scales of {printable(scale.dtype)}")

    # One number is a scale of the whole matrix, and a column has one for each row, whatever the config says of blocks.
    rows, columns = shape
    if math.prod(scale.shape) == 1:
        block = rows, columns
    elif scale.shape in ((rows,), (rows, 1)):
        block = 1, columns
    elif block is None or scale.shape != _num_blocks(rows, columns, block):
        raise _refused(tensor, f"is FP8 of shape {shape}, and has scales of shape {scale.shape}, in blocks of {block}")

    scale_part = StoredPart(SAFETENSORS_DTYPES[scale.dtype], scale.shape)
    scheme = Fp8((rows, columns), scale_part, block)
    return StoredMatrix(scheme, {CODES: tensor, "scale": scale})


def _num_blocks(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks in a matrix, down and across. The last ones may be partial."""
    height, width = block
    return -(-rows // height), -(-columns // width)


def _nf4(tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> StoredMatrix:
    """Return a matrix in NF4.

    Raises:
        UnsupportedModelError: a part of it is missing or does not match.
    """
    scheme, offset = _nf4_settings(stored[f"{tensor.name}{IN_NF4}"])
    parts = {CODES: tensor}
    for end in PARTS_OF_NF4:
        name = f"{tensor.name}.{end}"
        if name in stored:
            parts[end] = stored[name]

    # The offset is in the settings, so it is not a stored tensor.
    wanted = {name: part for name, part in scheme.parts.items() if name != OFFSET}
    wrong = sorted(parts.keys() ^ wanted.keys())
    wrong += [name for name, part in wanted.items() if name in parts and parts[name].num_bytes != part.num_bytes]
    if wrong:
        raise _refused(tensor, f"is NF4 of shape {scheme.shape}, and does not fit its part {wrong[0]}")

    if scheme.nested_block is None:
        return StoredMatrix(scheme, parts)
    offset_tensor = torch.tensor([offset], dtype=torch.float32, device="cpu")
    return StoredMatrix(scheme, {**parts, OFFSET: offset_tensor})


def _nf4_settings(stored: StoredTensor) -> tuple[Nf4, float]:
    """Return the scheme of an NF4 matrix and the offset of its scales, from its stored settings.

    Raises:
        UnsupportedModelError: they are not those of an NF4 matrix.
    """
    # Bounded before it is read, since the file may hold anything.
    if stored.num_bytes > SETTINGS_BYTES_MAX:
        raise _refused(stored, "is too large for settings")

    raw = bytes(_read(stored, 0, stored.num_bytes).numpy())
    settings = parse_json(raw, f"{stored.path}: tensor {printable(stored.name)}", UnsupportedModelError)
    match settings:
        case {"quant_type": "nf4", "shape": [int(rows), int(columns)], "blocksize": int(block)} if (
            # A byte holds two codes.
            min(rows, columns, block) > 0 and rows * columns % 2 == 0
        ):
            nested = settings.get("nested_blocksize")
            offset = settings.get(OFFSET, 0.0)
        case _:
            raise _refused(stored, "has no settings of a matrix in NF4")

    # Not isinstance, since JSON's true is an int in Python.
    is_nested = type(nested) is int and nested > 0
    if not (nested is None or is_nested) or not isinstance(offset, float):
        raise _refused(stored, "has no settings of nested scales")
    return Nf4((rows, columns), block, nested), offset


def _is_of_activations(name: str) -> bool:
    """Return whether a stored tensor is an activation scale."""
    return name.rpartition(".")[2] in OF_ACTIVATIONS


def _pair(value: object) -> tuple[int, int] | None:
    """Return two positive sizes; None: the value is something else."""
    match value:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case _:
            return None


def _refused(tensor: StoredTensor, reason: str) -> UnsupportedModelError:
    """Return the error about a stored tensor."""
    return UnsupportedModelError(f"{tensor.path}: tensor {printable(tensor.name)} {reason}. {_REMEDY}")


def _read(stored: StoredTensor | Tensor, start: int, stop: int) -> Tensor:
    """Return bytes [start, stop) of a stored tensor or one in RAM, padded with 0 beyond its end.

    Raises:
        TransferError: the file has become shorter or unreadable meanwhile.
    """
    raw = torch.zeros(stop - start, dtype=torch.uint8, device="cpu")
    if isinstance(stored, Tensor):
        present = stored.view(torch.uint8)[start:stop]
        raw[: present.numel()] = present
        return raw

    # Codes fill whole elements of their unit, so the last element may reach beyond them.
    end = min(stop, stored.num_bytes)
    num_present = max(0, end - start)
    with open_at(stored, start) as file:
        read_exactly(file, raw[:num_present], stored)
    return raw


def _widened(raw: Tensor) -> Tensor:
    """Return fp32 numbers whose upper halves are the given pairs of bytes, each a bf16."""
    bits = raw.view(torch.int16).int() << 16
    return bits.view(torch.float32)
