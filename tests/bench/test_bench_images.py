"""The steps with images, by a tiny model on the CPU."""

from __future__ import annotations

import pytest
from tiny_processors import has_torchvision

pytest.importorskip("PIL")
bench = pytest.importorskip("bench_images")


@pytest.mark.skipif(not has_torchvision(), reason="torchvision is not installed")
def test_steps_with_images_are_compared_with_texts_of_as_many_tokens() -> None:
    found = bench.run(bench.TINY, [], 1, None)
    assert found["images_per_step"] == 11
    assert found["patches_per_step"] == 11 * 64
    assert found["tower_flops"] > 0
    assert found["measured"]["images"]["tower_seconds"] > 0
    assert found["measured"]["text"]["tower_seconds"] < found["measured"]["images"]["tower_seconds"]
    losses = found["measured"]["images"]["losses"]
    assert losses == sorted(losses, reverse=True)
