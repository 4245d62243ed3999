"""The command `megatier doctor`: what it checks, on this machine and on others."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatier import hardware
from megatier.cli import doctor, main
from megatier.config.values import MountBudget

ROOT = Path(__file__).parents[2]


def found(directory: Path) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks([MountBudget(directory, None)])}


def test_doctor_here_checks_everything_and_leaves_nothing(tmp_path: Path) -> None:
    checks = found(tmp_path)
    assert {"Python", "torch", "transformers", "native module", "cores", "GPU", "kvikio", "nvidia-fs"} <= set(checks)
    assert {"/run/udev", "RAM", "memlock", "huge pages", "file system", "free space", "O_DIRECT"} <= set(checks)
    assert all(check.remedy for check in checks.values() if check.state != "ok")
    assert checks["torch"].state == "ok"
    assert checks["file system"].state == "ok"
    assert not list(tmp_path.iterdir())


def test_doctor_missing_directory_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nvme", str(tmp_path / "none")]) == 1
    assert "fail" in capsys.readouterr().out
    checks = found(tmp_path / "none")
    assert (checks["drive"].state, checks["drive"].found) == ("fail", f"{tmp_path / 'none'} is no directory")
    assert not {"file system", "free space", "O_DIRECT"} & set(checks)


def test_doctor_shows_extras_with_their_brackets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remedy = doctor.Check(
        name="trl (trl)",
        state="warn",
        found="not installed: pip install 'megatier[trl]'",
        remedy="see /mnt/[a]",
    )
    monkeypatch.setattr(doctor, "checks", lambda mounts: [remedy])
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--nvme", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "pip install 'megatier[trl]'" in shown
    assert "/mnt/[a]" in shown


def test_doctor_json_is_all_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--nvme", str(tmp_path / "none")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert {"name", "state", "found", "remedy"} == document["checks"][0].keys()
    assert "fail" in {check["state"] for check in document["checks"]}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_doctor_directory_in_ram_fails() -> None:
    check = found(Path("/dev/shm"))["file system"]
    assert (check.state, check.found) == ("fail", "/dev/shm: tmpfs on /dev/shm")


def test_doctor_several_mounts_each_have_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    mounts = [MountBudget(tmp_path / "a", 4096), MountBudget(tmp_path / "b", 1 << 60)]
    checks = list(doctor.checks(mounts))
    assert [check.state for check in checks if check.name == "O_DIRECT"] != ["fail", "fail"]
    enough, short = (check for check in checks if check.name == "free space")
    assert enough.state != "fail"
    assert (short.state, short.remedy.startswith("Less than the 1048576.0 TiB given.")) == ("fail", True)
    assert main(["doctor", "--nvme", f"{tmp_path}/a:1KiB,{tmp_path}/b:1EB"]) == 2
    assert f"--nvme is '{tmp_path}/b:1EB'" in capsys.readouterr().err


def test_doctor_missing_package_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    check = found(tmp_path)["zarr"]
    assert (check.state, check.remedy) == ("fail", "pip install zarr")


def test_doctor_names_each_extra_as_the_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    bring = {name: wanted[-1].partition(",")[0] for name, wanted in project["optional-dependencies"].items()}
    others = {"gds", "gds-cu12", "test", "bench", "docs", "dev"}
    assert {name: wanted for name, wanted in bring.items() if name not in others} == doctor.EXTRAS

    versions = {"pyarrow": "17.9.1", "peft": "0.18.0rc1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {name: doctor._extra(name, wanted) for name, wanted in doctor.EXTRAS.items()}
    assert (found["data"].state, found["data"].found) == ("warn", "17.9.1, and 18 is the least")
    assert (found["lora"].name, found["lora"].state) == ("lora (peft)", "ok")
    assert found["trl"].found == "not installed: pip install 'megatier[trl]'"


def test_doctor_torch_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> tuple[hardware.Gpu, ...]:
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(hardware, "gpus", broken)
    check = found(tmp_path)["GPU"]
    assert (check.state, check.found) == (
        "fail",
        "torch cannot be loaded: libcudart.so: cannot open shared object file",
    )


@pytest.mark.parametrize("limit", [None, 65536])
def test_doctor_memlock_limit_is_told(limit: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "memlock_limit_bytes", lambda: limit)
    assert found(tmp_path)["memlock"].found.startswith("no limit" if limit is None else "64.0 KiB")


@pytest.mark.parametrize("limit", [None, 448 << 20])
def test_doctor_limit_of_page_locked_ram_is_told_with_its_remedy(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.measure.lock_probe.locked_limit", lambda: limit)
    check = doctor._page_lock()
    if limit is None:
        assert (check.state, check.found) == ("ok", "no limit met")
    else:
        assert (check.state, check.found) == ("warn", "448.0 MiB")
        assert all(word in check.remedy for word in ("rings", "ulimit -l", "--ulimit memlock=-1", ".wslconfig"))


def test_doctor_cgroup_limit_and_huge_pages_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(hardware, "ram_limit_bytes", lambda: 4 << 30)
    monkeypatch.setattr(hardware, "transparent_huge_pages", lambda: "never")
    checks = found(tmp_path)
    assert (checks["RAM"].state, checks["RAM"].found) == ("warn", "1.0 GiB available, cgroup limit 4.0 GiB")
    assert (checks["huge pages"].state, checks["huge pages"].found) == ("warn", "never")


# ---------------------------------------------------------------------- doctor, with a GPU or not


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of its own uuid."""
    monkeypatch.setattr(hardware, "gpus", lambda: (hardware.Gpu("card", 2 << 30, 1 << 30, "here"),))
    monkeypatch.setattr("megatier.measure.lock_probe.locked_limit", lambda: None)


