"""The command `megatier`: finds the subcommand, and turns every error of ours into one message and an exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Sequence

from megatier.errors import MegatierError

GROUPS = {
    "before a run": {
        "doctor": "say what this machine has, what is missing, and what to do about it",
        "bench": "measure this machine: drives, links between RAM and GPU, processors",
        "plan": "say whether a run fits, how fast it will be, and what would help",
        "config": "show all settings of a run, and where each comes from",
        "convert": "make a config from one of MegaTrain or DeepSpeed",
        "verify": "show on this machine that where the state lies changes no bit of the result",
    },
    "a run": {
        "train": "train a model as a YAML file says",
        "resume": "go on with a run that was stopped or killed",
        "export": "write the model of a checkpoint as a Hugging Face folder",
    },
    "after a run": {
        "report": "write what a run did as one HTML page",
        "trace": "draw one step of a run: what moved and computed when, and what waited",
        "clean": "list, and remove, the block files that killed runs left on drives",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 1
"""Nobody reads the output any more; rich ends a process so, too. `train` and `resume` go on: see `train.outlet`."""


OUT_OF_MEMORY = (
    "memory beside the tiers' budgets ran out, which activations need. Lower tiers.gpu (on a CPU tiers.ram), "
    "model.saved_share or data.sequence_length, raise train.slices or train.groups, or set train.activations to "
    "offload."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 a check failed, 2 an error, 130 interrupted.

    Args:
        argv: words after the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        code = _run([word for word in words if word != "--debug"])
        print(end="", flush=True)  # that the reader is gone shows here, not while Python exits
    except MegatierError as error:
        if debug:
            raise
        print(f"megatier: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        if debug:
            raise
        print("megatier: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except RuntimeError as error:  # torch's, which is not loaded here
        if debug or not (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)):
            raise
        print(f"megatier: error: {OUT_OF_MEMORY} ({str(error).splitlines()[0][:200]})", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return code


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"megatier {_version()}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        print(f"megatier: error: no command {command!r}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return EXIT_ERROR
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):  # a job that is ended cleans up, as on Ctrl-C
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, signal.default_int_handler)
    # Imported here, so that --help is fast and doctor runs where something else is broken.
    return int(importlib.import_module(f"megatier.cli.{command}").run(rest))


def _version() -> str:
    try:
        return importlib.metadata.version("megatier")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from its source


def usage() -> str:
    """The help of the whole program."""
    lines: list[str] = []
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:8} {text}" for name, text in commands.items())]
    return "\n".join(
        [
            "usage: megatier COMMAND ...",
            "",
            "Train models larger than RAM on one GPU, at full precision.",
            *lines,
            "",
            "`megatier COMMAND --help` tells more. With any command --debug shows the traceback of an error.",
            "`megatier --version` prints the version.",
            "",
            "to begin with:",
            "  megatier doctor",
            "  megatier train examples/quickstart.yaml",
        ]
    )
