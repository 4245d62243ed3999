"""The command `megatier`. It finds the subcommand, and turns every error of ours into one message and an exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from megatier.errors import LESS_ACTIVATIONS, REMEDIES, MegatierError
from megatier.foreign import printable
from megatier.train.stop import SIGNALS

COMMAND_GROUPS = {
    "before a run": {
        "doctor": "check what this machine has and lacks, and say what to do about it",
        "bench": "measure this machine, for plans: drives, links between RAM and GPU, processors",
        "init": "write a config for your model, your data and this machine",
        "plan": "say whether a run fits, how fast it will be, and what would make it faster",
        "config": "show all settings of a run, and where each comes from",
        "convert": "turn a config of LLaMA-Factory, Axolotl, accelerate, MegaTrain or DeepSpeed into one of megatier",
        "verify": "prove on this machine that results are the same in every bit wherever the state lies",
    },
    "a run": {
        "train": "train a model as a config says",
        "resume": "continue a run that was stopped or killed",
        "export": "write the model of a checkpoint as a Hugging Face folder",
    },
    "after a run": {
        "report": "show what a run did, as one HTML page",
        "trace": "draw one step of a run: what moved and computed when, and when compute waited",
        "clean": "list or remove files that killed runs left on drives",
    },
}
COMMANDS = {name: text for group in COMMAND_GROUPS.values() for name, text in group.items()}

ENDS_AT_ONCE = "plan"
"""The command that loads much and leaves nothing open: no threads, no files, nothing on a GPU."""

MESSAGE_CHARACTERS_MAX = 4000
"""Most characters of an error message. Names that strangers chose are part of messages, and may be long."""
NO_THREAD = "can't start new thread"
OUT_OF_THREADS = (
    "the system starts no more threads. Raise the limit (ulimit -u, or the container's pids.max), or lower "
    "tiers.io_threads and tiers.update_threads."
)
ERRNO_REMEDIES = {
    errno.EACCES: "Check your rights there, or name another path.",
    errno.EPERM: "Check your rights there, or name another path.",
    errno.ENAMETOOLONG: "Name a shorter path.",
    errno.ENOENT: "Something removed it; start the command again.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the system's limit of open files (fs.file-max).",
    errno.ENOMEM: "Free RAM, or lower tiers.ram.",
    errno.EAGAIN: "Raise the limit of processes (ulimit -u), or wait.",
}
"""What to do about errors of the system that no other part names."""
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 1
"""The code if nobody reads the output any more. rich ends a process with the same code. `train` and `resume` do not end
then, but go on (`report.console`)."""
OUT_OF_MEMORY = f"the memory that the tiers' budgets leave for activations ran out. {LESS_ACTIVATIONS}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 a check failed, 2 an error, 130 interrupted.

    Args:
        argv: words after the program's name. None: those of this process, which ends after the command, so signals are
            ignored from then on. Otherwise they do afterwards what they did before.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _run_with_signals(arguments, ends=argv is None)

    # Python would first take down all that libraries have loaded, which takes a fifth of the time of a plan.
    if argv is None and arguments[:1] == [ENDS_AT_ONCE]:
        sys.stderr.flush()
        os._exit(code)
    return code


def _run_with_signals(arguments: Sequence[str], *, ends: bool) -> int:
    """Run one command under handlers of its own; returns the exit code.

    Args:
        arguments: the command and its arguments.
        ends: whether the process ends after the command, so that signals are ignored from then on.
    """
    before = _catch_signals()

    try:
        try:
            return _run_reporting_errors(arguments)
        finally:
            # From here on a signal would break off the clean-up of the command that has just ended.
            _handle(dict.fromkeys(before, _drop))
    except KeyboardInterrupt:
        if "--debug" in arguments:
            raise
        print("megatier: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        # A signal while Python exits would show as a traceback from an exit handler.
        _handle(dict.fromkeys(before, signal.SIG_IGN) if ends else before)


def _run_reporting_errors(arguments: Sequence[str]) -> int:
    """Run one command, and turn every error into a message; returns the exit code."""
    # Looked for by hand, since a parser may be what fails.
    debug = "--debug" in arguments
    try:
        code = _dispatch([each for each in arguments if each != "--debug"])
        # If the reader of the output is gone, this raises here and not while Python exits.
        print(end="", flush=True)
    except MegatierError as error:
        if debug:
            raise
        return _print_error(printable(str(error), MESSAGE_CHARACTERS_MAX))
    except BrokenPipeError:
        # A reader such as `head` has seen enough. Python flushes stdout when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except OSError as error:
        # Whatever the system refuses, nobody needs a traceback to see.
        if debug or error.errno is None:
            raise
        return _print_error(printable(_explain_os_error(error), MESSAGE_CHARACTERS_MAX))
    except RuntimeError as error:
        if not debug and NO_THREAD in str(error):
            return _print_error(OUT_OF_THREADS)

        # torch is not loaded here, so its errors are known by name and text.
        if debug or not (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)):
            raise
        return _print_error(f"{OUT_OF_MEMORY} ({str(error).splitlines()[0][:200]})")

    return code


def _print_error(message: str) -> int:
    """Print an error, and return its exit code."""
    print(f"megatier: error: {message}", file=sys.stderr)
    return EXIT_ERROR


def _explain_os_error(error: OSError) -> str:
    """Return a sentence about what the system refused, and what to do."""
    # Python asks for the working directory without naming it.
    if error.errno == errno.ENOENT and error.filename is None:
        return "the working directory is gone. Change to one that is there."

    # An error that Python raises by itself may have none.
    number = error.errno or 0
    remedy = REMEDIES.get(number) or ERRNO_REMEDIES.get(number, "--debug shows where.")
    place = "the system"
    if error.filename is not None:
        place = printable(str(error.filename), 200)
    return f"{place}: {error.strerror}. {remedy}"


def _dispatch(arguments: Sequence[str]) -> int:
    """Find the command and run it, or print help; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"megatier {_version()}")
        return 0

    command, *rest = arguments
    if command not in COMMANDS:
        # argparse would list all commands, and not say which one was meant.
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(COMMANDS)}."
        return _print_error(f"no command {command!r}. {hint}")

    # transformers builds its models from docstrings, which `python -OO` leaves out.
    if sys.flags.optimize > 1:
        return _print_error("transformers needs docstrings. Unset PYTHONOPTIMIZE, or run python without -OO.")

    # Imported here, so that --help is fast, and doctor runs even if another command cannot be imported.
    module = importlib.import_module(f"megatier.cli.{command}")
    return int(module.run(rest))


