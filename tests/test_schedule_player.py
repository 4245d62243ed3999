"""The player, with integer arithmetic in place of a model: every weight that compute sees is checked."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNK_BYTES, check_invariants, slow_reads
from torch import Tensor

from megatier.errors import IntegrityError, NonFiniteError, TimelineError, TransferError
from megatier.schedule.blocks import block_key
from megatier.schedule.placement import Budgets, Policy, UnitSpec, place, state_kinds
from megatier.schedule.player import Player
from megatier.schedule.timeline import Access, Timeline, demanded_bytes
from megatier.schedule.trace import stall_seconds
from megatier.store.blockfile import BlockFiles, Extent, FileBatch, IoOptions
from megatier.store.store import TieredStore
from megatier.store.tier import Kind, Phase, Tier
from megatier.store.transfer import Lanes

UNITS = [UnitSpec(f"u{number}", count) for number, count in enumerate((4096, 8192, 2048, 6144, 2048))]
ALL = (Tier.GPU, Tier.RAM, Tier.NVME)
HANG_S = 20.0


@dataclass
class Model:
    """What every plane holds, in plain tensors: int32 or int16 whose sums wrap."""

    policy: Policy
    units: Sequence[UnitSpec]
    planes: dict[tuple[str, Kind], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for unit in self.units:
            for kind in state_kinds(split=self.policy.split):
                low, high = torch.iinfo(self.dtype(kind)).min, torch.iinfo(self.dtype(kind)).max
                shape, dtype = (unit.num_elements,), self.dtype(kind)
                self.planes[unit.name, kind] = torch.randint(low, high, shape, dtype=dtype, generator=generator)

    def dtype(self, kind: Kind) -> torch.dtype:
        return torch.int16 if self.policy.split and kind in (Kind.WEIGHT, Kind.REMAINDER) else torch.int32

    def grad(self, unit: str, group: int) -> Tensor:
        """It depends on the weights, so that stale ones show."""
        return 3 * self.planes[unit, Kind.WEIGHT].to(torch.int32) % 1000 + group

    def update(self) -> None:
        for unit in self.units:
            total = sum((self.grad(unit.name, group) for group in range(self.policy.groups)), torch.tensor(0))
            apply({kind: self.planes[unit.name, kind] for kind in state_kinds(split=self.policy.split)}, total)


def apply(planes: Mapping[Kind, Tensor], grad: Tensor) -> None:
    planes[Kind.WEIGHT].add_(grad.to(planes[Kind.WEIGHT].dtype))
    if Kind.REMAINDER in planes:
        planes[Kind.REMAINDER].sub_(1)
    planes[Kind.EXP_AVG].add_(grad)
    planes[Kind.EXP_AVG_SQ].add_(planes[Kind.EXP_AVG])


class Adder:
    """Stands for AdamW."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.refused: str | None = None
        self.updated: list[str] = []

    @property
    def width(self) -> torch.dtype:
        return torch.int16 if self.model.policy.split else torch.int32

    def apply(self, unit: str, elements: tuple[int, int], planes: Mapping[Kind, Tensor], grad: Tensor) -> None:
        apply({kind: plane.view(self.model.dtype(kind)) for kind, plane in planes.items()}, grad.view(self.width))
        if elements[0] == 0:
            self.updated.append(unit)

    def accumulate(self, unit: str, total: Tensor, part: Tensor, *, group: int) -> None:
        added = part.view(torch.int32) + (total.view(torch.int32) if group else 0)
        total.view(torch.int32).copy_(added)
        if group == self.model.policy.groups - 1:
            total.view(self.width)[: added.numel()].copy_(added)

    def check(self, unit: str) -> None:
        if unit == self.refused:
            raise NonFiniteError(f"the gradient of unit {unit} is not finite")


