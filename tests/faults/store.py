"""Stores on a drive that misbehaves, in one process with the shim preloaded: every scenario turns its own fault on.

Usage: store.py DIRECTORY LOOK. Writes JSON: per scenario an empty string, or how it failed. A LOOK above 0 lets each
move end when it is asked for that time whether it has; else it ends as it comes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from from_outside import GRANULE_BYTES, check_invariants, pattern, probe

from megatier.drives.blockfile import IoOptions
from megatier.errors import CapacityError, IntegrityError, TransferError
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer
from megatier.tier import BlockSpec, Tier

NUM_BYTES = 8 * GRANULE_BYTES
KEYS = ("a", "b", "c", "d")
SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextlib.contextmanager
def fault(op: str, kind: str | int, offset: int = 0) -> Iterator[None]:
    """While inside, transfers of every block file misbehave; see shim.c."""
    settings = {"FAULT_OP": op, "FAULT_KIND": str(kind), "FAULT_OFFSET": str(offset), "FAULT_PATH": "/blocks"}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in reversed(settings):
            del os.environ[name]


@contextlib.contextmanager
def opened(directory: Path, ram_slots: int = 3) -> Iterator[TieredStore]:
    """A store with four random blocks on NVMe; its invariants hold at the end and nothing of it is left."""
    options = IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES)
    with TieredStore.open(
        gpu=2 * NUM_BYTES, ram=ram_slots * NUM_BYTES, nvme=[f"{directory}:1MiB"], options=options
    ) as store:
        for key in KEYS:
            store.register(BlockSpec(key, NUM_BYTES, Tier.NVME))
        for seed, key in enumerate(KEYS):
            write(store, key, pattern(seed, NUM_BYTES))
            store.write_back(key, Tier.RAM)
            store.evict(key, Tier.RAM)
            store.settle(key)
        yield store
        check_invariants(store)
    assert not list(directory.iterdir())


def write(store: TieredStore, key: str, values: torch.Tensor) -> None:
    with store.lease(key, Tier.RAM, fresh=True, wait=True) as block:
        block.bytes.copy_(values)
        store.mark_dirty(key, Tier.RAM)


def read(store: TieredStore, key: str, tier: Tier = Tier.RAM) -> torch.Tensor:
    with store.lease(key, tier, wait=True) as block:
        return block.bytes.clone()


def offset_of(store: TieredStore, key: str) -> int:
    extent = store._blocks.find(key).extent
    assert extent is not None
    return extent.stripes[0].file_offset


def path_of(store: TieredStore) -> str:
    assert store.files is not None
    return str(store.files.paths[0])


def check_error(error: TransferError, store: TieredStore, code: int, offset: int) -> None:
    """The typed fields, and a sentence that says what, where, why and what to do."""
    assert (error.tier, error.path, error.offset, error.errno) == ("nvme", path_of(store), offset, code)
    message = str(error)
    assert f"{path_of(store)} at byte {offset}: {os.strerror(code)}. " in message
    assert "tier nvme" in message
    assert message.split(os.strerror(code) + ". ")[1], "a remedy"


@scenario
def short_transfers_are_continued(directory: Path) -> None:
    for op in ("read", "write"):
        with fault(op, "short"), opened(directory) as store:
            for seed, key in enumerate(KEYS):
                assert torch.equal(read(store, key), pattern(seed, NUM_BYTES))


@scenario
def interrupted_transfers_are_repeated(directory: Path) -> None:
    for op in ("read", "write"):
        with fault(op, "eintr"), opened(directory) as store:
            for seed, key in enumerate(KEYS):
                assert torch.equal(read(store, key, Tier.GPU), pattern(seed, NUM_BYTES))


def failing_read(directory: Path, tier: Tier) -> None:
    with opened(directory) as store:
        offset = offset_of(store, "b") + 3 * GRANULE_BYTES
        with fault("read", errno.EIO, offset):
            for _ in range(5):  # no slot is lost on the way
                with pytest.raises(TransferError) as caught:
                    store.lease("b", tier)
                check_error(caught.value, store, errno.EIO, offset)
                check_invariants(store)
            assert tier not in store.residency("b")
            assert torch.equal(read(store, "a", tier), pattern(0, NUM_BYTES))
            assert torch.equal(read(store, "c", tier), pattern(2, NUM_BYTES))
            store.prefetch("b", tier)  # a hint: its failure is nobody's
        assert torch.equal(read(store, "b", tier), pattern(1, NUM_BYTES))


@scenario
def failing_read_into_ram_leaves_the_block_on_nvme(directory: Path) -> None:
    failing_read(directory, Tier.RAM)


@scenario
def failing_read_on_the_way_to_the_gpu_leaves_the_block_on_nvme(directory: Path) -> None:
    failing_read(directory, Tier.GPU)


@scenario
def failing_read_does_not_harm_who_takes_the_slot_next(directory: Path) -> None:
    with opened(directory, ram_slots=1) as store:
        with fault("read", errno.EIO, offset_of(store, "b")):
            for tier in (Tier.RAM, Tier.GPU):
                transfers = store.prefetch("b", tier)
                store.evict("b", tier)
                assert torch.equal(read(store, "a", tier), pattern(0, NUM_BYTES))
                assert not [transfer for transfer in transfers if transfer.wait_for_end()]
                store.evict("a", tier)
        assert torch.equal(read(store, "b"), pattern(1, NUM_BYTES))


def failing_write(directory: Path, code: int) -> None:
    with opened(directory) as store:
        offset = offset_of(store, "b") + 5 * GRANULE_BYTES
        write(store, "b", pattern(9, NUM_BYTES))
        with fault("write", code, offset):
            transfer = store.write_back("b", Tier.RAM)
            assert transfer is not None
            for use in (transfer.wait, lambda: store.settle("b"), lambda: store.evict("b", Tier.RAM)):
                with pytest.raises(TransferError) as caught:
                    use()
                check_error(caught.value, store, code, offset)
            assert store.is_dirty("b")
            assert torch.equal(read(store, "b"), pattern(9, NUM_BYTES))
            assert Tier.NVME not in store.residency("b")
            assert torch.equal(read(store, "a"), pattern(0, NUM_BYTES))
            assert torch.equal(read(store, "c"), pattern(2, NUM_BYTES))
            assert torch.equal(read(store, "d"), pattern(3, NUM_BYTES))
        store.write_back("b", Tier.RAM)
        store.settle("b")
        assert not store.is_dirty("b")
        assert torch.equal(probe(store, "b"), pattern(9, NUM_BYTES))
        store.evict("b", Tier.RAM)
        assert torch.equal(read(store, "b"), pattern(9, NUM_BYTES))


@scenario
def failing_write_leaves_the_block_dirty_in_ram(directory: Path) -> None:
    failing_write(directory, errno.EIO)


@scenario
def full_disk_leaves_the_block_dirty_in_ram(directory: Path) -> None:
    failing_write(directory, errno.ENOSPC)


@scenario
def failing_write_of_a_leased_block_leaves_the_lease(directory: Path) -> None:
    with opened(directory) as store, store.lease("b", Tier.RAM) as block:
        block.bytes.copy_(pattern(9, NUM_BYTES))
        store.mark_dirty("b", Tier.RAM)
        with fault("write", errno.EIO, offset_of(store, "b")):
            store.write_back("b", Tier.RAM)
            with pytest.raises(TransferError):
                store.settle("b")
        assert torch.equal(block.bytes, pattern(9, NUM_BYTES))
        store.write_back("b", Tier.RAM)
        store.settle("b")


@scenario
def failing_write_of_an_evicted_block_keeps_it(directory: Path) -> None:
    with opened(directory) as store:
        write(store, "b", pattern(9, NUM_BYTES))
        with fault("write", errno.EIO, offset_of(store, "b") + GRANULE_BYTES):
            store.write_back("b", Tier.RAM)
            with contextlib.suppress(TransferError):  # it may have failed already
                store.evict("b", Tier.RAM)
            for key in ("c", "d", "a"):
                read(store, key)
            with pytest.raises(TransferError):
                store.settle("b")
            assert torch.equal(read(store, "b"), pattern(9, NUM_BYTES))
        store.write_back("b", Tier.RAM)
        store.settle("b")
        assert torch.equal(probe(store, "b"), pattern(9, NUM_BYTES))


@scenario
def failing_write_of_one_span_is_not_forgotten_by_the_next(directory: Path) -> None:
    with opened(directory) as store:
        spans = [(0, NUM_BYTES // 2), (NUM_BYTES // 2, NUM_BYTES)]
        with fault("write", errno.EIO, offset_of(store, "b")):
            for span in spans:
                with store.lease("b", Tier.RAM, span, fresh=True) as block:
                    block.bytes.copy_(pattern(9, NUM_BYTES)[slice(*span)])
                    store.mark_dirty("b", Tier.RAM, span)
                store.write_back("b", Tier.RAM, span)
                with contextlib.suppress(TransferError):
                    store.evict("b", Tier.RAM, span)
            with pytest.raises(TransferError):
                store.settle("b")
            with pytest.raises(TransferError):
                store.settle("b")
            assert torch.equal(read(store, "b", Tier.GPU), pattern(9, NUM_BYTES))
            assert store.is_dirty("b")
        store.write_back("b", Tier.RAM, spans[0])
        store.settle("b")


@scenario
def slots_kept_by_failed_writes_raise_instead_of_waiting_for_ever(directory: Path) -> None:
    with opened(directory) as store:
        with fault("write", errno.ENOSPC, 0):  # every write that touches the first block
            write(store, "a", pattern(9, NUM_BYTES))
            store.write_back("a", Tier.RAM)
            with contextlib.suppress(TransferError):
                store.evict("a", Tier.RAM)
            leases = [store.lease(key, Tier.RAM, wait=True) for key in ("b", "c")]
            with pytest.raises(TransferError):
                store.lease("d", Tier.RAM, wait=True)
            for lease in leases:
                lease.release()
            assert torch.equal(read(store, "d"), pattern(3, NUM_BYTES))
        store.write_back("a", Tier.RAM)
        store.settle("a")


@scenario
def failing_write_after_gpu_write_back_keeps_the_bytes_in_ram(directory: Path) -> None:
    with opened(directory) as store:
        with store.lease("b", Tier.GPU) as block:
            block.bytes.copy_(pattern(9, NUM_BYTES))
            store.mark_dirty("b", Tier.GPU)
        with fault("write", errno.EIO, offset_of(store, "b")):
            store.write_back("b", Tier.GPU)
            store.evict("b", Tier.GPU)
            store.write_back("b", Tier.RAM)
            with pytest.raises(TransferError):
                store.settle("b")
            assert torch.equal(read(store, "b", Tier.GPU), pattern(9, NUM_BYTES))
        store.write_back("b", Tier.RAM)
        store.settle("b")
        assert torch.equal(probe(store, "b"), pattern(9, NUM_BYTES))


@scenario
def flipped_bit_is_an_integrity_error_of_that_granule_alone(directory: Path) -> None:
    with opened(directory) as store:
        offset = offset_of(store, "b") + 3 * GRANULE_BYTES
        with fault("read", "flip", offset + 1234):
            for tier in (Tier.RAM, Tier.GPU):
                with pytest.raises(IntegrityError) as caught:
                    store.lease("b", tier)
                error = caught.value
                assert (error.key, error.path, error.offset) == ("b", path_of(store), offset)
                assert error.expected != error.found
            span = (4 * GRANULE_BYTES, NUM_BYTES)
            with store.lease("b", Tier.RAM, span) as block:
                assert torch.equal(block.bytes, pattern(1, NUM_BYTES)[slice(*span)])
            store.evict("b", Tier.RAM, span)
            assert torch.equal(read(store, "a"), pattern(0, NUM_BYTES))
        assert torch.equal(read(store, "b"), pattern(1, NUM_BYTES))


@scenario
def bit_flipped_on_the_drive_is_found_when_it_is_read(directory: Path) -> None:
    with opened(directory) as store:
        offset = offset_of(store, "b") + 2 * GRANULE_BYTES
        assert torch.equal(read(store, "b"), pattern(1, NUM_BYTES))
        file = os.open(path_of(store), os.O_RDWR)
        os.pwrite(file, bytes([os.pread(file, 1, offset + 7)[0] ^ 0x10]), offset + 7)
        os.close(file)
        assert torch.equal(read(store, "b"), pattern(1, NUM_BYTES))  # RAM still has it
        store.evict("b", Tier.RAM)
        with pytest.raises(IntegrityError) as caught:
            store.lease("b", Tier.RAM)
        assert caught.value.offset == offset


@scenario
def drive_that_fails_while_it_is_filled_is_refused_before_use(directory: Path) -> None:
    for code in (errno.EIO, errno.ENOSPC):
        with fault("write", code, GRANULE_BYTES):
            store = TieredStore.open(ram="1MiB", nvme=[f"{directory}:1MiB"])
            store.register(BlockSpec("a", NUM_BYTES, Tier.NVME))
            with pytest.raises(TransferError) as caught:
                store.lease("a", Tier.RAM)
            check_error(caught.value, store, code, GRANULE_BYTES)
            store.close()
    assert not list(directory.iterdir())


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@scenario
def file_size_limit_below_the_plan_is_refused_before_use(directory: Path) -> None:
    store = TieredStore.open(ram="1MiB", nvme=[f"{directory}:1MiB"])
    store.register(BlockSpec("a", 16 * NUM_BYTES, Tier.NVME))
    with file_size_limit(NUM_BYTES), pytest.raises(CapacityError) as caught:
        store.seal()
    assert (caught.value.tier, caught.value.needed_bytes) == ("nvme", 16 * NUM_BYTES)
    assert "ulimit -f" in str(caught.value)
    store.close()
    assert not list(directory.iterdir())


@scenario
def file_size_limit_met_by_a_write_leaves_the_block_in_ram(directory: Path) -> None:
    with opened(directory) as store:
        offset = offset_of(store, "d")
        write(store, "d", pattern(9, NUM_BYTES))
        with file_size_limit(offset + GRANULE_BYTES):
            transfer = store.write_back("d", Tier.RAM)
            assert transfer is not None
            with pytest.raises(TransferError) as caught:
                transfer.wait()
            check_error(caught.value, store, errno.EFBIG, offset + GRANULE_BYTES)
            assert torch.equal(read(store, "d"), pattern(9, NUM_BYTES))
        store.write_back("d", Tier.RAM)
        store.settle("d")
        assert torch.equal(probe(store, "d"), pattern(9, NUM_BYTES))


@contextlib.contextmanager
def end_seen_at_look(number: int) -> Iterator[None]:
    """Every transfer ends just before somebody asks for the number-th time whether it has, unless one waits for it."""
    looks: Counter[int] = Counter()
    over: dict[int, Transfer] = {}  # keeps them, so that no other one gets their id
    wait, done = Transfer.wait, Transfer.done

    def noted_wait(transfer: Transfer) -> float:
        try:
            return wait(transfer)
        finally:
            over[id(transfer)] = transfer

    def late_done(transfer: Transfer) -> bool:
        looks[id(transfer)] += 1
        if id(transfer) not in over and looks[id(transfer)] < number:
            return False
        with contextlib.suppress(TransferError, IntegrityError):
            noted_wait(transfer)
        return done(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "wait", noted_wait)
        patch.setattr(Transfer, "done", late_done)
        yield


def main(directory: Path, look: int) -> None:
    found = {}
    for name, run in SCENARIOS.items():
        place = directory / name
        place.mkdir()
        try:
            with end_seen_at_look(look) if look else contextlib.nullcontext():
                run(place)
            found[name] = ""
        except (Exception, pytest.fail.Exception):
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
