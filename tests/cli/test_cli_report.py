"""`megatier report`: from a run directory to one page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_commands import command

from megatier.cli import main


def test_report_writes_the_page_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 0
    capsys.readouterr()
    before = {path.name for path in (tmp_path / "run").iterdir()}
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert capsys.readouterr().out == f"report written to {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*before, "report.html"}


def test_report_writes_where_it_is_told(tmp_path: Path) -> None:
    assert main(command(tmp_path)) == 0
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that is refused."""
    capsys.readouterr()
    assert main(["report", *words]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("megatier: error: ")
    assert error.count("\n") == 1
    return error


def test_report_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path} holds no run: config.yaml is missing." in refusal([str(tmp_path)], capsys)
    assert list(tmp_path.iterdir()) == []


def test_report_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 0
    output = tmp_path / "none" / "a.html"
    message = refusal([str(tmp_path / "run"), "--output", str(output)], capsys)
    assert f"cannot write {output}: No such file or directory. Name another --output FILE.html." in message


@pytest.mark.parametrize("words", [["report", "--help"], ["report", "none"], ["trace", "none"]])
def test_report_and_trace_need_no_torch(words: list[str]) -> None:
    code = f"import sys; from megatier.cli import main\ntry: main({words})\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60).returncode == 0