class Run:
    """A player with a model beside it, and a compute that checks what it is given."""

    def __init__(self, store: TieredStore, budgets: Budgets, policy: Policy, units: Sequence[UnitSpec]) -> None:
        self.policy, self.model = policy, Model(policy, units)
        self.placement = place(units, budgets, policy)
        self.adder = Adder(self.model)
        self.player = Player(store, units, self.placement, policy, self.adder)
        self.store = store
        for unit in units:
            for elements in self.player.blocks.chunks(unit.name):
                with self.player.blocks.open_state(unit.name, elements, self.kinds, fresh=True) as state:
                    for kind in self.kinds:
                        plane = self.model.planes[unit.name, kind][slice(*elements)]
                        state.planes[kind].copy_(plane.view(torch.uint8))
                    state.write_back()
        self.player.drain()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return state_kinds(split=self.policy.split)

    def use(self, unit: str, phase: Phase, group: int) -> None:
        use = self.player.enter(unit, phase, group)
        expected = self.model.planes[unit, Kind.WEIGHT]
        assert torch.equal(use.bytes.view(expected.dtype), expected), f"stale weights of {unit} in {phase}"
        if phase is Phase.BACKWARD:
            self.fill_grad(unit, group)
        use.leave()
        if phase is Phase.BACKWARD:
            self.player.ship_grad(unit, group=group)

    def fill_grad(self, unit: str, group: int) -> None:
        grad, buffer = self.model.grad(unit, group), self.player.take_grad(unit)
        last, sums = group == self.policy.groups - 1, self.player.sums_here(unit)
        if self.policy.groups > 1:
            total = grad + buffer.view(torch.int32)[: grad.numel()] if group and sums else grad
            buffer.view(torch.int32).copy_(total)
            grad = total
        if self.policy.groups == 1 or (last and sums):
            buffer.view(self.adder.width)[: grad.numel()].copy_(grad)

    def order(self) -> list[tuple[str, Phase, int]]:
        names, found = list(self.player.units), list[tuple[str, Phase, int]]()
        for group in range(self.policy.groups):
            found += [(name, Phase.FORWARD, group) for name in names]
            found += [(name, Phase.BACKWARD, group) for name in reversed(names)]
        return found

    def train_step(self) -> None:
        self.player.begin("train")
        for access in self.order():
            self.use(*access)
        self.player.end()
        self.player.drain_gradients()
        if self.policy.deferred:
            self.player.defer_updates()
        self.model.update()

    def evaluate(self) -> None:
        self.player.drain()
        self.player.begin("evaluate")
        for name in self.player.units:
            self.use(name, Phase.FORWARD, 0)
        self.player.end()

    def check_state(self) -> None:
        self.player.drain()
        for unit in self.player.units.values():
            for elements in self.player.blocks.chunks(unit.name):
                with self.player.blocks.open_state(unit.name, elements, self.kinds) as state:
                    for kind, plane in state.planes.items():
                        expected = self.model.planes[unit.name, kind][slice(*elements)]
                        assert torch.equal(plane.view(expected.dtype), expected), f"{unit.name}/{kind}"
        check_invariants(self.store)


PLACES: dict[str, tuple[tuple[Tier, ...], int, int]] = {
    "gpu": ((Tier.GPU,), 1 << 20, 1 << 20),
    "ram": ((Tier.RAM,), 160 << 10, 2 << 20),
    "nvme": ((Tier.NVME,), 160 << 10, 1 << 20),
    "mixed": (ALL, 200 << 10, 260 << 10),
    "streamed": ((Tier.RAM,), 296 << 10, 2 << 20),
}
FOR_STREAMED = [UnitSpec(f"u{number}", count) for number, count in enumerate((4096, 10240, 4096, 10240, 2048))]
STREAMED = ("u0", "u2", "u4")
"""Of these, all but those larger than most."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them."""
    runs: list[Run] = []

    def start_run(name: str, units: Sequence[UnitSpec] = (), ram: int = 0, **choices: float | bool) -> Run:
        state, gpu, usual = PLACES[name]
        units = units or (FOR_STREAMED if name == "streamed" else UNITS)
        ram = ram or usual
        options = IoOptions(num_threads=2, chunk_bytes=CHUNK_BYTES)
        share = 1.0 if name == "streamed" else 0.0
        choices = {"split": False, "streamed_share": share, **choices}
        policy = Policy(state=state, chunk_elements=2048, align_elements=2048, **choices)  # type: ignore[arg-type]
        store = TieredStore.open(gpu=gpu, ram=ram, nvme=[f"{tmp_path}:4MiB"], options=options)
        try:
            runs.append(Run(store, Budgets(gpu, ram, 4 << 20), policy, units))
        except BaseException:
            store.close()
            raise
        return runs[-1]

    yield start_run
    for run in runs:
        close(run)
    assert not list(tmp_path.iterdir())


