"""A forked child of a process that has opened something: refused by one error, and nothing of the parent's is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from test_integrations_interrupts import TRAIN, step, streamed_on
from tiny_runs import random_groups
from torch.utils.data import DataLoader, Dataset

from megatier import TieredAdamW, _native
from megatier.drives import mounts
from megatier.errors import ForkedError
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier

CHILD_S = 60.0
NUM_BYTES = 1 << 17


def in_child(work: Callable[[], object]) -> str:
    """What work says in a forked child: the name of its error, or what it returns."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later versions of Python warn of threads
        child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os.close(writing)
        os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], CHILD_S)[0], "the child hangs"
        return os.read(reading, 1 << 16).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


class Numbers(Dataset[int]):
    """Three batches of two."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def end_as_programs_do() -> None:
    """Do what Python does at the end of a process for those who have left something open."""
    mounts._close_all()
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    gc.collect()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_store_in_a_forked_child_is_refused_by_every_method_and_goes_on_in_its_parent(tmp_path: Path) -> None:
    with TieredStore.open(gpu="512KiB", ram="256KiB", nvme=[f"{tmp_path}:4MiB"]) as store:
        for number in range(4):
            store.register(BlockSpec(f"b{number}", NUM_BYTES, home=Tier.NVME))
        with store.lease("b0", Tier.RAM, fresh=True) as lease:
            lease.bytes.fill_(7)
            store.mark_dirty("b0", Tier.RAM)
        tensor = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        held = store.lease("b0", Tier.RAM)
        doors: dict[str, Callable[[], object]] = {
            "register": lambda: store.register(BlockSpec("new", 1, home=Tier.RAM)),
            "reserve": lambda: store.reserve(Tier.RAM, None, 1, 1),
            "seal": store.seal,
            "prefetch": lambda: store.prefetch("b1", Tier.RAM),
            "lease": lambda: store.lease("b0", Tier.RAM, wait=True),
            "mark_dirty": lambda: store.mark_dirty("b0", Tier.RAM),
            "write_back": lambda: store.write_back("b0", Tier.RAM),
            "evict": lambda: store.evict("b1", Tier.RAM),
            "discard": lambda: store.discard("b1", Tier.RAM),
            "wake": store.wake,
            "reset": store.reset,
            "settle": lambda: store.settle("b0"),
            "push": lambda: store.push("b1", tensor),
            "pull": lambda: store.pull("b1", tensor),
            "carry": lambda: store.carry("b1", tensor, tensor, to_gpu=True),
            "copy_out": lambda: store.copy_out("b0", (0, NUM_BYTES), tensor),
            "take_log": store.take_log,
            "residency": lambda: store.residency("b0"),
            "is_dirty": lambda: store.is_dirty("b0"),
            "usage": lambda: store.usage(Tier.RAM),
            "check_process": store.check_process,
        }
        public = {name for name, door in vars(TieredStore).items() if isinstance(door, types.FunctionType)}
        named = {name for name in public if not name.startswith("_")}
        assert named - {"close"} == doors.keys() - {"check_process"}

        def work() -> str:
            with held, store:
                pass
            return " ".join({error_of(door) for door in doors.values()})

        # The lock of the parent is held at the fork, as one of its threads may hold it.
        with store._copies.lock:
            assert in_child(work) == ForkedError.__name__
        assert list(tmp_path.glob("megatier-*/blocks"))
        held.release()
        store.write_back("b0", Tier.RAM)
        store.settle("b0")
        with store.lease("b0", Tier.GPU) as lease:
            assert lease.bytes.eq(7).all()
    assert not list(tmp_path.iterdir())


def test_move_of_a_parent_is_not_waited_for_in_a_forked_child(tmp_path: Path) -> None:
    with TieredStore.open(ram="256KiB", nvme=[f"{tmp_path}:4MiB"]) as store:
        gate = _native.Latch()
        store.register(BlockSpec("b", NUM_BYTES, home=Tier.NVME))
        store.seal()

        def start() -> None:
            gate.wait()

        transfer = store.queues[0].submit("b", 0, start)
        try:
            assert in_child(transfer.wait) == ForkedError.__name__
        finally:
            gate.set()
        transfer.wait()
        assert float(in_child(transfer.wait)) >= 0  # what is over, is over there too


def test_tiered_adamw_in_a_forked_child_is_refused_and_keeps_its_files(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 16))
    with TieredAdamW([weight], ram="1MiB", nvme=[f"{tmp_path}:8MiB"]) as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        files = sorted(tmp_path.rglob("*"))

        def work() -> str:
            calls = (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}}))
            said = {error_of(call) for call in (*calls, lambda: optimizer.save_state(tmp_path / "state"))}
            end_as_programs_do()
            optimizer.close()
            return " ".join(said)

        assert in_child(work) == ForkedError.__name__
        assert sorted(tmp_path.rglob("*")) == files
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 2


def test_streamed_model_in_a_forked_child_is_refused_and_goes_on_in_its_parent(tmp_path: Path) -> None:
    with streamed_on("gpu_ram_nvme", tmp_path) as streamed:
        step(streamed, 1)
        streamed.state_dict()
        step(streamed, 2)
        batch = random_groups(TRAIN, 160, 3)[0]

        def forward() -> object:
            with torch.no_grad():
                return streamed.model(**batch)

        def work() -> str:
            calls: list[Callable[[], object]] = [lambda: step(streamed, 3), streamed.state_dict, streamed.abandon]
            calls += [streamed.optimizer.zero_grad, streamed.optimizer.step, forward]
            calls += [lambda: streamed.save(tmp_path / "saved"), lambda: streamed.restore(tmp_path / "saved")]
            said = {error_of(call) for call in calls}
            with contextlib.suppress(KeyError), streamed, streamed._session:
                raise KeyError("something of the child's own")
            streamed.close()
            end_as_programs_do()
            return " ".join(said)

        files = sorted(tmp_path.rglob("*"))
        assert in_child(work) == ForkedError.__name__
        assert sorted(tmp_path.rglob("*")) == files
        step(streamed, 3)
        found = streamed.state_dict()

    (tmp_path / "alone").mkdir()
    with streamed_on("gpu_ram_nvme", tmp_path / "alone") as streamed:
        for number in (1, 2, 3):
            step(streamed, number)
        assert all(torch.equal(value, found[name]) for name, value in streamed.state_dict().items())


def test_workers_of_a_data_loader_beside_a_streamed_model_take_nothing_of_it_along(tmp_path: Path) -> None:
    with streamed_on("nvme_grads", tmp_path) as streamed:
        step(streamed, 1)
        files = sorted(tmp_path.rglob("*"))
        loader: DataLoader[int] = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for numbers in loader:
                step(streamed, int(numbers[0]))
        assert sorted(tmp_path.rglob("*")) == files
        streamed.state_dict()
