from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from megatier.checkpoint.run_directory import (
    CONFIG_FILE,
    DATA_FOLDER,
    METRICS_FILE,
    RUN_ID_FILE,
    RunDirectory,
    check_can_resume,
    check_is_run,
)
from megatier.config.data_section import DataConfig
from megatier.config.file import load
from megatier.config.output_section import OutputConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.errors import ConfigError, RunLockedError
from megatier.private import lock_directory


def config_in(directory: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(config={"model_type": "llama", "hidden_size": 64}),
        data=DataConfig(files=("python-stdlib",), tokenizer="bytes"),
        output=OutputConfig(directory=str(directory)),
    )


def test_run_directory_new_holds_the_resolved_config(tmp_path: Path) -> None:
    config = config_in(tmp_path / "deep" / "run")
    with RunDirectory(config) as directory:
        assert load(directory.path / CONFIG_FILE) == config


def test_run_directory_of_names_like_numbers_holds_a_config_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model.path=m", "--model.frozen=2e-5", "--data.dataset=d", "--data.revision=2e10"]
    config = load(None, [*words, "--output.directory=2e-5"])
    with RunDirectory(config) as directory:
        assert load(directory.path / CONFIG_FILE) == config


def test_run_directory_entered_twice_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    with RunDirectory(config):
        with pytest.raises(RunLockedError):
            RunDirectory(config)
        assert (tmp_path / "run" / CONFIG_FILE).exists()
    (tmp_path / "run" / CONFIG_FILE).unlink()
    with RunDirectory(config):
        pass


@pytest.mark.parametrize("name", [CONFIG_FILE, METRICS_FILE, DATA_FOLDER, "model"])
def test_run_directory_with_a_run_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds a run already .{name}"):
        RunDirectory(config_in(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("names", [["checkpoints"], ["model"], ["data", "savepoints"]])
def test_run_directory_with_empty_folders_alone_says_that_they_may_be_removed(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"a run would write to \({', '.join(names)}\)\. It is empty: remove it"):
        RunDirectory(config_in(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == names

    (tmp_path / names[-1] / "mine").touch()
    with pytest.raises(ConfigError, match="holds a run already"):
        RunDirectory(config_in(tmp_path))


def test_run_directory_of_a_run_that_could_go_on_says_how(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).touch()
    with pytest.raises(ConfigError, match=f"go on with it .`megatier resume {tmp_path}`., name another"):
        RunDirectory(config_in(tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="Nothing was changed; name another"):
        RunDirectory(config_in(tmp_path))


def test_run_directory_refused_before_the_first_step_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KeyError), RunDirectory(config_in(tmp_path)) as directory:
        (directory.path / DATA_FOLDER).mkdir()
        (directory.path / DATA_FOLDER / "train.tokens").write_bytes(b"12")
        assert directory.run_id
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(KeyError), RunDirectory(config_in(tmp_path / "run")):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_run_directory_refused_later_keeps_the_record(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunDirectory(config_in(tmp_path)) as directory:
        (directory.path / METRICS_FILE).write_text("{}\n")
        raise KeyError
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, METRICS_FILE}


@pytest.mark.parametrize("began", [False, True])
def test_run_directory_on_a_drive_turned_read_only_keeps_the_error_and_lets_go(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(KeyError), monkeypatch.context() as context, RunDirectory(config_in(tmp_path)) as directory:
        if began:
            (directory.path / METRICS_FILE).write_text("{}\n")
        context.setattr(Path, "unlink", unlink)
        raise KeyError
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, "lock", *([METRICS_FILE] if began else [])}
    os.close(lock_directory(tmp_path))  # nobody holds it


@pytest.mark.parametrize(
    ("made", "words", "said"),
    [
        (["model"], [], "holds a finished run: model is there. It has no checkpoint to go on from"),
        (["model", "checkpoints/step-00000002"], [], "To train on, move that folder away"),
        (["checkpoints/step-00000003"], ["--train.steps=2"], "goes on from step 3, and train.steps is 2: nothing is"),
        (["savepoints/step-00000003"], ["--train.steps=3", "--output.export=false"], "nothing is left to do"),
        (["checkpoints/step-00000003"], ["--train.epochs=2"], "train.epochs is 2, but the steps of"),
    ],
)
def test_run_that_is_over_does_not_go_on(made: list[str], words: list[str], said: str, tmp_path: Path) -> None:
    for name in made:
        (tmp_path / name).mkdir(parents=True)
    config = load(None, ["--model.path=m", "--data.files=f", *words])
    with pytest.raises(ConfigError, match=said):
        check_can_resume(tmp_path, config)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([], ["--train.epochs=2"]),
        (["checkpoints/step-00000003", "savepoints/step-00000002"], ["--train.steps=3"]),  # its export is to do
        (["model", "checkpoints/step-00000003"], ["--train.steps=4", "--output.export=false"]),
        (["checkpoints/.step-00000009.partial"], ["--train.steps=4"]),
    ],
)
def test_run_that_has_something_left_to_do_goes_on(made: list[str], words: list[str], tmp_path: Path) -> None:
    for name in made:
        (tmp_path / name).mkdir(parents=True)
    check_can_resume(tmp_path, load(None, ["--model.path=m", "--data.files=f", *words]))


def test_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*none. Give the output.directory"):
        check_is_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"holds no run to go on with: config.yaml is missing"):
        check_is_run(tmp_path)


def run_id(directory: Path, *, resumes: bool = True) -> str:
    with RunDirectory(config_in(directory), resumes=resumes) as run:
        assert run.run_id == run.run_id
        return run.run_id


def test_run_id_is_random_and_the_same_when_the_run_goes_on(tmp_path: Path) -> None:
    first = run_id(tmp_path / "a", resumes=False)
    assert re.fullmatch(r"[0-9a-f]{12}", first)
    assert run_id(tmp_path / "b", resumes=False) != first
    assert run_id(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "c")
    assert run_id(tmp_path / "c") == first
    shutil.rmtree(tmp_path / "c")
    assert run_id(tmp_path / "c", resumes=False) != first, "nobody can know it beforehand"


def test_run_id_of_a_copied_run_is_another(tmp_path: Path) -> None:
    first = run_id(tmp_path / "a", resumes=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert run_id(tmp_path / "b") != first
    assert run_id(tmp_path / "a") == first


@pytest.mark.parametrize("text", ["", "../../../../home 1\n", "0123456789ab\n", "0123456789ab x\n", "é"])
def test_run_id_that_no_run_wrote_leads_nowhere(text: str, tmp_path: Path) -> None:
    first = run_id(tmp_path / "a", resumes=False)
    (tmp_path / "a" / RUN_ID_FILE).write_text(text)
    assert re.fullmatch(r"[0-9a-f]{12}", second := run_id(tmp_path / "a"))
    assert second != first


def test_run_id_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    run_id(tmp_path / "a", resumes=False)
    (tmp_path / "a" / RUN_ID_FILE).unlink()
    os.mkfifo(tmp_path / "a" / RUN_ID_FILE)
    with pytest.raises(ConfigError, match=f"{RUN_ID_FILE}: it is no regular file"):
        run_id(tmp_path / "a")