def close(run: Run) -> None:
    """Close must end, whatever happened."""

    def ends() -> None:
        run.player.close()
        run.store.close()

    thread = threading.Thread(target=ends, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "close hangs"


def within(function: Callable[[], None]) -> None:
    """Run it, or fail: nothing may wait for ever."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "compute hangs"
    if problems:
        raise problems[0]


# ---- right bytes, everywhere ----


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("deferred", "groups"), [(True, 1), (True, 3), (False, 1), (False, 3)])
@pytest.mark.parametrize("name", list(PLACES))
def test_steps_give_the_same_bytes_wherever_the_state_lies(
    start: Callable[..., Run], name: str, deferred: bool, groups: int, split: bool
) -> None:
    tight = 180 << 10 if name == "mixed" and split and groups == 1 else 0
    run = start(name, ram=tight, deferred=deferred, groups=groups, split=split)
    for step in range(4):
        run.train_step()
        if step % 2:
            run.evaluate()
    run.check_state()
    assert run.store.moved_bytes - run_in_moves(run) == run.player.demanded
    homes = set(run.placement.homes.values())
    assert homes == set(PLACES[name][0])
    assert run.placement.streamed == (STREAMED if name == "streamed" and deferred else ())


def run_in_moves(run: Run) -> Counter[str]:
    """Bytes that filling and reading the whole state around the passes moved: each spilled plane once each way."""
    spilled = sum(
        plane.numel() * plane.element_size()
        for (unit, kind), plane in run.model.planes.items()
        if run.placement.homes[unit, kind] is Tier.NVME
    )
    return Counter({"ram_to_nvme": spilled, "nvme_to_ram": spilled})


def test_order_is_learnt_in_the_first_pass_and_planned_from_then_on(start: Callable[..., Run]) -> None:
    run = start("ram")
    played: list[Timeline | None] = []
    for _ in range(2):
        run.train_step()
        played.append(run.player.timeline)
    assert played == [None, run.player.planned("train", updates=True)]
    assert played[1] is not None
    assert played[1].accesses == tuple(Access(*access) for access in run.order())
    run.check_state()


def test_trace_of_later_passes_equals_the_timeline(start: Callable[..., Run]) -> None:
    run = start("ram")
    for _ in range(3):
        run.train_step()
        run.player.take_events()
        run.player.drain()
        run.player.take_events()
        run.train_step()
        events = run.player.take_events()
        timeline = run.player.timeline
        assert timeline is not None
        compute = [event.name for event in events if event.lane == "compute"]
        assert compute == [f"{a.unit} {a.phase} {a.group}" for a in timeline.accesses]
        loads = [event.name for event in events if event.lane == "ram_to_gpu"]
        assert loads == [block_key(load.unit, Kind.WEIGHT) for load in timeline.loads]
        assert [event for event in events if event.start_ns > event.end_ns] == []


def test_updates_run_in_forward_order_and_feed_the_loads(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.store.take_log()
    run.adder.updated.clear()
    before = run.store.moved_bytes.copy()
    run.train_step()
    moved = run.store.moved_bytes - before
    assert run.adder.updated == [unit.name for unit in UNITS]
    timeline = run.player.timeline
    assert timeline is not None
    assert all(update.load is not None for update in timeline.updates)
    demanded = demanded_bytes(timeline, run.placement, run.player.units, run.policy, gradients=True, updates=True)
    assert moved == demanded
    state = sum(12 * unit.num_elements for unit in UNITS)
    again = sum(4 * run.player.units[load.unit].num_elements for load in timeline.loads)
    assert demanded["nvme_to_ram"] == state + again  # state once; weights again only where the backward reloads them


def test_loads_run_ahead_of_compute_as_far_as_there_are_slots(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.evaluate()
    run.player.begin("evaluate")
    num_slots = run.placement.num_slots(Tier.GPU, Kind.WEIGHT)
    assert 2 <= num_slots < len(UNITS)
    deadline = time.monotonic() + HANG_S
    while sum(resident(run)) < num_slots and time.monotonic() < deadline:
        time.sleep(0.001)
    assert resident(run) == [True] * num_slots + [False] * (len(UNITS) - num_slots)
    for unit in UNITS:
        run.use(unit.name, Phase.FORWARD, 0)
    run.player.end()
    assert not any(resident(run))


def resident(run: Run) -> list[bool]:
    return [Tier.GPU in run.store.residency(block_key(unit.name, Kind.WEIGHT)) for unit in UNITS]


def test_activation_comes_back_as_it_was_stashed(start: Callable[..., Run]) -> None:
    run = start("ram", units=[UnitSpec("u0", 4096, activation_bytes=4096), *UNITS[1:]])
    tensor = torch.randn(32, 32)
    run.player.stash("u0", tensor)
    found = run.player.fetch("u0")
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 1, 2, 3), (1, 3, 2, 0)])
def test_activations_come_back_in_any_order_each_once_and_the_next_one_ahead(
    start: Callable[..., Run], order: Sequence[int]
) -> None:
    run = start("ram", units=[UnitSpec(f"u{number}", 4096, activation_bytes=4096) for number in range(4)])
    run.player.begin("train")
    tensors = [torch.randn(32, 32), torch.randn(8, 4, 32), torch.randn(64, 32).bfloat16(), torch.randn(32, 32)]
    for number, tensor in enumerate(tensors):
        run.player.stash(f"u{number}", tensor.clone())
    before = run.store.moved_bytes["ram_to_gpu"]
    for count, number in enumerate(order, 1):
        assert torch.equal(run.player.fetch(f"u{number}"), tensors[number])
        if order[0] == 3:  # as in a backward
            assert run.store.moved_bytes["ram_to_gpu"] - before == 4096 * min(4, count + 1)
    assert run.store.moved_bytes["ram_to_gpu"] - before == 4 * 4096


# ---- streamed state ----


def settle_exchange(run: Run) -> None:
    """Until streamed state has gone home and come again."""
    assert run.player._exchange is not None
    run.player._exchange.wait()
    for copy in [copy for block in run.store._blocks.values() for copy in block.copies]:
        for transfer in copy.arriving(copy.span):
            transfer.over()


def on_gpu(run: Run, kind: Kind) -> set[str]:
    return {name for name in run.player.units if Tier.GPU in run.store.residency(block_key(name, kind))}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_streamed_state_passes_through_the_gpu_on_lanes_of_its_own(
    start: Callable[..., Run], split: bool, groups: int
) -> None:
    run = start("streamed", split=split, groups=groups)
    size = sum(run.player.blocks.passing_bytes(name) for name in STREAMED)
    assert size == sum((10 if split else 8) * run.player.units[name].num_elements for name in STREAMED)
    run.train_step()
    assert run.player.demanded["state_to_gpu"] == run.store.moved_bytes["state_to_gpu"] == 0  # it only records
    run.train_step()
    settle_exchange(run)
    for step in range(3, 6):
        before = run.store.moved_bytes.copy()
        run.train_step()
        settle_exchange(run)
        moved = run.store.moved_bytes - before
        assert (moved["state_to_gpu"], moved["state_to_ram"]) == (size, size), step
        weights = sum((2 if split else 4) * run.player.units[name].num_elements for name in STREAMED)
        shipped = sum(run.player.units[name].num_elements for name in ("u1", "u3"))
        grads = groups * shipped * (2 if split and groups == 1 else 4)
        assert moved["gpu_to_ram"] == weights + grads
        assert on_gpu(run, Kind.EXP_AVG) == set(STREAMED)
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded
    assert on_gpu(run, Kind.EXP_AVG) == on_gpu(run, Kind.WEIGHT) == set()


@pytest.mark.parametrize("extra_slots", [0, 3])
def test_streamed_state_steps_drains_and_evaluations_in_any_order_move_what_is_demanded(
    start: Callable[..., Run], extra_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, "streamed", ((Tier.RAM,), (296 << 10) + extra_slots * (40 << 10), 2 << 20))
    run = start("streamed")
    assert run.placement.num_slots(Tier.GPU, Kind.WEIGHT) == 2 + extra_slots
    drain, step, evaluate = run.player.drain, run.train_step, run.evaluate
    for do in (drain, step, step, drain, step, evaluate, step, step, evaluate, evaluate, drain, drain, step, drain):
        within(do)
    assert run.store.moved_bytes == run.player.demanded
    run.check_state()
    within(step)
    run.check_state()


def test_streamed_state_beside_units_at_home_on_the_gpu(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [UnitSpec(f"u{number}", 4096) for number in range(5)]
    slots, home, passing = 4 * (16 << 10), 64 << 10, 48 << 10
    monkeypatch.setitem(PLACES, "streamed", ((Tier.GPU, Tier.RAM), slots + home + passing, 2 << 20))
    run = start("streamed", units)
    assert [run.placement.updater(unit.name) for unit in units] == [Tier.GPU, Tier.GPU, Tier.RAM, Tier.RAM, Tier.RAM]
    assert run.placement.homes["u0", Kind.WEIGHT] is Tier.GPU
    assert run.placement.streamed == ("u1",)
    for _ in range(3):
        run.train_step()
    run.evaluate()
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded


def test_streamed_state_fetched_ahead_survives_a_step_that_is_not_finite(start: Callable[..., Run]) -> None:
    """Such a step ends without updates; what it fetched serves the next one."""
    run = start("streamed")
    run.train_step()
    run.train_step()
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    run.player.end()
    run.player.drain_gradients()
    run.evaluate()  # the diagnosis
    assert on_gpu(run, Kind.EXP_AVG) == set(STREAMED)
    before = run.store.moved_bytes["state_to_gpu"]
    run.player.begin("train")
    for access in run.order():
        run.use(*access)
    settle_exchange(run)
    assert run.store.moved_bytes["state_to_gpu"] == before
    run.player.end()
    run.player.drain_gradients()
    run.player.defer_updates()
    run.model.update()
    run.check_state()
    assert run.store.moved_bytes == run.player.demanded


def test_streamed_update_waits_for_no_cpu_update_but_goes_home_after_them(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("streamed")
    run.train_step()
    run.train_step()
    settle_exchange(run)
    before = run.store.moved_bytes["state_to_ram"]
    held, real = threading.Event(), run.adder.apply

    def slow(unit: str, *arguments: object) -> None:
        if unit not in STREAMED:
            held.wait(HANG_S)
        real(unit, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run.adder, "apply", slow)
    run.adder.updated.clear()
    run.player.begin("train")
    run.use("u0", Phase.FORWARD, 0)
    time.sleep(0.05)
    assert run.adder.updated == ["u0"]  # u2 has no slot yet
    assert run.store.moved_bytes["state_to_ram"] == before
    held.set()
    for access in run.order()[1:]:
        run.use(*access)
    run.player.end()
    run.player.drain_gradients()
    run.player.defer_updates()
    run.model.update()
    run.check_state()


def fail_lane(monkeypatch: pytest.MonkeyPatch, queue: str, prefix: str, error: Exception) -> None:
    """Moves on one lane of blocks whose key begins so fail."""
    real = Lanes.submit

    def submit(self: Lanes, name: str, key: str, size: int, start: Callable[[], Any], *rest: Any, **more: Any) -> Any:
        def refuse() -> None:
            time.sleep(0.02)  # a slow failure is noticed late
            raise error

        return real(self, name, key, size, refuse if name == queue and key.startswith(prefix) else start, *rest, **more)

    monkeypatch.setattr(Lanes, "submit", submit)


@pytest.mark.parametrize(
    ("queue", "key"),
    [("state_to_ram", "u2/exp_avg_sq"), ("state_to_gpu", "u2/exp_avg_sq"), ("gpu_to_ram", "u2/weight")],
)
def test_streamed_state_that_cannot_move_stops_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, queue: str, key: str
) -> None:
    run = start("streamed")
    run.train_step()
    run.player.drain()
    fail_lane(monkeypatch, queue, key, BROKEN)

    def steps() -> None:
        for _ in range(3):
            run.train_step()
        run.player.drain()

    with pytest.raises(TransferError) as caught:
        within(steps)
    assert caught.value is BROKEN
    with pytest.raises(TransferError):
        within(run.player.drain)


def test_streamed_state_write_back_that_fails_reaches_drain(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("streamed")
    run.train_step()
    fail_lane(monkeypatch, "state_to_ram", "u2/exp_avg_sq", BROKEN)
    with pytest.raises(TransferError):
        within(run.player.drain)


# ---- stalls ----


def test_slow_disk_makes_stalls_whose_cause_is_named(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.evaluate()
    slow_reads(monkeypatch, 0.03)
    run.player.take_events()
    started = time.perf_counter_ns()
    run.evaluate()
    events = run.player.take_events()
    stalls = [event for event in events if event.lane == "stall"]
    assert {event.cause for event in stalls if event.seconds > 0.01} == {"nvme_to_ram"}
    assert {event.name for event in stalls} <= {unit.name for unit in UNITS}
    assert 0.03 < stall_seconds(events)["nvme_to_ram"] < (time.perf_counter_ns() - started) / 1e9
    reads = [event for event in events if event.lane == "nvme_to_ram"]
    assert sum(event.num_bytes for event in reads) == sum(4 * unit.num_elements for unit in UNITS)
    assert all(event.seconds > 0.025 for event in reads)
    computed = {event.name.split()[0]: event.start_ns for event in events if event.lane == "compute"}
    assert all(event.end_ns == computed[event.name] for event in stalls)


def test_slow_disk_under_deferred_updates_is_named_too(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme")
    run.train_step()
    run.player.take_events()
    slow_reads(monkeypatch, 0.01)
    run.train_step()
    seconds = stall_seconds(run.player.take_events())
    assert max(seconds, key=lambda cause: seconds[cause]) == "nvme_to_ram"
    run.check_state()


def test_slow_updates_are_named(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("ram")
    run.train_step()
    run.player.take_events()
    real = run.adder.apply

    def slow(*arguments: object) -> None:
        time.sleep(0.01)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run.adder, "apply", slow)
    run.train_step()
    events = run.player.take_events()
    seconds = stall_seconds(events)
    assert max(seconds, key=lambda cause: seconds[cause]) == "update"
    assert seconds["update"] > 0.01
    assert [event.name for event in events if event.lane == "update"][:1] == ["u0"]


# ---- another order ----


def test_unit_out_of_order_is_refused_by_name(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.player.begin("train")
    run.use("u0", Phase.FORWARD, 0)
    with pytest.raises(TimelineError, match=r"use 1 of this pass is u2 \(forward, group 0\)"):
        run.player.enter("u2", Phase.FORWARD, 0)


def test_more_uses_than_recorded_are_refused(start: Callable[..., Run]) -> None:
    run = start("ram")
    run.evaluate()
    run.evaluate()
    with pytest.raises(TimelineError, match="use 5 of this pass is u0"):
        run.player.enter("u0", Phase.FORWARD, 0)


def test_pass_that_ends_early_is_refused_and_the_next_one_works(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.evaluate()
    run.player.begin("evaluate")
    run.use("u0", Phase.FORWARD, 0)
    with pytest.raises(TimelineError, match=r"ended before u1 \(forward, group 0\)"):
        run.player.end()
    within(run.evaluate)
    within(run.train_step)
    run.check_state()


# ---- cancel, close ----


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("name", ["ram", "nvme", "mixed", "streamed"])
@pytest.mark.parametrize("deferred", [True, False])
def test_cancel_half_way_leaves_a_run_that_goes_on(
    start: Callable[..., Run], name: str, deferred: bool, uses: int
) -> None:
    run = start(name, deferred=deferred)
    for _ in range(2):
        run.train_step()
    run.player.begin("train")
    for access in run.order()[:uses]:
        run.use(*access)
    within(run.player.cancel)
    run.check_state()  # the updates that were due have run
    within(run.train_step)
    within(run.evaluate)
    run.check_state()


@pytest.mark.parametrize("name", ["nvme", "streamed"])
@pytest.mark.parametrize("uses", [0, 1, 4, 7])
def test_close_in_the_middle_of_a_pass_ends(start: Callable[..., Run], uses: int, name: str) -> None:
    run = start(name)
    run.train_step()
    run.player.begin("train")
    for access in run.order()[:uses]:
        run.use(*access)
    close(run)


def test_close_while_compute_holds_a_unit_ends(start: Callable[..., Run]) -> None:
    run = start("mixed")
    run.train_step()
    run.player.begin("train")
    run.player.enter("u0", Phase.FORWARD, 0)
    close(run)


# ---- errors in the lanes ----


class Failed:
    """A move that ended in an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error

    def done(self) -> bool:
        return True

    def span_ns(self) -> tuple[int, int]:
        return 0, 0


Move = Callable[[BlockFiles, str, Extent, int, int, int], FileBatch]


def fail_moves(monkeypatch: pytest.MonkeyPatch, name: str, prefix: str, error: Exception) -> None:
    """Reads or writes of blocks whose key begins so fail."""
    real: Move = getattr(BlockFiles, name)

    def move(self: BlockFiles, key: str, extent: Extent, start: int, stop: int, address: int) -> FileBatch | Failed:
        return Failed(error) if key.startswith(prefix) else real(self, key, extent, start, stop, address)

    monkeypatch.setattr(BlockFiles, name, move)


BROKEN = TransferError("read of block u3", "nvme", "/mnt/blocks", 4096, errno.EIO)
DAMAGED = IntegrityError("u3", "/mnt/blocks", 4096, 1, 2)


@pytest.mark.parametrize("error", [BROKEN, DAMAGED], ids=["io", "checksum"])
@pytest.mark.parametrize("deferred", [True, False])
def test_failing_read_reaches_compute_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception, deferred: bool
) -> None:
    run = start("nvme", deferred=deferred)
    run.train_step()
    fail_moves(monkeypatch, "read", "u3", error)
    with pytest.raises(type(error)) as caught:
        within(run.train_step)
    assert caught.value is error
    if deferred:  # in the immediate mode no update was under way
        with pytest.raises(type(error)):
            within(run.player.drain)
    check_invariants(run.store)


