"""What a spilled parameter costs the drive: counted from the store's own queues, and from the block device's."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pytest
from from_outside import GRANULE_BYTES
from integer_runs import UNITS, Run, close
from tiny_runs import BATCH, PLACES, exactness_config, opened, plain_model, random_groups

from megatier.config.schema import TrainConfig
from megatier.drives.blockfile import IoOptions
from megatier.errors import PlanError
from megatier.models.decoder import Unit
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import place
from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.store import TieredStore
from megatier.tier import PAGE_BYTES, Kind, Tier

WEIGHT_BYTES, STATE_BYTES = 2, 12
"""Of a parameter: bf16; and that, the remainder, and two moments in fp32."""
OTHERS = (Kind.REMAINDER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
NVME_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Spilled:
    """A run whose state lies on NVMe, but for the weight planes perhaps."""

    units: Sequence[UnitSpec] = tuple(UNITS)
    weights_in_ram: bool = False
    groups: int = 1
    slots: int = 2
    """GPU slots for weights."""
    chunk_elements: int = 2048
    granule_bytes: int = GRANULE_BYTES
    """Under one checksum."""

    @property
    def policy(self) -> Policy:
        state = (Tier.RAM, Tier.NVME) if self.weights_in_ram else (Tier.NVME,)
        return Policy(state=state, groups=self.groups, chunk_elements=self.chunk_elements, align_elements=2048)

    @property
    def budgets(self) -> Budgets:
        """The least that holds what is wanted."""
        least, sizes = least_budgets(self.units, self.policy), weight_planes(self.units)
        more_gpu = (self.slots - 2) * max(sizes)
        more_ram = (sum(sizes) - weight_slots(self.units, least, self.policy)) * self.weights_in_ram
        return replace(least, gpu=least.gpu + more_gpu, ram=least.ram + more_ram)


def least_budgets(units: Sequence[UnitSpec], policy: Policy) -> Budgets:
    """Two slots for weights on the GPU, and room in RAM for gradients but not for state."""
    budgets = Budgets(1, 1, NVME_BYTES)
    while True:
        try:
            placement = place(units, budgets, policy)
        except PlanError as short:
            tier = "gpu" if short.what.startswith("GPU") else "ram"
            budgets = replace(budgets, **{tier: short.needed_bytes})
            continue
        if Tier.NVME not in placement.grad_homes.values():
            return budgets
        budgets = replace(budgets, ram=budgets.ram + PAGE_BYTES)


def weight_planes(units: Sequence[UnitSpec]) -> list[int]:
    """Bytes of each; units are filled up to 2,048 elements, so that these are whole pages."""
    assert not any(unit.num_elements % 2048 for unit in units)
    return [WEIGHT_BYTES * unit.num_elements for unit in units]


def weight_slots(units: Sequence[UnitSpec], budgets: Budgets, policy: Policy) -> int:
    """Bytes of the RAM slots through which weights pass; none where all are at home in RAM."""
    slots = place(units, budgets, policy).slots
    found = [plan for plan in slots if (plan.tier, plan.kind) == (Tier.RAM, Kind.WEIGHT)]
    return sum(plan.slot_bytes * plan.num_slots for plan in found)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Spilled], Run]]:
    """Starts runs; closes them."""
    with ExitStack() as stack:

        def start_run(wanted: Spilled) -> Run:
            budgets, mount = wanted.budgets, f"{tmp_path}:{NVME_BYTES}"
            options = IoOptions(num_threads=2, granule_bytes=wanted.granule_bytes)
            store = TieredStore.open(gpu=budgets.gpu, ram=budgets.ram, nvme=[mount], options=options)
            stack.callback(store.close)
            run = Run(store, budgets, wanted.policy, wanted.units)
            stack.callback(close, run)
            return run

        yield start_run


def steady_step(run: Run) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Bytes per queue of a step and of the updates left by the one before: all, and by unit."""
    before = run.store.moved_bytes.copy()
    run.player.take_events()
    run.train_step()
    by_unit: dict[str, Counter[str]] = defaultdict(Counter)
    for event in run.player.take_events():
        by_unit[event.name.partition("/")[0]][event.lane] += event.num_bytes
    return run.store.moved_bytes - before, by_unit


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_spilled_parameter_moves_14_bytes_in_12_out_and_4_more_in_per_further_group(
    groups: int, slots: int, start: Callable[[Spilled], Run]
) -> None:
    units = [*UNITS, UnitSpec(name="u5", num_elements=4096), UnitSpec(name="u6", num_elements=2048)]
    run = start(Spilled(units=units, groups=groups, slots=slots))
    assert set(run.placement.homes.values()) == {Tier.NVME}
    run.train_step()  # loads on demand, and records
    for _ in range(2):
        moved, by_unit = steady_step(run)
        read = 0
        for index, unit in enumerate(units):
            # Where forward and backward turn, the units used last are still in their GPU slots: not read again.
            spared = groups * (index >= len(units) - slots) + (groups - 1) * (index < slots)
            per_parameter = 14 + 4 * (groups - 1) - WEIGHT_BYTES * spared
            assert by_unit[unit.name]["nvme_to_ram"] == per_parameter * unit.num_elements, unit
            assert by_unit[unit.name]["ram_to_nvme"] == 12 * unit.num_elements, unit
            read += per_parameter * unit.num_elements
        assert moved["nvme_to_ram"] == read
        assert moved["ram_to_nvme"] == 12 * sum(unit.num_elements for unit in units)
    run.check_state()


