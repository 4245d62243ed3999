"""A tiered store of a few blocks, as the tests of its contract open it for each back end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from from_outside import GRANULE_BYTES, check_invariants
from store_blocks import KEYS, NUM_BYTES

from megatier.drives.blockfile import IoOptions
from megatier.drives.io_engine import IoEngine, NativeEngine
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier, round_up


class OpenedStore:
    """A store of few blocks and few slots. A subclass says where blocks live and which device stands for the GPU."""

    home: Tier
    direct = True
    gpu_direct = False
    engine: Callable[[int], IoEngine] = NativeEngine
    device = "cpu"
    locked: int | None = None

    def open(self, directory: Path, *, gpu_slots: int = 2, ram_slots: int = 3) -> TieredStore:
        """Four blocks at home in the tier under test, and one scratch block; few slots elsewhere."""
        size = round_up(NUM_BYTES)
        budgets = {Tier.GPU: gpu_slots * size, Tier.RAM: ram_slots * size}
        if self.home is not Tier.NVME:
            budgets[self.home] += len(KEYS) * size
        options = IoOptions(
            num_threads=2,
            engine=type(self).engine,
            direct=self.direct,
            granule_bytes=GRANULE_BYTES,
            gpu_direct=self.gpu_direct,
        )
        store = TieredStore.open(
            gpu=budgets[Tier.GPU],
            ram=budgets[Tier.RAM],
            nvme=[f"{directory}:1MiB"],
            device=self.device,
            run_id="test",
            options=options,
            locked=self.locked,
        )
        for key in KEYS:
            store.register(BlockSpec(key, NUM_BYTES, self.home))
        store.register(BlockSpec("scratch", NUM_BYTES, None))
        store.reserve(Tier.GPU, None, NUM_BYTES, gpu_slots)
        store.reserve(Tier.RAM, None, NUM_BYTES, ram_slots)
        return store

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        store = self.open(tmp_path)
        yield store
        check_invariants(store)
        store.close()
        assert not list(tmp_path.iterdir())

    @pytest.fixture(params=[Tier.RAM, Tier.GPU])
    def tier(self, request: pytest.FixtureRequest) -> Tier:
        """Where the blocks are used."""
        found: Tier = request.param
        return found

    @property
    def away(self) -> Tier:
        """A tier other than home that has slots."""
        return Tier.RAM if self.home is Tier.GPU else Tier.GPU
