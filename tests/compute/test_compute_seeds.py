from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatier.compute.seeds import drawing_from, group_seed, rounding_key, seed_generators

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def test_group_seed_is_another_for_each_seed_step_and_group() -> None:
    seeds = [group_seed(*numbers) for numbers in itertools.product(range(12), range(1, 120), range(12))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_group_seed_stays_what_it_was() -> None:
    """Runs of earlier versions go on with the same numbers."""
    assert group_seed(0, 1, 0) == 5_859_785_910_394_853_115
    assert group_seed(1 << 70, 1, 0) != group_seed(0, 1, 0)


def test_rounding_key_is_another_for_each_seed_step_and_unit_and_stays_what_it_was() -> None:
    keys = [rounding_key(*of) for of in itertools.product(range(12), range(1, 120), ("head", "layers.0", "layers.1"))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert rounding_key(0, 1, "model.layers.0") == 11_147_166_203_070_981_650


def test_seed_generators_begins_every_generator_anew() -> None:
    drawn = []
    for number in (group_seed(0, 1, 0), group_seed(0, 1, 1), group_seed(0, 1, 0)):
        seed_generators(number, CPU)
        drawn.append([*torch.randn(3).tolist(), random.gauss(), np.random.randn(), random.random(), np.random.rand()])
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_drawing_from_a_seed_leaves_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    drawn = []
    for number in (3, 4, 3):
        with drawing_from(number):
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


@pytest.mark.gpu
def test_seed_generators_begins_the_gpus_anew() -> None:
    drawn = []
    for number in (1, 2, 1):
        seed_generators(number, torch.device("cuda"))
        drawn.append(torch.randn(3, device="cuda").tolist())
    assert drawn[0] == drawn[2] != drawn[1]
