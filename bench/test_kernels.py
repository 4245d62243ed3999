"""Rates of the C kernels, and how long placements and plans take, by pytest-benchmark.

    pip install -e '.[bench]'
    pytest -o addopts= bench/test_kernels.py --benchmark-columns=median,iqr,rounds

Each kernel works on arrays that no cache holds. `extra_info` has the bytes that it reads and writes, for
`--benchmark-json`. These are no tests of speed: nothing fails for its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from adamw_states import ordinary_state, scalars_of
from recipe_models import CONFIGS
from small_setups import elsewhere

from megatier import _native
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.hardware import cores_usable
from megatier.models.decoder import build_skeleton
from megatier.planner.plan import make_plan
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates_file import read_rates

NUM_ELEMENTS = 1 << 25
GRANULE_BYTES = 4096
THREADS = cores_usable()
GIB = 1 << 30
MACHINE = Path(__file__).parents[1] / "examples/machines/server-80gb.yaml"


class Benchmark(Protocol):
    """The fixture of pytest-benchmark, as far as it is used here."""

    extra_info: dict[str, int]

    def __call__(self, function: Callable[..., object], *arguments: object, **options: object) -> object:
        """Call a function again and again, and time it."""


@pytest.fixture(params=_native.isa_levels())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level that this processor runs."""
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(_native.isa_levels()[0])


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.ThreadPool]:
    """As many threads as cores."""
    pool = _native.ThreadPool(THREADS, 64)
    yield pool
    pool.close()


def moves(benchmark: Benchmark, num_bytes: int) -> None:
    """Note how many bytes of memory one round reads and writes."""
    benchmark.extra_info["num_bytes"] = num_bytes


@pytest.mark.parametrize("split", [True, False], ids=["bf16 and remainder", "fp32"])
def test_adamw(benchmark: Benchmark, isa: str, pool: _native.ThreadPool, split: bool) -> None:
    """One update of a whole unit, by all threads."""
    state = ordinary_state(NUM_ELEMENTS, split)

    def update() -> None:
        pool.submit_adamw(state.planes, split, [(0, NUM_ELEMENTS, 1.0)], scalars_of(1, 1.0)).wait()

    moves(benchmark, NUM_ELEMENTS * (26 if split else 28))
    benchmark(update)


@pytest.mark.parametrize("is_bf16", [True, False], ids=["bf16", "fp32"])
def test_sum_of_squares(benchmark: Benchmark, isa: str, is_bf16: bool) -> None:
    """The part of the norm that one thread computes."""
    gradient = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    sums = torch.empty(-(-NUM_ELEMENTS // 65536), dtype=torch.float64)
    moves(benchmark, gradient.nbytes)
    benchmark(_native.sum_squares, gradient.data_ptr(), NUM_ELEMENTS, is_bf16, sums.data_ptr())


def test_gradient_added_in_fp32(benchmark: Benchmark, isa: str) -> None:
    """The sum of groups' gradients."""
    total, one = torch.zeros(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS)
    moves(benchmark, 3 * total.nbytes)
    benchmark(_native.accumulate, total.data_ptr(), one.data_ptr(), NUM_ELEMENTS, False)


def test_master_split_and_joined(benchmark: Benchmark, isa: str) -> None:
    """There and back, which tests compare bit for bit."""
    master = torch.ones(NUM_ELEMENTS)
    weight = torch.empty(NUM_ELEMENTS, dtype=torch.bfloat16)
    remainder = torch.empty(NUM_ELEMENTS, dtype=torch.int16)
    addresses = master.data_ptr(), weight.data_ptr(), remainder.data_ptr()

    def there_and_back() -> None:
        _native.split(*addresses, NUM_ELEMENTS)
        _native.join(addresses[1], addresses[2], addresses[0], NUM_ELEMENTS)

    moves(benchmark, 16 * NUM_ELEMENTS)
    benchmark(there_and_back)


@pytest.mark.parametrize("kind", [_native.checksum, _native.crc32c], ids=["of a granule", "CRC32C"])
def test_checksum(benchmark: Benchmark, isa: str, kind: Callable[[int, int], int]) -> None:
    """Granule by granule, as a block file has them."""
    block = torch.zeros(GRANULE_BYTES * 4096, dtype=torch.uint8)
    first = block.data_ptr()

    def all_granules() -> None:
        for start in range(0, block.numel(), GRANULE_BYTES):
            kind(first + start, GRANULE_BYTES)

    moves(benchmark, block.numel())
    benchmark(all_granules)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_plan(benchmark: Benchmark, name: str) -> None:
    """Placement, timeline and simulation of one step, for the models of the recipes."""
    config = RunConfig(
        model=ModelConfig(path=name),
        data=DataConfig(files=("text",), tokenizer="bytes", sequence_length=2048),
        tiers=TiersConfig(nvme=("/mnt:2000GiB",)),
        train=TrainConfig(batch=8, activations="offload"),
    )
    budgets = Budgets(20 * GIB, 200 * GIB, 2000 * GIB)
    run = elsewhere(config, read_rates(MACHINE), budgets, compiles=True, model=build_skeleton(CONFIGS[name], "sdpa"))
    benchmark(make_plan, run)