@pytest.mark.parametrize("groups", [1, 3])
def test_spilled_parameter_with_its_weights_in_ram_moves_10_bytes_in_and_10_out(
    groups: int, start: Callable[[Spilled], Run]
) -> None:
    run = start(Spilled(weights_in_ram=True, groups=groups))
    expected = {(unit.name, kind): Tier.NVME for unit in UNITS for kind in OTHERS}
    assert run.placement.homes == expected | {(unit.name, Kind.WEIGHT): Tier.RAM for unit in UNITS}
    run.train_step()
    for _ in range(2):
        moved, by_unit = steady_step(run)
        for unit in UNITS:
            for queue in ("nvme_to_ram", "ram_to_nvme"):
                assert by_unit[unit.name][queue] == 10 * unit.num_elements, unit
        assert moved["nvme_to_ram"] == moved["ram_to_nvme"] == 10 * sum(unit.num_elements for unit in UNITS)
    run.check_state()


def test_spilled_model_moves_as_much_and_its_padding(tmp_path: Path) -> None:
    config, train = exactness_config("untied"), TrainConfig(steps=4, batch=BATCH, clip=0.5)
    shapes = {name: parameter.numel() for name, parameter in plain_model(config).named_parameters()}

    def with_padding(unit: Unit) -> int:
        """Parameters are filled up to 128 elements, units to 2,048."""
        elements = sum(-(-shapes.pop(tensor.name) // 128) * 128 for tensor in unit.layout.tensors)
        return -(-elements // 2048) * 2048

    with opened(config, tmp_path, PLACES["nvme"], train) as session:
        sizes = [with_padding(unit) for unit in session.own_units]
        assert not shapes, "parameters that are in no unit"
        slots = session.placement.num_slots(Tier.GPU, Kind.WEIGHT)
        before = session.store.moved_bytes.copy()
        for number in (1, 2, 3):
            session.engine.train_step(number, 1e-2, random_groups(train, config.vocab_size, number))
            moved, before = session.store.moved_bytes - before, session.store.moved_bytes.copy()
            if number > 1:  # the first loads on demand, and records
                assert moved["nvme_to_ram"] == STATE_BYTES * sum(sizes) + WEIGHT_BYTES * sum(sizes[:-slots])
                assert moved["ram_to_nvme"] == STATE_BYTES * sum(sizes)


@pytest.mark.parametrize("units", [UNITS, [UnitSpec(name=f"u{number}", num_elements=4096) for number in range(5)]])
def test_weight_planes_take_the_ram_first(units: Sequence[UnitSpec]) -> None:
    policy = Spilled(weights_in_ram=True).policy
    least = least_budgets(units, policy)
    slots, total = weight_slots(units, least, policy), sum(weight_planes(units))
    for count, room in enumerate(accumulate(weight_planes(units), initial=0)):
        homes = place(units, replace(least, ram=least.ram + room), policy).homes
        in_ram = [key for key, home in homes.items() if home is Tier.RAM]
        weights = [(unit.name, Kind.WEIGHT) for unit in units[:count]]
        if room + slots < total:
            assert in_ram == weights
        else:  # no weights pass through slots, so that all of them have room, and perhaps more
            assert in_ram[: len(units)] == [(unit.name, Kind.WEIGHT) for unit in units]


# ---------------------------------------------------------------------- the drive's own counters

SECTOR_BYTES = 512
"""What the kernel counts in, whatever the device's own are."""
QUIET_STEPS_WANTED, STEPS_MAX = 2, 8


class Drive:
    """The block device under a directory, by its counters."""

    def __init__(self, directory: Path) -> None:
        device = directory.stat().st_dev
        self._statistics = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        if not self._statistics.is_file():
            pytest.skip(f"{directory} lies on no block device whose counters can be read: no {self._statistics}")

    def moved_bytes(self) -> tuple[int, int]:
        """Read and written since the machine started."""
        numbers = [int(word) for word in self._statistics.read_text().split()]
        return numbers[2] * SECTOR_BYTES, numbers[6] * SECTOR_BYTES

    def moved_by_others(self, seconds: float) -> int:
        """Bytes that move while this process rests."""
        before = self.moved_bytes()
        time.sleep(seconds)
        return sum(self.moved_bytes()) - sum(before)


@pytest.mark.nvme
def test_drive_moves_what_the_store_counts_within_5_percent(tmp_path: Path, start: Callable[[Spilled], Run]) -> None:
    drive = Drive(tmp_path)
    units = [UnitSpec(name=f"u{number}", num_elements=3 << 20) for number in range(7)]
    run = start(Spilled(units=units, chunk_elements=1 << 20, granule_bytes=64 << 10))
    run.train_step()
    run.player.drain()
    if not run.store.is_direct:
        pytest.skip(f"{tmp_path} takes no O_DIRECT, so the page cache stands before the drive")
    shares: list[tuple[float, float]] = []
    for _ in range(STEPS_MAX):
        if len(shares) == QUIET_STEPS_WANTED:
            break
        before, counted = drive.moved_bytes(), run.store.moved_bytes.copy()
        run.train_step()
        run.player.drain()
        moved = run.store.moved_bytes - counted
        read, written = (after - former for after, former in zip(drive.moved_bytes(), before, strict=True))
        assert min(moved["nvme_to_ram"], moved["ram_to_nvme"]) > 200e6
        assert read >= 0.95 * moved["nvme_to_ram"]  # true however much others move
        assert written >= 0.95 * moved["ram_to_nvme"]
        if drive.moved_by_others(0.5) < 1e6:
            shares.append((read / moved["nvme_to_ram"], written / moved["ram_to_nvme"]))
    if not shares:
        pytest.skip("others keep this drive busy")
    assert min(share for share, _ in shares) <= 1.05, shares
    assert min(share for _, share in shares) <= 1.05, shares
    run.check_state()
