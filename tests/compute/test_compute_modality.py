"""Modalities: which batches are text alone, and the names of evaluations."""

from __future__ import annotations

import pytest
import torch
from tiny_vision import VISION_FAMILIES, image_batch, text_batch

from megatier.compute.modality import evaluation_name, is_text, num_images


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_batch_with_pixels_is_no_text(family: str) -> None:
    assert not is_text(image_batch(family))
    assert is_text(text_batch())


def test_batch_with_what_may_hold_pixels_is_no_text() -> None:
    text = text_batch()
    assert is_text({**text, "pixel_values": None, "use_cache": False, "num_items_in_batch": torch.tensor(3)})
    assert not is_text({**text, "pixel_values": torch.zeros(1, dtype=torch.uint8)})
    assert not is_text({**text, "images": [torch.zeros(1)]})
    assert not is_text({**text, "inputs_embeds": torch.zeros(1)})


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_images_of_a_batch_are_counted(family: str) -> None:
    assert num_images(image_batch(family)) == 2
    assert num_images(text_batch()) == 0


def test_evaluations_have_a_name_for_each_kind_of_pixels() -> None:
    assert evaluation_name(text_batch()) == evaluation_name({"pixel_values": None}) == "evaluate"
    both = evaluation_name({"pixel_values_videos": 1}, {"pixel_values": 1}, text_batch())
    assert both == "evaluate pixel_values pixel_values_videos"
