"""What a run prints reaches a reader that takes it, and stops nobody where there is none."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest
from small_commands import command, leftovers, metrics

from megatier.cli import main
from megatier.report.console import NonBlockingStream, run_console
from megatier.report.metrics import MetricsLog


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end that reads, and a stream at the end that writes."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    os.close(reader)


def fill(stream: TextIO) -> int:
    """Bytes that a pipe takes."""
    taken = 0
    os.set_blocking(stream.fileno(), False)
    while True:
        try:
            taken += os.write(stream.fileno(), bytes(1 << 12))
        except BlockingIOError:
            os.set_blocking(stream.fileno(), True)
            return taken


def test_outlet_writes_what_the_reader_takes_in_the_streams_encoding(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    out = NonBlockingStream(stream)
    assert out.write("aä\n") == 3
    assert os.read(reader, 100) == "aä\n".encode()
    assert (out.encoding, out.fileno(), out.isatty()) == ("utf-8", stream.fileno(), False)
    stream.reconfigure(encoding="ascii")  # type: ignore[attr-defined]
    NonBlockingStream(stream).write("aä\n")
    assert os.read(reader, 100) == b"a?\n"


def test_outlet_of_a_full_pipe_drops_and_writes_again_once_it_is_read(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    taken, out = fill(stream), NonBlockingStream(stream)
    out.write("dropped")
    while taken:
        taken -= len(os.read(reader, taken))
    out.write("written")
    assert os.read(reader, 100) == b"written"


def test_outlet_drops_what_a_full_drive_does_not_take() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w", encoding="utf-8") as stream:
        assert NonBlockingStream(stream).write("dropped") == 7


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["closed", "captured"])
def test_run_console_without_a_descriptor_prints_where_python_does(
    stream: TextIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    run_console().print("hello")
    assert stream is None or stream.getvalue() == "hello\n"  # type: ignore[attr-defined]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's end sends SIGTERM."""
    real = MetricsLog.write

    def write(self: MetricsLog, record: Mapping[str, object]) -> None:
        real(self, record)
        if record["step"] == 2 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "write", write)


@pytest.mark.parametrize("reader", ["gone", "full"])
def test_train_whose_reader_is_gone_or_slow_goes_on_and_stops_with_a_checkpoint_when_told(
    reader: str, running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, stream = os.pipe()
    with os.fdopen(stream, "w", encoding="utf-8") as output:
        if reader == "full":
            fill(output)
        else:
            os.close(end)
        monkeypatch.setattr(sys, "stdout", output)
        assert main(command(tmp_path, {"train.steps": 9})) == 0
        monkeypatch.undo()
    if reader == "full":
        os.close(end)
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert list(leftovers(tmp_path)) == []


def test_help_whose_reader_is_gone_ends_quietly() -> None:
    code = "import sys; from megatier.cli import main; sys.exit(main(['train', '--help']))"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