@pytest.fixture
def kvikio_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, doctor.Check]]:
    """What doctor finds where kvikio is installed and the probe is a program of ours."""

    def look(program: str) -> dict[str, doctor.Check]:
        for name in ("site", "drive"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "site" / "kvikio.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(doctor, "KVIKIO_PROBE", program)
        checks = found(tmp_path / "drive")
        assert not list((tmp_path / "drive").iterdir())
        return checks

    return look


@pytest.mark.usefixtures("gpu")
def test_doctor_without_kvikio_says_that_it_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    checks = found(tmp_path)
    assert (checks["kvikio"].state, checks["kvikio"].found.partition(":")[0]) == ("ok", "not installed")
    assert checks["nvidia-fs"].state == checks["/run/udev"].state == "ok", "nobody wants them"


@pytest.mark.usefixtures("gpu")
def test_doctor_kvikio_that_reads_wants_nvidia_fs_and_udev(
    kvikio_that: Callable[[str], dict[str, doctor.Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_there, state in ((False, "warn"), (True, "ok")):
        monkeypatch.setattr(hardware, "nvidia_fs_is_loaded", lambda is_there=is_there: is_there)
        monkeypatch.setattr(hardware, "udev_is_readable", lambda is_there=is_there: is_there)
        checks = kvikio_that("import os, sys; print(*map(os.path.isdir, sys.argv[1:]))")
        assert (checks["kvikio"].state, checks["kvikio"].found) == ("ok", "True")
        assert (checks["nvidia-fs"].state, checks["/run/udev"].state) == (state, state)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ImportError('no libcufile')", "no libcufile"),
        ("import os; os.kill(os.getpid(), 9)", "ended by a signal"),
        ("import time; time.sleep(60)", "hangs, for 2 s at least"),
    ],
)
def test_doctor_kvikio_that_does_not_read_is_told(
    program: str, words: str, kvikio_that: Callable[[str], dict[str, doctor.Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "KVIKIO_SECONDS", 2 if "sleep" in program else 60)
    checks = kvikio_that(program)
    assert checks["kvikio"].state == "warn"
    assert words in checks["kvikio"].found
    assert checks["nvidia-fs"].state == "ok", "nobody wants it"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("directory", ["/dev/shm/missing", "missing"])
def test_doctor_without_a_drive_does_not_try_kvikio(
    directory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kvikio.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hardware, "pcie_links", dict)
    monkeypatch.setattr(subprocess, "run", None)
    check = found(tmp_path / directory)["kvikio"]
    assert (check.state, check.found.partition(":")[0]) == ("warn", "not tried")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kvikio may be here")
def test_doctor_probe_needs_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", doctor.KVIKIO_PROBE, tmp_path], capture_output=True, text=True)
    assert "there is no GPU in use" in done.stderr
    assert not list(tmp_path.iterdir())


def test_doctor_without_gpu_leaves_kvikio_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(subprocess, "run", None)
    checks = found(tmp_path)
    assert checks["kvikio"].found == "not used: no GPU"
    assert checks["nvidia-fs"].state == checks["/run/udev"].state == "ok"
    assert "PCIe link" not in checks


@pytest.mark.parametrize(
    ("card", "name", "words"),
    [
        (hardware.Gpu("card", 2, 1, is_unified=True), "GPU memory", "RAM and GPU memory are one of"),
        (hardware.Gpu("card", 2, 1, is_coherent=True), "GPU link", "NVLink-C2C"),
    ],
    ids=["unified", "coherent"],
)
@pytest.mark.usefixtures("gpu")
def test_doctor_says_that_unified_memory_and_its_link_were_never_tried(
    card: hardware.Gpu, name: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (card,))
    checks = found(tmp_path)
    assert checks[name].state == "warn"
    assert words in checks[name].found
    assert "Nobody has tried megatier on such a machine" in checks[name].remedy
    assert "PCIe link" not in checks


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("link", "state", "words", "remedy"),
    [
        (hardware.PcieLink(5, 5, 16, 16), "ok", "generation 5 of 5, 16 of 16 lanes: 63 GB/s each way", ""),
        (hardware.PcieLink(1, 5, 16, 16), "ok", "generation 1 of 5", "An idle GPU"),
        (hardware.PcieLink(4, 4, 8, 16), "warn", "8 of 16 lanes: 16 GB/s", "Copies are as slow as that."),
        (None, "ok", "unknown", ""),
    ],
)
def test_doctor_pcie_link_is_judged(
    link: hardware.PcieLink | None,
    state: str,
    words: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(hardware, "pcie_links", lambda: {"other": hardware.PcieLink(1, 5, 1, 16)} | {"here": link})
    check = found(tmp_path)["PCIe link"]
    assert check.state == state
    assert words in check.found
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) is bool(remedy)
