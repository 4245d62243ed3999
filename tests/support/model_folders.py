"""Weights of tiny models as flat blocks and as tensors of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tiny_models import tiny_config
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from megatier.models import weights
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.expert_units import cut_units, places_of
from megatier.models.initialiser import Initialiser
from megatier.models.weights import SafetensorsFolder

Read = Callable[[Unit, int, int], Tensor]


def flat_blocks(source: Initialiser | SafetensorsFolder, units: tuple[Unit, ...]) -> dict[str, Tensor]:
    """Read all units; checks order, dtype and size of the pieces."""
    blocks = {}
    for unit in units:
        blocks[unit.name] = torch.zeros(unit.layout.num_elements)
        position = 0
        for start, piece in source.read(unit):
            assert start >= position
            assert piece.dtype == torch.float32
            assert 0 < piece.numel() <= weights.READ_ELEMENTS
            position = start + piece.numel()
            blocks[unit.name][start:position] = piece
    return blocks


def tensors_of(blocks: dict[str, Tensor], units: tuple[Unit, ...]) -> dict[str, Tensor]:
    """Every parameter, put together of its parts."""
    return {
        name: torch.cat([blocks[u.name][t.start : t.stop] for u, t in parts]).view(parts[0][1].parameter_shape)
        for name, parts in places_of(units).items()
    }


def reader(blocks: dict[str, Tensor]) -> Read:
    return lambda unit, start, stop: blocks[unit.name][start:stop]


def fresh(family: str, parts: int = 1) -> tuple[PreTrainedModel, tuple[Unit, ...], dict[str, Tensor]]:
    """Skeleton, units, and initial values moved off their 0 and 1, so that no error can hide."""
    model = build_skeleton(tiny_config(family), "sdpa")
    units = cut_units(model, parts)
    blocks = flat_blocks(Initialiser(model, seed=1), units)
    generator = torch.Generator().manual_seed(2)
    for block in blocks.values():
        block += 0.02 * torch.randn(block.shape, generator=generator)
    for name, buffer in model.state_dict().items():
        if "bias" in name and not buffer.is_meta:
            buffer.normal_(generator=generator)
    return model, units, blocks


def skeleton_of(folder: Path) -> PreTrainedModel:
    return build_skeleton(AutoConfig.from_pretrained(folder), "sdpa")


NORM = "model.norm.weight"
