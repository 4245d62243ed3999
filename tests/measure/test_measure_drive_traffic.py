"""Traffic of blocks on one drive: what is read and written where, and the rates of stretches of it. No timing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatier import _native
from megatier.drives.blockfile import IoOptions
from megatier.errors import IntegrityError
from megatier.measure import drive_traffic
from megatier.measure.drive_probe import BLOCKS_MIN
from megatier.measure.drive_traffic import BlockTraffic, Flow, UpdatesBeside, window_rates

BLOCK = 256 << 10
SECONDS = 0.01
GB = 10**9


def traffic(directory: Path, options: IoOptions | None = None) -> BlockTraffic:
    return BlockTraffic(directory, BLOCKS_MIN, BLOCK, options or IoOptions(), pin=False)


def test_traffic_that_reads_another_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError), traffic(tmp_path, IoOptions(direct=False)) as blocks:
        (file,) = tmp_path.glob("*/blocks")
        content = bytearray(file.read_bytes())
        content[:BLOCK], content[BLOCK : 2 * BLOCK] = content[BLOCK : 2 * BLOCK], content[:BLOCK]
        file.write_bytes(content)
        blocks.read(SECONDS)
    assert not list(tmp_path.iterdir())


def test_mixed_reads_seven_blocks_to_six_written_elsewhere(tmp_path: Path) -> None:
    with traffic(tmp_path) as blocks:
        turns = list(itertools.islice(blocks._turns(), 26)) if blocks.is_direct else list(blocks._turns())
    reads, writes = ([index for write, index in turns if write is way] for way in (False, True))
    assert not set(reads) & set(writes)
    if len(turns) == 26:
        assert (len(reads), len(writes)) == (14, 12)


@pytest.mark.parametrize(("share", "number"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)])
def test_quantile_is_a_number_that_was_measured(share: float, number: float) -> None:
    assert drive_traffic.quantile([float(i) for i in range(1, 101)], share) == number
    assert drive_traffic.quantile([3.0], share) == 3.0


def test_step_rates_are_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_traffic, "SUSTAINED_STEP_BYTES", 2000)
    ends = [3 * GB, 1 * GB, 2 * GB, 6 * GB, 7 * GB]  # as they came, not in order
    assert drive_traffic.step_rates(0, ends, 1000) == (1000.0, 500.0)
    assert drive_traffic.step_rates(0, [GB], 1000) == (1000.0,)
    assert drive_traffic.step_rates(0, [], 1000) == ()


def test_window_rates_show_how_a_drive_wavers() -> None:
    # Thirteen blocks in each of three seconds, fifty-two in the fourth, one left over.
    ends = [second * GB + GB * block // 13 for second in range(3) for block in range(1, 14)]
    ends += [3 * GB + GB * block // 52 for block in range(1, 53)] + [4 * GB + 1]
    assert window_rates(0, ends, 1000, 1.0) == pytest.approx((13e3, 13e3, 13e3, 52e3))
    assert window_rates(0, reversed(ends), 1000, 2.0) == pytest.approx((13e3, 32.5e3))
    assert window_rates(0, ends[:12], 1000, 0.0) == ()  # no whole mixed turn


def test_flow_of_windows_has_the_rate_of_the_median_one() -> None:
    assert Flow(num_bytes=9 * GB, seconds=3.0, p50_ms=1.0, p99_ms=1.0, device_bytes=None).bytes_per_s == 3 * GB
    windows = (1e9, 5e9, 2e9)
    flow = Flow(num_bytes=9 * GB, seconds=3.0, p50_ms=1.0, p99_ms=1.0, device_bytes=None, windows=windows)
    assert flow.bytes_per_s == 2e9


def test_updates_beside_are_of_as_many_parameters_as_blocks_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [(bool(number % 2), number) for number in range(26)]
    begun: list[int] = []
    with UpdatesBeside(BLOCK // 4, 1) as updates:
        real = updates._traffic.submit

        def submit(pool: _native.ThreadPool, chunk: int) -> _native.Batch:
            begun.append(chunk)
            return real(pool, chunk)

        monkeypatch.setattr(updates._traffic, "submit", submit)
        assert list(updates.among(operations)) == operations
    assert begun == [0, 1, 0, 1]  # 14 bytes a parameter: 2 chunks of BLOCK / 4 from 7 blocks that are read


def test_updated_traffic_has_windows_unless_the_page_cache_takes_the_writes(tmp_path: Path) -> None:
    with traffic(tmp_path, IoOptions(direct=False)) as blocks:
        assert blocks.updated(SECONDS, 1).windows == ()
    with traffic(tmp_path) as blocks:
        assert bool(blocks.updated(0.05, 2).windows) is blocks.is_direct
    assert not list(tmp_path.iterdir())
