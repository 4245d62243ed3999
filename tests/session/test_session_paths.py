"""The files and folders that a config names: those that are not there are refused before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BASE = ["--data.tokenizer", "bytes", "--train.steps", "1"]
SCRATCH = ["--model.config.model_type", "llama"]


def train(folder: Path, *words: str) -> tuple[str, str]:
    """What `megatier train` prints on both outputs when it is refused without torch."""
    code = "import sys; from megatier.cli import main; sys.exit(main(sys.argv[1:]) + ('torch' in sys.modules))"
    command = [sys.executable, "-c", code, "train", *BASE, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done
    return done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "gguf").mkdir()
    for name in ("file", "model.gguf", "gguf/model-00001.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SCRATCH, "--data.files", "none"], "data.files: none matches no file or folder."),
        ([*SCRATCH, "--data.files", "text.txt", "--tiers.nvme", "none"], "tiers.nvme: none is not a directory."),
        ([*SCRATCH, "--data.files", "text.txt", "--tiers.nvme", ".:9000TiB"], "tiers.nvme gives . 9000.0 TiB, but its"),
        ([*SCRATCH, "--data.files", "text.txt", "--output.directory", "file"], "is file, but file is a file. Name ano"),
        ([*SCRATCH, "--data.files", "text.txt", "--output.directory", "file/a/b"], "is file/a/b, but file is a file."),
        (
            [*SCRATCH, "--data.files", "text.txt", "--output.directory", "run"],
            "run holds a run already (metrics.jsonl)",
        ),
        (["--data.files", "text.txt", "--model.path", "./none"], "no such model folder: ./none."),
        (["--data.files", "text.txt", "--model.path", "empty"], "model.path: empty is empty, so it is no Hugging"),
        (["--data.files", "text.txt", "--model.path", "run"], "model.path: run has no config.json, so it is no"),
        (["--data.files", "text.txt", "--model.path", "file"], "model.path: file is a file, so it is no Hugging"),
        (["--data.files", "text.txt", "--model.path", "gguf"], "model.path: gguf is in GGUF, a format for inference"),
        (["--data.files", "text.txt", "--model.path", "model.gguf"], "model.path: model.gguf is in GGUF"),
    ],
)
def test_train_with_a_path_that_cannot_be_used_is_refused_before_torch_is_loaded(
    words: list[str], said: str, folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    output, error = train(folder, *words)
    assert said in error
    assert error.count("\n") == 1
    assert output.endswith(": loading PyTorch and transformers\n")
    assert sorted(folder.rglob("*")) == before
