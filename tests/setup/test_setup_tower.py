"""Towers: the bytes and products that a plan counts are those of a forward of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import plain_model
from tiny_vision import VISION_FAMILIES, image_batch, text_batch, vision_config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatier.data.image_sample import ImageSample
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.frozen_parameters import freeze
from megatier.setup.tower import Tower


def sample(columns: dict[str, Tensor]) -> ImageSample:
    given = {name: column for name, column in columns.items() if name != "labels"}
    return ImageSample(columns=given, pixel_bytes=200, mean_pixel_bytes=50, mean_images=1.5)


def tower_of(family: str, frozen: str = "", dtype: torch.dtype = torch.float32) -> Tower:
    model = build_skeleton(vision_config(family), "sdpa")
    freeze(model, [frozen] if frozen else [])
    return Tower.of(model, find_units(model), sample(image_batch(family)), dtype)


class Seen:
    """What one forward of a plain model saves, and multiplies, in some of its modules."""

    def __init__(self, model: nn.Module, names: set[str], batch: dict[str, Tensor]) -> None:
        self.saved: dict[str, dict[int, int]] = {name: {} for name in names}
        self.open: str | None = None
        self.own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.held: list[Tensor] = []
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "open", name))
            module.register_forward_hook(lambda *_: setattr(self, "open", None))
        with saved_tensors_hooks(self.save, lambda tensor: tensor):
            model(**batch)
        # The counter does not know the CPU's own kernel of attention.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(**batch)
        root = type(model).__name__
        counts = counter.get_flop_counts()
        self.flops = {name: sum(counts.get(f"{root}.{name}", {}).values()) for name in names}

    def save(self, tensor: Tensor) -> Tensor:
        self.held.append(tensor)
        number = tensor.untyped_storage().data_ptr()
        if self.open is not None and number not in self.own:
            self.saved[self.open][number] = tensor.untyped_storage().nbytes()
        return tensor


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("frozen", ["", "*.v*"])
def test_tower_saves_and_multiplies_as_the_plain_model_does(family: str, frozen: str) -> None:
    found = tower_of(family, frozen)
    plain: Any = plain_model(vision_config(family))
    freeze(plain, [frozen] if frozen else [])
    batch = image_batch(family)
    batch.pop("attention_mask")
    seen = Seen(plain, set(found.units), batch)
    assert {name: sum(unit.saved.values()) for name, unit in found.units.items()} == {
        name: sum(saved.values()) for name, saved in seen.saved.items()
    }
    assert {name: unit.flops for name, unit in found.units.items()} == seen.flops


def test_tower_in_bf16_saves_half_of_what_it_multiplies() -> None:
    wide, narrow = tower_of("qwen3_vl"), tower_of("qwen3_vl", dtype=torch.bfloat16)
    name = "model.visual.blocks.0"
    assert narrow.units[name].flops == wide.units[name].flops
    saved = [sum(tower.units[name].saved.values()) for tower in (narrow, wide)]
    assert 0.5 <= saved[0] / saved[1] < 0.65, "norms are in fp32 either way"
    assert (wide.mean_share, wide.mean_images, wide.pixel_bytes) == (0.25, 1.5, 200)


def test_tower_without_pixels_is_not_used() -> None:
    model = build_skeleton(vision_config("llava"), "sdpa")
    found = Tower.of(model, find_units(model), sample(text_batch()), torch.float32)
    assert set(found.units) == {"model.language_model.embed_tokens"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
