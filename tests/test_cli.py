from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from megatier import cli
from megatier.cli import doctor, main
from megatier.config import RunConfig
from megatier.errors import DataError

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


def test_main_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainn"]) == 2
    there = ", ".join(cli.COMMANDS)
    assert capsys.readouterr().err == f"megatier: error: no command 'trainn'; there are {there}.\n"


def test_train_help_shows_each_setting_without_torch() -> None:
    code = "import sys; from megatier.cli import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--tiers.ram  (null)" in done.stdout
    assert "--train.steps  (1000)\n      Optimizer steps, at least 1." in done.stdout


def test_train_bad_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *LEAST, "--train.stesp", "3"]) == 2
    error = capsys.readouterr().err
    assert error == "megatier: error: unknown setting train.stesp; did you mean train.steps?\n"


def test_train_missing_file_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the config" in capsys.readouterr().err


def test_train_hands_the_config_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[RunConfig] = []

    def train(config: RunConfig, console: Console) -> None:
        seen.append(config)

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}")
    assert main(["train", str(path), *LEAST, "--train.batch", "4"]) == 0
    assert (seen[0].train.steps, seen[0].train.batch) == (3, 4)


def test_train_our_error_shows_no_traceback_unless_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: RunConfig, console: Console) -> None:
        raise DataError("no text")

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    assert main(["train", *LEAST]) == 2
    assert capsys.readouterr().err == "megatier: error: no text\n"
    with pytest.raises(DataError):
        main(["train", "--debug", *LEAST])


def test_train_interrupted_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: RunConfig, console: Console) -> None:
        raise KeyboardInterrupt

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    assert main(["train", *LEAST]) == 130
    assert capsys.readouterr().err == "megatier: interrupted.\n"


@pytest.mark.parametrize("agrees", [True, False])
def test_verify_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool) -> None:
    seen: list[tuple[str, Path]] = []

    def verify(device: str, directory: Path, console: Console) -> bool:
        assert directory.is_dir()
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


def test_doctor_here_checks_everything_and_leaves_nothing(tmp_path: Path) -> None:
    checks = {check.name: check for check in doctor.checks(tmp_path)}
    assert {"Python", "torch", "transformers", "native module", "cores", "GPU", "kvikio", "RAM", "memlock"} <= set(
        checks
    )
    assert {"huge pages", "file system", "free space", "O_DIRECT"} <= set(checks)
    assert all(check.remedy for check in checks.values() if check.state != "ok")
    assert checks["torch"].state == "ok"
    assert not list(tmp_path.iterdir())


def test_doctor_missing_directory_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nvme", str(tmp_path / "none")]) == 1
    assert "fail" in capsys.readouterr().out


def test_doctor_missing_package_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    checks = {check.name: check for check in doctor.checks(tmp_path)}
    assert (checks["zarr"].state, checks["zarr"].remedy) == ("fail", "pip install zarr")


def test_doctor_without_gpu_leaves_kvikio_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megatier.hardware.gpus", lambda: ())
    checks = {check.name: check for check in doctor.checks(tmp_path)}
    assert checks["kvikio"].found == "not used: no GPU"
