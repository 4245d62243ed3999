"""Images and videos by turns: each step has the numbers of a plain loop, or is refused by name and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from composite_models import composite_config
from plain_adamw import PlainAdamW
from tiny_vision import seen_batch, vision_config
from transformers import AutoModelForImageTextToText, PreTrainedModel

import megatier
from megatier.config.schema import TiersConfig
from megatier.errors import TimelineError
from megatier.integrations.streamed import Streamed

MIB = 1 << 20
TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=64 * MIB, io_threads=2, update_threads=2)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_onevision")
RATE = 1e-2
APART = r"runs once for images and once for videos: give them in batches of their own"


class Loops:
    """A streamed model, and the same model in a plain loop."""

    def __init__(self, family: str, streamed: Streamed, plain: PreTrainedModel) -> None:
        self.family, self.streamed, self.plain = family, streamed, plain
        self.adamw, self.steps = PlainAdamW(plain, clip=1.0), 0

    def step(self, *seen: tuple[int, int]) -> None:
        """A step with a batch for each pair of images and videos."""
        self.steps += 1
        for images, videos in seen:
            batch = seen_batch(self.family, images, videos, seed=self.steps)
            losses: list[Any] = [self.streamed.model(**batch).loss, self.plain(**batch, use_cache=False).loss]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
        self.streamed.optimizer.step()
        # What is without a gradient is left as it is, by both.
        self.adamw.trained = {name: p for name, p in self.plain.named_parameters() if p.grad is not None}
        self.adamw.step(self.steps, RATE)
        assert self.changed() == []

    def refused(self, images: int, videos: int) -> None:
        with pytest.raises(TimelineError, match=APART):
            self.streamed.model(**seen_batch(self.family, images, videos))
        assert self.changed() == []

    def changed(self) -> list[str]:
        found = self.streamed.state_dict()
        return [name for name, p in self.plain.named_parameters() if not torch.equal(found[name], p)]


@pytest.fixture
def loops(request: pytest.FixtureRequest) -> Iterator[Loops]:
    family, accumulation_steps = request.param
    torch.manual_seed(0)
    config = vision_config(family) if family.startswith("qwen") else composite_config(family)
    plain: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    plain.train()
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "weight_decay": 0.1, "lr": RATE}
    with megatier.stream(
        copy.deepcopy(plain), tiers=TIERS, accumulation_steps=accumulation_steps, **options
    ) as streamed:
        yield Loops(family, streamed, plain)


@pytest.mark.parametrize("loops", [(family, 1) for family in FAMILIES], indirect=True)
def test_steps_with_images_or_videos_equal_a_plain_loop_and_one_with_both_is_refused(loops: Loops) -> None:
    for seen in [(1, 0), (0, 2), (0, 0)]:
        loops.step(seen)
    loops.refused(1, 1)
    loops.step((0, 1))


@pytest.mark.parametrize("loops", [(family, 1) for family in FAMILIES], indirect=True)
def test_steps_with_images_and_videos_equal_a_plain_loop_and_one_with_either_is_refused(loops: Loops) -> None:
    loops.step((1, 1))
    loops.refused(1, 0)
    loops.refused(0, 1)
    for seen in [(1, 2), (0, 0)]:
        loops.step(seen)


@pytest.mark.parametrize("loops", [("qwen3_vl", 2)], indirect=True)
def test_images_and_videos_in_batches_of_their_own_equal_a_plain_loop(loops: Loops) -> None:
    for seen in [((1, 0), (0, 1)), ((0, 1), (2, 0)), ((0, 0), (0, 2))]:
        loops.step(*seen)
