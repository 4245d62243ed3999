from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatier import cli, hardware
from megatier.cli import doctor, main
from megatier.config.schema import RunConfig
from megatier.config.values import MountBudget
from megatier.errors import DataError

ROOT = Path(__file__).parents[2]
LEAST = ["--data.files=python-stdlib", "--data.tokenizer", "bytes", "--model.config.model_type", "llama"]


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_main_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert "example" in text


def test_main_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.2.3")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "megatier 1.2.3\n"


def test_main_as_a_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "megatier", "trainn"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "megatier: error: no command 'trainn'. Did you mean train?\n"


def test_main_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainn"]) == main(["serve"]) == 2
    there = ", ".join(cli.COMMANDS)
    assert capsys.readouterr().err == (
        f"megatier: error: no command 'trainn'. Did you mean train?\n"
        f"megatier: error: no command 'serve'. There are {there}.\n"
    )


def test_train_help_shows_each_setting_without_torch() -> None:
    code = "import sys; from megatier.cli import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--tiers.ram  SIZE  (null)" in done.stdout
    assert "--train.steps  N  (1000)\n      Optimizer steps, at least 1." in done.stdout
    assert "--train.activations  keep | recompute | offload  (keep)\n" in done.stdout
    assert "--output.checkpoint_every  N | auto  (auto)\n" in done.stdout


def test_train_bad_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *LEAST, "--train.stesp", "3"]) == 2
    error = capsys.readouterr().err
    assert error == "megatier: error: unknown setting train.stesp; did you mean train.steps?\n"


def test_train_missing_file_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_train_hands_the_config_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[RunConfig] = []
    kept: list[frozenset[str]] = []

    def train(config: RunConfig, console: Console, given: frozenset[str]) -> None:
        seen.append(config)
        kept.append(given)

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}")
    assert main(["train", str(path), *LEAST, "--train.batch", "4"]) == 0
    assert (seen[0].train.steps, seen[0].train.batch) == (3, 4)
    assert {"train.steps", "train.batch"} <= kept[0]
    assert "train.groups" not in kept[0]


def test_train_our_error_shows_no_traceback_unless_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: RunConfig, console: Console, given: frozenset[str]) -> None:
        raise DataError("no text")

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    assert main(["train", *LEAST]) == 2
    assert capsys.readouterr().err == "megatier: error: no text\n"
    with pytest.raises(DataError):
        main(["train", "--debug", *LEAST])


@pytest.mark.parametrize("says", ["DefaultCPUAllocator: can't allocate memory", "something else"])
def test_train_out_of_memory_is_one_message_and_other_errors_are_not(
    says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: RunConfig, console: Console, given: frozenset[str]) -> None:
        raise RuntimeError(says)

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    if "memory" not in says:
        with pytest.raises(RuntimeError, match=says):
            main(["train", *LEAST])
        return
    assert main(["train", *LEAST]) == 2
    assert "raise train.slices or train.groups" in capsys.readouterr().err


def test_train_interrupted_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: RunConfig, console: Console, given: frozenset[str]) -> None:
        raise KeyboardInterrupt

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    assert main(["train", *LEAST]) == 130
    assert capsys.readouterr().err == "megatier: interrupted.\n"


@pytest.mark.parametrize("agrees", [True, False])
def test_verify_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool) -> None:
    seen: list[tuple[str, Path]] = []

    def verify(device: str, directory: Path, console: Console, *, is_quick: bool, optimizer: str) -> bool:
        assert directory.is_dir()
        assert (is_quick, optimizer) == (False, "adamw")
        seen.append((device, directory))
        return agrees

    put_module(monkeypatch, "megatier.train.verify", verify=verify)
    assert main(["verify"]) == main(["verify", "--device", "cpu", "--directory", str(tmp_path)]) == (not agrees)
    assert seen[0][0] == "auto"
    assert not seen[0][1].exists()
    assert seen[1] == ("cpu", tmp_path)