Handlers = dict[signal.Signals, Any]


def _catch_signals() -> Handlers:
    """Let signals that end a job do the same as Ctrl-C, so that it cleans up. Signals that are ignored stay ignored.

    Returns:
        The handlers that were there before.
    """
    # Python lets the main thread alone set handlers.
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: Handlers = {}
    for number in SIGNALS:
        # None: a handler that was not set from Python, which could not be put back.
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_IGN, None):
            before[number] = handler
    _handle(dict.fromkeys(before, _interrupt))
    return before


def _handle(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the command in order at the first signal; further ones would break off its clean-up, so they are dropped."""
    _handle({each: _drop for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN})
    raise KeyboardInterrupt


def _drop(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. `SIG_IGN` would not do: Python complains of a signal that came just before it was set."""


def _version() -> str:
    try:
        return importlib.metadata.version("megatier")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from its source


def usage() -> str:
    """Return the help of the whole program."""
    lines: list[str] = []
    for title, commands in COMMAND_GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:8} {text}" for name, text in commands.items())]

    return "\n".join(
        [
            "usage: megatier COMMAND ...",
            "",
            "Train Hugging Face models larger than GPU memory and RAM on one GPU or a few, at full precision.",
            "",
            "to begin with:",
            "  megatier doctor                            checks this machine",
            "  megatier train examples/quickstart.yaml    trains a small model, also without a GPU",
            *lines,
            "",
            "`megatier COMMAND --help` explains a command. --debug shows the traceback of an error, and",
            "`megatier --version` the version. If memory runs out, or a run is slow or hangs, see",
            "docs/troubleshooting.md.",
        ]
    )
