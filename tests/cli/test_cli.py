from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from megatier import cli
from megatier.cli import main
from megatier.config.schema import RunConfig
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
    assert "Try in this order: raise train.slices;" in capsys.readouterr().err


def test_train_interrupted_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: RunConfig, console: Console, given: frozenset[str]) -> None:
        raise KeyboardInterrupt

    put_module(monkeypatch, "megatier.train.trainer", train=train)
    assert main(["train", *LEAST]) == 130
    assert capsys.readouterr().err == "megatier: interrupted.\n"


@pytest.mark.parametrize("agrees", [True, False])
def test_verify_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool) -> None:
    seen: list[tuple[str, Path]] = []

    def verify(
        device: str, directory: Path, console: Console, *, is_quick: bool, optimizer: str, products: str
    ) -> bool:
        assert directory.is_dir()
        assert (is_quick, optimizer, products) == (False, "adamw", "bf16")
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


def test_train_without_a_config_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "needs a config, such as `megatier train examples/quickstart.yaml`" in capsys.readouterr().err


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

    monkeypatch.setattr("megatier.cli._dispatch", refused)
    assert main(["doctor"]) == 2
    assert "the system starts no more threads. Raise the limit (ulimit -u" in capsys.readouterr().err


def test_command_without_docstrings_is_refused_by_name() -> None:
    words = [sys.executable, "-OO", "-m", "megatier", "plan", "run.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    expected = "megatier: error: transformers needs docstrings. Unset PYTHONOPTIMIZE, or run python without -OO.\n"
    assert (done.returncode, done.stderr) == (2, expected)