def test_verify_unknown_device_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--device", "tpu"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


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


def test_plan_takes_nothing_down_before_its_process_ends() -> None:
    code = "import atexit; from megatier.cli import main; atexit.register(lambda: print('taken down')); main()"
    for words, lasts in (["--version"], True), (["plan", "/nowhere.yaml"], False):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert ("taken down" in done.stdout) == lasts
        assert done.returncode == (0 if lasts else 2)
        assert bool(done.stderr) != lasts


SHOWS_LOADED = """
import atexit, sys
from megatier import hardware
from megatier.cli import main
hardware.CUDA_DRIVER = "libnone.so"  # as where there is no GPU
names = ("torch", "transformers", "zarr", "datasets")
atexit.register(lambda: print([name for name in names if name in sys.modules], file=sys.stderr))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        *([name, "--help"] for name in cli.COMMANDS),
        ["config", "show", "examples/quickstart.yaml"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_command_loads_no_library_that_it_does_without(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOWS_LOADED, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "--directory", "none"], "--directory: none is not a directory. Create it"),
        (["export", "none", "out"], "none is no checkpoint and holds none. Name a run directory"),
        (["export", "run", "out"], "run holds no checkpoint, but its model is in run/model already"),
        (["export", "adapter", "out"], "`megatier export adapter FOLDER --merge` merges them into their base"),
        (["export", "plain", "out", "--merge"], "plain is a model already, which from_pretrained loads as it is"),
    ],
)
def test_command_on_what_is_not_there_is_refused_at_once(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("run/model/config.json", "adapter/adapter_config.json", "plain/config.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert main(words) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""


def test_resume_of_a_finished_run_is_refused_before_any_library_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text((ROOT / "examples" / "quickstart.yaml").read_text())
    words = [sys.executable, "-c", SHOWS_LOADED, "resume", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "holds a finished run: model is there" in done.stderr
    assert done.stderr.endswith("\n[]\n")
    assert done.stdout == ""


@pytest.mark.parametrize("limit", [None, 65536])
def test_doctor_memlock_limit_is_told(limit: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "memlock_limit_bytes", lambda: limit)
    assert found(tmp_path)["memlock"].found.startswith("no limit" if limit is None else "64.0 KiB")


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


def test_train_without_a_config_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "give a config: `megatier train run.yaml`" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "train"])
def test_help_of_each_command_fits_a_terminal_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"usage: megatier {command} ")
    assert f"example: megatier {command} " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output.directory", "x" * 5000], "File name too long. Name a shorter path."),
        (["--tiers.nvme", "/" + "x" * 300], "File name too long. Name a shorter path."),
        (["--tiers.nvme", "/tmp/\udcff:1GiB"], "is no text in UTF-8 without NULs"),
        (["--output.directory", "a\0b"], "is no text in UTF-8 without NULs"),
    ],
    ids=["directory", "mount", "bytes", "nul"],
)
def test_train_with_a_path_that_the_system_refuses_says_so_without_a_traceback(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    settings = ["--model.config.model_type", "llama", "--data.files", "a.txt", "--data.tokenizer", "bytes"]
    assert main(["train", *settings, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error) < 1000


def test_command_in_a_working_directory_that_is_gone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor"]) == 2
    assert "the working directory is gone" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)


def test_command_whose_threads_the_system_refuses_says_which_limit_to_raise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: Sequence[str]) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("megatier.cli._run", refused)
    assert main(["doctor"]) == 2
    assert "the system starts no more threads. Raise the limit (ulimit -u" in capsys.readouterr().err


def test_command_without_docstrings_is_refused_by_name() -> None:
    words = [sys.executable, "-OO", "-m", "megatier", "plan", "run.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    expected = "megatier: error: transformers needs docstrings. Unset PYTHONOPTIMIZE, or run python without -OO.\n"
    assert (done.returncode, done.stderr) == (2, expected)