def test_failing_read_of_state_reaches_drain_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("nvme", deferred=False)
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, "read", "u3/exp_avg", BROKEN)
    with pytest.raises(TransferError) as caught:
        within(run.train_step)
    assert caught.value is BROKEN
    within(run.player.cancel)
    assert set(run.adder.updated[5:]) == {"u4", "u2", "u1", "u0"}
    check_invariants(run.store)


@pytest.mark.parametrize("deferred", [True, False])
def test_failing_write_back_reaches_drain_and_nothing_hangs(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    run = start("nvme", deferred=deferred)
    run.train_step()
    run.player.drain()
    fail_moves(monkeypatch, "write", "u2/exp_avg_sq", BROKEN)

    def steps() -> None:
        for _ in range(3):
            run.train_step()
        run.player.drain()

    with pytest.raises(TransferError) as caught:
        within(steps)
    assert caught.value is BROKEN
    with pytest.raises(TransferError):
        within(run.player.drain)
    check_invariants(run.store)


def test_gradient_that_is_not_finite_stops_its_update_alone(start: Callable[..., Run]) -> None:
    run = start("nvme", deferred=False)
    run.train_step()
    run.adder.refused = "u3"
    run.adder.updated.clear()
    with pytest.raises(NonFiniteError, match="u3"):
        within(run.train_step)  # the gradient slots of later units are not held by the refused one
    within(run.player.cancel)
    assert set(run.adder.updated) == {"u4", "u2", "u1", "u0"}
    with pytest.raises(NonFiniteError, match="u3"):
        within(run.player.drain)


def test_drain_completes_every_write_back(start: Callable[..., Run]) -> None:
    run = start("nvme")
    run.train_step()
    run.player.drain()
    for unit in UNITS:
        for kind in run.kinds:
            assert not run.store.is_dirty(block_key(unit.name, kind))
            assert list(run.store.residency(block_key(unit.name, kind))) == [Tier.NVME]
    run.check_state()


def test_planned_timeline_is_one_of_the_recorded_order(start: Callable[..., Run]) -> None:
    run = start("mixed")
    run.evaluate()
    timeline = run.player.planned("evaluate", updates=False)
    assert isinstance(timeline, Timeline)
    assert [access.unit for access in timeline.accesses] == [unit.name for unit in UNITS]


def test_updates_on_the_gpu_are_in_the_trace(start: Callable[..., Run]) -> None:
    run = start("streamed")
    for _ in range(3):
        run.train_step()
    run.player.drain()
    names = {event.name for event in run.player.take_events() if event.lane == "update_gpu"}
    assert names == set(run.placement.streamed)
