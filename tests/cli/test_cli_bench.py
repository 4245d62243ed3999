"""`megatier bench`: table, JSON, cache, exit codes, and refusals before anything is measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rank_pool import POOL

from megatier.cli import bench, main
from megatier.drives.blockfile import FileBatch
from megatier.measure import drive_probe, link_probe, rank_probe
from megatier.measure.probe import cached_rates
from megatier.schedule.rates import Rates
from megatier.schedule.rates_file import as_dict, read_rates
from megatier.schedule.world import World
from megatier.tier import Transport

QUICK = ["--seconds", "0.01", "--size", "4MiB", "--threads", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little memory is moved, and the cache is nobody's."""
    small = functools.partial(link_probe.probe_links, copy_bytes=1 << 20, update_elements=1 << 16, matmul_size=64)
    monkeypatch.setattr(link_probe, "probe_links", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount whose figures may be believed, whatever the tests' disk is."""
    monkeypatch.setattr(drive_probe, "drive_flags", lambda figures: ())
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def test_bench_prints_writes_and_keeps(drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    options = ["--nvme", str(drive), "--sustained", "8MiB", "--output", str(output), "--picture", str(picture)]
    assert main(["bench", *QUICK, *options]) == 0
    text = capsys.readouterr().out
    for words in ("read", "mixed 14:12", "p99 a block", "sustained write", "no knee", "AdamW, 1 thread", "GFLOP/s"):
        assert words in text
    assert "note no GPU: the native memory copy stands for the link" in text
    assert "I/O threads each way (short trials: 4: " in " ".join(text.split())
    assert "I/O threads each way, unless tiers.io_threads says otherwise" in text
    assert not list(drive.iterdir())
    report = json.loads(output.read_text())
    assert report["machine"]["device"] == "cpu"
    assert report["drives"][0]["size_bytes"] == 4 << 20
    drawn = list(ElementTree.parse(picture).getroot().itertext())
    assert any(line.startswith(f"{drive}: ") for line in drawn)
    (tmp_path / "rates.json").write_text(json.dumps(report["rates"]))
    rates = read_rates(tmp_path / "rates.json")
    assert cached_rates([drive], "cpu") == rates
    assert as_dict(rates) == report["rates"]


def bench_on_ranks(folder: Path, hosts: int) -> int:
    """Measure little on this rank. With two hosts, each rank has one for itself."""
    with pytest.MonkeyPatch.context() as patch:
        small = functools.partial(link_probe.probe_links, copy_bytes=1 << 20, update_elements=1 << 16, matmul_size=64)
        patch.setattr(link_probe, "probe_links", small if os.environ["RANK"] == "0" else None)
        patch.setattr(rank_probe, "LAYER_BYTES", {"cpu": 1 << 20})
        patch.setattr(rank_probe, "MATMUL_SIZE", {"cpu": 64})
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        if hosts == 2:
            patch.setenv("LOCAL_WORLD_SIZE", "1")
        return bench.run([*QUICK, "--output", str(folder / f"{hosts}.json")])


def test_bench_on_ranks_measures_their_links_and_plans_use_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert POOL.run(bench_on_ranks, 2, tmp_path, 1) == [0, 0]
    rates = cached_rates([], "cpu")
    assert rates is not None
    assert rates.assumed(World(2, 1)) == ()
    assert rates.assumed(World(2, 2)) == ("network_bytes_per_s",)
    assert 0 < (rates.ranks_slowdown or 0) <= 1
    assert rates.ranks_way is Transport.RAM
    report = json.loads((tmp_path / "1.json").read_text())
    assert (report["ranks"]["ranks"], report["ranks"]["hosts"], report["ranks"]["layer_bytes"]) == (2, 1, 1 << 20)
    assert rates.gather_bytes_per_s == (1 << 19) / report["ranks"]["gather_seconds"]
    assert read_rates(tmp_path / "1.json") == rates

    words = ["plan", "examples/quickstart.yaml", "--ranks=2", "--tiers.device=cpu", "--tiers.nvme=[]", "--json"]
    assert main([*words, "--tiers.gpu=64MiB", "--tiers.ram=64MiB"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["assumed_rates"] == {}
    assert planned["chosen"]["train.groups"] % 2 == 0
    assert planned["alone_seconds"]["ranks"] > 0

    # What was measured between hosts joins it, and one process that measures leaves all of it as it is.
    assert POOL.run(bench_on_ranks, 2, tmp_path, 2) == [0, 0]
    assert main(["bench", *QUICK]) == 0
    found = cached_rates([], "cpu")
    assert found is not None
    assert (found.gather_bytes_per_s, found.scatter_bytes_per_s) == (
        rates.gather_bytes_per_s,
        rates.scatter_bytes_per_s,
    )
    assert found.assumed(World(2, 2)) == ()


def test_rank_figures_say_what_compute_loses() -> None:
    figures = rank_probe.RankFigures(
        ranks=2,
        hosts=1,
        layer_bytes=100,
        gather_seconds=1.0,
        scatter_seconds=2.0,
        compute_share=0.5,
        collective_share=0.8,
        way=Transport.KERNELS,
    )
    assert figures.lost_seconds == pytest.approx(0.625 * 3)
    assert figures.slowdown == pytest.approx(0.625)
    assert dataclasses.replace(figures, compute_share=1.1).slowdown == 0.01
    assert dataclasses.replace(figures, compute_share=0.1).slowdown == 1


def test_bench_json_is_all_of_stdout(drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    assert main(["bench", *QUICK, "--nvme", str(drive), "--json", "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    kept = Path(document.pop("rates_file"))
    assert kept.is_file()
    assert document == json.loads(output.read_text())
    assert {"measured", "machine", "rates", "drives", "links", "ranks"} == document.keys()
    assert main(["bench", *QUICK, "--nvme", str(drive), "--json", "--size", "big"]) == 2
    assert capsys.readouterr().out == ""


def test_bench_from_source_that_is_not_installed_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(bench, "version", missing)
    assert main(["bench", *QUICK, "--output", str(tmp_path / "bench.json")]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["machine"]["megatier"] == "not installed"


def test_bench_without_mounts_measures_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *QUICK]) == 0
    assert "O_DIRECT" not in capsys.readouterr().out
    assert isinstance(cached_rates([], "cpu"), Rates)
    assert cached_rates([tmp_path], "cpu") is None


def test_bench_flagged_drive_exits_1_and_is_not_kept(
    drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive_probe, "drive_flags", lambda figures: ("[odd]",))
    assert main(["bench", *QUICK, "--nvme", str(drive)]) == 1
    assert "not to be believed [odd]" in capsys.readouterr().out
    assert cached_rates([drive], "cpu") is None
    assert cached_rates([], "cpu") is not None


def test_bench_two_mounts_of_one_file_system_share_its_rates(
    drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other := tmp_path / "other").mkdir()
    assert main(["bench", *QUICK, "--nvme", f"{drive}:2MiB,{other}"]) == 0
    assert "some mounts share a device" in capsys.readouterr().out
    assert not [*drive.iterdir(), *other.iterdir()]


def test_bench_cache_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["bench", *QUICK]) == 0
    assert "rates not kept for `megatier plan`" in capsys.readouterr().out


def test_bench_interrupted_leaves_nothing(
    drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counter, real = itertools.count(), FileBatch.wait

    def wait(self: FileBatch) -> None:
        if next(counter) == 25:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(FileBatch, "wait", wait)
    assert main(["bench", *QUICK, "--nvme", str(drive)]) == 130
    assert not list(drive.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nvme", "{}/none"], "--nvme: {}/none is not a directory."),
        (["--nvme", "{}/../loop"], "--nvme: {}/../loop is not a directory."),
        (["--nvme", "{}:1KiB"], "on {} is too small; give 1.0 MiB or more."),
        (["--nvme", "{}:9999TiB"], "Free space on {}, or give it less: {}:SIZE."),
        (["--nvme", "{},{}"], "--nvme names a directory twice"),
        (["--nvme", "{}:many"], "--nvme is '{}:many'"),
        (["--size", "big"], "--size is 'big'"),
        (["--threads", "1,x"], "--threads is '1,x'"),
        (["--threads", "0"], "give numbers from 1 to 1024"),
        (["--seconds", "0"], "--seconds is 0; give a number above 0."),
        (["--output", "{}/none/a.json"], "cannot write {}/none/a.json"),
        (["--picture", "{}/none/a.svg"], "cannot write {}/none/a.svg"),
    ],
)
def test_bench_bad_input_is_one_line_and_measures_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(link_probe, "probe_links")
    monkeypatch.setattr(link_probe, "probe_links", None, raising=False)
    (mount := tmp_path / "mount").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert main(["bench", *(word.replace("{}", str(mount)) for word in words)]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert message.replace("{}", str(mount)) in error
    assert not list(mount.iterdir())


@pytest.mark.parametrize(("cores", "threads"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_bench_default_threads_end_with_all_cores(cores: int, threads: list[int]) -> None:
    assert bench.default_threads(cores) == threads


def test_bench_help_shows_without_torch() -> None:
    code = (
        "import atexit, sys; from megatier.cli import main; atexit.register(lambda: print('torch' in sys.modules)); "
        "main(['bench', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--sustained SIZE" in done.stdout
    assert done.stdout.endswith("False\n")
