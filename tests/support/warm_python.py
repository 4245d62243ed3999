"""Python processes for tests, each a fork of one that has loaded torch, transformers and megatier already.

To load them takes longer than most of what tests do in a process of its own. A fork begins as a fresh interpreter does:
with one thread, its own environment, and none of the imports of the tests. It ends as one does, with its exit handlers.

The file is also the program of the process that is forked, which `WarmPython` starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 300.0
MESSAGE_BYTES = 1 << 17
OUTPUT_BYTES = 1 << 20
"""The most that a program may write, since nobody reads before it has ended."""
MEGATIER = str(Path(__file__).parents[2] / "megatier" / "__main__.py")
"""The program `megatier`, as `python -m megatier` runs it."""


class Process:
    """A running fork, as `subprocess.Popen` gives one; what it writes is there once it has ended.

    Attributes:
        returncode: its exit code, or the negative number of the signal that ended it; None before `wait`.
    """

    def __init__(self, channel: socket.socket, request: Mapping[str, Any]) -> None:
        """Have it forked, with a pipe for each of its outputs."""
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair()
        self._answers.settimeout(TIMEOUT_S)
        output, output_written = os.pipe()
        errors, errors_written = os.pipe()
        with theirs:
            socket.send_fds(channel, [json.dumps(request).encode()], [theirs.fileno(), output_written, errors_written])
        for end in (output_written, errors_written):
            os.close(end)
        for end in (output, errors):
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, OUTPUT_BYTES)
        self._lines = self._answers.makefile("r")
        self._output = os.fdopen(output, encoding="utf-8")
        self._errors = os.fdopen(errors, encoding="utf-8")
        self.pid = int(self._lines.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        for file in (self._lines, self._answers, self._output, self._errors):
            file.close()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return Path(f"/proc/{self.pid}").exists()

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Wait for its end and return its exit code; raises TimeoutError."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            self.returncode = int(self._lines.readline())
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, str]:
        """Wait for its end and return what it wrote, to stdout and to stderr."""
        self.wait(timeout)
        return self._output.read(), self._errors.read()


class WarmPython:
    """The process that is forked. It is started when the first fork is asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Take the environment of the process, in which a library may be preloaded."""
        self._environment = dict(environment)
        self._channel: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._channel is not None:
            self._channel.close()
            self._process.wait()

    def start(self, words: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Process:
        """Start a program.

        Args:
            words: a file, or `-c` and its text; then its arguments.
            env: its environment; None: that of the tests.
        """
        if self._channel is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, __file__, str(theirs.fileno())]
            with theirs:
                self._process = subprocess.Popen(command, env=self._environment, pass_fds=[theirs.fileno()])
        request = {
            "words": list(map(str, words)),
            "env": {**(os.environ if env is None else env)},
            "cwd": str(Path.cwd()),
        }
        return Process(self._channel, request)

    def run(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; see `start`."""
        with self.start(words, env) as process:
            output, errors = process.communicate(timeout)
            return subprocess.CompletedProcess(words, process.wait(), output, errors)


# ---------------------------------------------------------------------- the process that is forked


def next_program(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Returns in the forks alone, with the request and the files for its output."""
    waiting = list[int]()
    while True:
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            for process in waiting:
                os.waitpid(process, 0)
            os._exit(0)
        waiting.append(os.fork())
        if not waiting[-1]:
            channel.close()
            answers = files.pop(0)
            if child := os.fork():
                os.write(answers, f"{child}\n".encode())
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.write(answers, f"{code}\n".encode())
                os._exit(0)
            os.close(answers)
            return json.loads(message), files
        for file in files:
            os.close(file)


def load() -> None:
    """What megatier's commands import, and what transformers makes at the first model and the first export."""
    import zarr  # noqa: F401
    from small_commands import MODEL
    from transformers import AutoConfig

    from megatier.cli import resume, train  # noqa: F401
    from megatier.models.decoder import build_skeleton
    from megatier.models.weight_conversion import hub_layout
    from megatier.train import trainer  # noqa: F401

    model = build_skeleton(AutoConfig.for_model(**MODEL), "sdpa")
    hub_layout(model, dict(model.named_parameters()))

    # What is loaded stays. In each fork a collection would go over half a million objects for 0.4 s, and touch the
    # memory that it shares with the others.
    gc.freeze()


def main() -> None:
    """Load everything; in a fork, become the program that was asked for."""
    load()
    faulthandler.enable()
    request, files = next_program(socket.socket(fileno=int(sys.argv[1])))
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)

    sys.argv = request["words"]
    if sys.argv[0] == "-c":
        name, text = "<string>", sys.argv.pop(1)
    else:
        name, text = sys.argv[0], Path(sys.argv[0]).read_text(encoding="utf-8")
    exec(compile(text, name, "exec"), {**vars(sys.modules["__main__"]), "__file__": name})


if __name__ == "__main__":
    main()
