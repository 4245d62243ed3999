"""`megatier trace`: from a run directory, or a trace, to a picture and a table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatier.cli import main
from megatier.trace.events import TraceEvent, write_trace

MS = 1_000_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with steps 4 and 5."""
    directory = tmp_path / "run"
    directory.mkdir()
    steps = [
        (
            step,
            [
                TraceEvent(lane="stall", name="a", start_ns=0, end_ns=step * 10 * MS, cause="update"),
                TraceEvent(lane="stall", name="a", start_ns=step * 10 * MS, end_ns=step * 15 * MS, cause="nvme_to_ram"),
                TraceEvent(lane="compute", name="a forward 0", start_ns=step * 15 * MS, end_ns=step * 100 * MS),
            ],
        )
        for step in (4, 5)
    ]
    write_trace(directory / "trace.json", steps)
    return directory


@pytest.mark.parametrize("name", ["", "trace.json"])
def test_trace_draws_the_last_step_beside_the_trace(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run / name)]) == 0
    assert {path.name for path in run.iterdir()} == {"trace.json", "step-5.svg"}
    root = ElementTree.parse(run / "step-5.svg").getroot()
    assert root[0].text == "run, step 5"
    assert f"picture written to {run / 'step-5.svg'}\n" in capsys.readouterr().out


def test_trace_prints_busy_time_and_stalls_longest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--step", "4"]) == 0
    lines = [line.replace("│", "").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert lines == [
        ["compute", "340", "ms", "85.0", "%"],
        ["compute", "alone", "340", "ms", "85.0", "%"],
        ["stall:", "update", "40", "ms", "10.0", "%"],
        ["stall:", "nvme_to_ram", "20", "ms", "5.0", "%"],
        ["host", "0", "ms", "0.0", "%"],
    ]


def test_trace_writes_where_it_is_told(run: Path, tmp_path: Path) -> None:
    assert main(["trace", str(run), "--step", "4", "--output", str(tmp_path / "a.svg")]) == 0
    assert ElementTree.parse(tmp_path / "a.svg").getroot()[0].text == "run, step 4"
    assert not (run / "step-4.svg").exists()


def test_trace_hostile_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        TraceEvent(lane="[/x]<b>", name="a", start_ns=0, end_ns=MS),
        TraceEvent(lane="stall", name="a", start_ns=0, end_ns=MS, cause="[bold]&"),
    ]
    write_trace(tmp_path / "trace.json", [(1, events)])
    assert main(["trace", str(tmp_path)]) == 0
    assert "[/x]<b>" in (text := capsys.readouterr().out)
    assert "stall: [bold]&" in text


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that is refused."""
    assert main(["trace", *words]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("megatier: error: ")
    assert error.count("\n") == 1
    return error


def test_trace_no_such_step_names_those_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal([str(run), "--step", "3"], capsys)
    assert "has no step 3; it holds the last steps of the run: 4, 5." in message
    assert {path.name for path in run.iterdir()} == {"trace.json"}


def test_trace_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot read {tmp_path / 'trace.json'}: No such file" in refusal([str(tmp_path)], capsys)
    assert f"cannot read {tmp_path / 'none'}: No such file" in refusal([str(tmp_path / "none")], capsys)


def test_trace_file_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("train: {}")
    assert "config.yaml is no trace of megatier" in refusal([str(tmp_path / "config.yaml")], capsys)


def test_trace_without_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace.json", [])
    assert "holds no step" in refusal([str(tmp_path)], capsys)


def test_trace_output_that_cannot_be_written_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal([str(run), "--output", str(run / "none" / "a.svg")], capsys)
    assert "a.svg: No such file or directory. Name another --output" in message


def test_trace_output_never_overwrites_the_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "trace.json").read_bytes()
    assert "ends in .svg" in refusal([str(run), "--output", str(run / "trace.json")], capsys)
    assert (run / "trace.json").read_bytes() == before


def test_trace_help_shows_without_torch() -> None:
    code = (
        "import atexit, sys; from megatier.cli import main; atexit.register(lambda: print('torch' in sys.modules)); "
        "main(['trace', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--step N" in done.stdout
    assert done.stdout.endswith("False\n")
