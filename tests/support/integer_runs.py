"""Runs of the player with integer arithmetic in place of a model: every weight that compute sees is checked."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from from_outside import GRANULE_BYTES, check_invariants
from torch import Tensor

from megatier.drives.blockfile import BlockFiles, FileBatch, IoOptions
from megatier.drives.extent import Extent
from megatier.errors import NonFiniteError, TransferError
from megatier.planes import Apply, Elements, Planes
from megatier.play.player import Player
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import place
from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.state import ADAMW_BF16, ADAMW_FP32
from megatier.store.store import TieredStore
from megatier.tier import Kind, Phase, Tier

UNITS = [UnitSpec(name=f"u{number}", num_elements=count) for number, count in enumerate((4096, 8192, 2048, 6144, 2048))]
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
            for kind in unit.kinds:
                shape, dtype = (unit.num_elements,), integers(unit.schema.width(kind))
                low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
                self.planes[unit.name, kind] = torch.randint(low, high, shape, dtype=dtype, generator=generator)

    def grad(self, unit: str, group: int) -> Tensor:
        """It depends on the weights, so that stale ones show."""
        return 3 * self.planes[unit, Kind.WEIGHT].to(torch.int32) % 1000 + group

    def update(self, factor: int = 1, left_out: Collection[str] = (), where: Collection[int] | None = None) -> None:
        """Apply the gradients of all groups, but for those of what was left out of some groups (None: of all)."""
        for unit in self.units:
            groups = list(range(self.policy.groups))
            if unit.name in left_out:
                groups = [] if where is None else [group for group in groups if group not in where]
            if not groups:
                continue
            total = sum((self.grad(unit.name, group) for group in groups), torch.tensor(0))
            apply({kind: self.planes[unit.name, kind] for kind in unit.kinds}, factor * total)


def integers(width: int) -> torch.dtype:
    return torch.int16 if width == 2 else torch.int32


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
        self.factor = 1
        """What a clipped gradient is multiplied with."""

    @property
    def sums(self) -> Adder:
        """It sums gradients as well."""
        return self

    def dtype(self, unit: str) -> torch.dtype:
        """Of the weights and of the final gradient."""
        return self.model.planes[unit, Kind.WEIGHT].dtype

    def unclipped(self) -> Apply:
        return partial(self._apply, 1)

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: Tensor, before: Planes) -> None:
        self._apply(self.factor, unit, elements, planes, grad, before)

    def _apply(self, factor: int, unit: str, elements: Elements, planes: Planes, grad: Tensor, before: Planes) -> None:
        for kind, plane in before.items():
            planes[kind].copy_(plane)
        views = {kind: plane.view(self.model.planes[unit, kind].dtype) for kind, plane in planes.items()}
        apply(views, factor * grad.view(self.dtype(unit)))
        if elements[0] == 0:
            self.updated.append(unit)

    def matrices(self, unit: str) -> Sequence[Elements]:
        return ()

    def accumulate(self, unit: str, total: Tensor, part: Tensor, *, group: int) -> None:
        added = part.view(torch.int32) + (total.view(torch.int32) if group else 0)
        total.view(torch.int32).copy_(added)
        if group == self.model.policy.groups - 1:
            total.view(self.dtype(unit))[: added.numel()].copy_(added)

    def sum_groups(self, unit: str, total: Tensor, pieces: Tensor, spare: Tensor, *, adds: bool, is_last: bool) -> None:
        raise AssertionError("this run is alone")

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
        self.blocks = self.player.blocks
        self.speculation = self.player.updates.speculation
        self.store = store
        self.shipped: Counter[str] = Counter()
        for unit in units:
            for elements in self.blocks.chunks(unit.name):
                with self.blocks.open_state(unit.name, elements, unit.kinds, fresh=unit.kinds) as state:
                    for kind in unit.kinds:
                        plane = self.model.planes[unit.name, kind][slice(*elements)]
                        state.planes[kind].copy_(plane.view(torch.uint8))
                    state.write_back()
        self.player.drain()

    def use(self, unit: str, phase: Phase, group: int) -> None:
        use = self.player.weights.enter(unit, phase, group)
        expected = self.model.planes[unit, Kind.WEIGHT]
        assert torch.equal(use.bytes.view(expected.dtype), expected), f"stale weights of {unit} in {phase}"
        if phase is Phase.BACKWARD:
            self.catch_up(unit, group)
            self.fill_grad(unit, group, self.model.grad(unit, group))
        use.leave()
        if phase is Phase.BACKWARD:
            self.player.grad_sink.submit_grad(unit, group=group)

    def catch_up(self, unit: str, group: int) -> None:
        """Hand over zeros for the groups before this one that left the unit out, as the engine does."""
        for missing in range(self.shipped[unit], group):
            self.fill_grad(unit, missing, torch.zeros_like(self.model.grad(unit, missing)))
            self.player.grad_sink.submit_grad(unit, group=missing)
        self.shipped[unit] = group + 1

    def fill_grad(self, unit: str, group: int, grad: Tensor) -> None:
        buffer = self.player.grad_sink.acquire_grad_buffer(unit)
        last, sums = group == self.policy.groups - 1, self.player.grad_sink.sums_in_buffer(unit)
        if self.policy.groups > 1:
            total = grad + buffer.view(torch.int32)[: grad.numel()] if group and sums else grad
            buffer.view(torch.int32).copy_(total)
            grad = total
        if self.policy.groups == 1 or (last and sums):
            buffer.view(self.adder.dtype(unit))[: grad.numel()].copy_(grad)

    def order(self) -> list[tuple[str, Phase, int]]:
        names, found = list(self.blocks.units), list[tuple[str, Phase, int]]()
        for group in range(self.policy.groups):
            found += [(name, Phase.FORWARD, group) for name in names]
            found += [(name, Phase.BACKWARD, group) for name in reversed(names)]
        return found

    def moved_in_a_step(self) -> Counter[str]:
        """Bytes per queue of a third step, with its updates."""
        for _ in range(2):
            self.train_step()
        self.player.drain()
        before = self.store.moved_bytes.copy()
        self.train_step()
        self.player.drain()
        return self.store.moved_bytes - before

    def train_step(
        self,
        *,
        clipped: bool = False,
        skipped: bool = False,
        left_out: Collection[str] = (),
        text_groups: Collection[int] | None = None,
    ) -> None:
        """Run a step that leaves units out of its groups without pixels, or of all groups if none of them is known."""
        self.player.begin("train", text_groups or ())
        self.shipped.clear()
        for unit, phase, group in self.order():
            is_text = text_groups is None or group in text_groups
            if not (unit in left_out and is_text):
                self.use(unit, phase, group)
        for unit in self.shipped:
            self.catch_up(unit, self.policy.groups)
        self.player.end()
        self.player.drain_gradients()
        if skipped:
            self.player.drop_updates()
            return
        self.adder.factor = 2 if clipped else 1
        if self.policy.deferred:
            self.player.defer_updates(clipped=clipped)
        self.model.update(self.adder.factor, left_out, text_groups)

    def evaluate(self) -> None:
        self.player.drain()
        self.player.begin("evaluate")
        for name in self.blocks.units:
            self.use(name, Phase.FORWARD, 0)
        self.player.end()

    def check_state(self) -> None:
        self.player.drain()
        for unit in self.blocks.units.values():
            for elements in self.blocks.chunks(unit.name):
                with self.blocks.open_state(unit.name, elements, unit.kinds) as state:
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
FOR_STREAMED = [
    UnitSpec(name=f"u{number}", num_elements=count) for number, count in enumerate((4096, 10240, 4096, 10240, 2048))
]
STREAMED = ("u0", "u2", "u4")
"""Of these, all but those larger than most."""


@contextlib.contextmanager
def starter(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs by placement; closes them, and nothing is left of them.

    Weights are split in all units, in none, or (None) in every other one.
    """
    runs: list[Run] = []

    def start_run(
        name: str, units: Sequence[UnitSpec] = (), ram: int = 0, split: bool | None = False, **choices: float | bool
    ) -> Run:
        state, gpu, usual = PLACES[name]
        schemas = (ADAMW_FP32, ADAMW_BF16) if split is None else (ADAMW_BF16 if split else ADAMW_FP32,)
        units = units or (FOR_STREAMED if name == "streamed" else UNITS)
        units = [replace(unit, schema=schema) for unit, schema in zip(units, cycle(schemas), strict=False)]
        ram = ram or usual
        options = IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES)
        share = 1.0 if name == "streamed" else 0.0
        choices = {"streamed_share": share, **choices}
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
"""What stops moves."""


def check_broken_for_good(run: Run) -> None:
    """The error of a queue stops the steps that follow, and stays."""

    def steps() -> None:
        for _ in range(3):
            run.train_step()
        run.player.drain()

    with pytest.raises(TransferError) as caught:
        within(steps)
    assert caught.value is BROKEN
    with pytest.raises(TransferError):
        within(run.player.drain)
