"""Kill real runs at chosen points, let them go on, and say what each came to. A process of its own, not a test.

    python killed_runs.py FOLDER SEED COUNT [savepoints | adapters]

The process loads torch once, and each run is a fork of it. A run is killed by SIGKILL at its n-th call of a function of
megatier's: during start-up, a step, a checkpoint, the end. It goes on with other tiers; with savepoints, on the same.
With adapters the base is a folder, which no run writes to. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import zarr  # noqa: F401 - loaded before the forks
from small_commands import MODEL, command, metrics
from transformers import AutoConfig, AutoModelForCausalLM

import megatier
from megatier.adapters.lora import add_adapters
from megatier.cli import main, train  # noqa: F401 - loaded before the forks
from megatier.config.lora import LoraConfig
from megatier.models.decoder import build_skeleton
from megatier.models.weight_conversion import hub_layout
from megatier.train import trainer  # noqa: F401 - loaded before the forks

OURS = str(Path(megatier.__file__).parent)
SETTINGS: dict[str, Any] = {
    "model.config.attention_dropout": 0.1,
    "output.checkpoint_every": 2,
    "output.export_dtype": "fp32",
    "train.steps": 6,
}
TIERS: list[dict[str, Any]] = [
    {"tiers.state": "nvme", "tiers.gpu": "512KiB"},
    {"tiers.state": "ram", "tiers.gpu": "512KiB"},
    {"tiers.state": "gpu", "tiers.gpu": "4MiB"},
    {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "640KiB"},
]
SAVEPOINTS: dict[str, Any] = {
    **SETTINGS,
    "model.config.num_hidden_layers": 6,
    "output.checkpoint_every": 3,
    "output.savepoint_every": 1,
    "train.clip": 1.65,  # some steps clip, most do not
    "train.learning_rate": 1e-3,
}
TIERS_OF_SAVEPOINTS: list[dict[str, Any]] = [
    {"tiers.state": "nvme", "tiers.gpu": "512KiB", "tiers.generations": 2},
    {"tiers.state": "nvme", "tiers.gpu": "512KiB", "tiers.generations": 3},
    {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "360KiB", "tiers.ram": "800KiB", "tiers.generations": 2},
    {"tiers.state": "gpu,ram,nvme", "tiers.gpu": "360KiB", "tiers.ram": "1040KiB", "tiers.generations": 3},
]
# The adapters of a layer take 32,768 elements of each plane that is updated.
ADAPTERS: dict[str, Any] = {
    "model.lora.rank": 4,
    "model.lora.dropout": 0.1,
    "output.checkpoint_every": 2,
    "train.steps": 6,
}
TIERS_OF_ADAPTERS: list[dict[str, Any]] = [
    {"tiers.state": "nvme", "tiers.gpu": "768KiB"},
    {"tiers.state": "gpu", "tiers.gpu": "8MiB"},
    {"tiers.state": "ram,nvme", "tiers.gpu": "768KiB", "tiers.ram": "2600KiB"},
]
KINDS = {
    "": (SETTINGS, TIERS),
    "savepoints": (SAVEPOINTS, TIERS_OF_SAVEPOINTS),
    "adapters": (ADAPTERS, TIERS_OF_ADAPTERS),
}
"""What is shared by all runs of a kind, and the tiers that they choose from."""


def load_before_forks() -> None:
    """What transformers loads and compiles at the first model and the first export, a third of a small run."""
    model = build_skeleton(AutoConfig.for_model(**MODEL), "sdpa")
    hub_layout(model, dict(model.named_parameters()))


def write_base(folder: Path) -> None:
    """A model in a folder, for adapters; PEFT is loaded before the forks as well."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL, dtype="bfloat16"))
    model.save_pretrained(folder)
    add_adapters(build_skeleton(AutoConfig.for_model(**MODEL), "sdpa"), LoraConfig(rank=4), "base")


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of the bytes of files."""
    digest = hashlib.blake2b()
    for path in (path for path in paths if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def forked(work: Callable[[], int]) -> int:
    """Exit code of some work in a process of its own; negative: the signal that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_at(call: int, count: Path | None = None) -> Callable[[], None]:
    """Count calls of our functions from now on, in this thread and in those that write checkpoints.

    Args:
        call: ends the process.
        count: a file that the sum goes to.
    """
    calls = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and is_counted():
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    def is_counted() -> bool:
        thread = threading.current_thread()
        return thread is threading.main_thread() or thread.name.startswith("megatier-checkpoint")

    def stop() -> None:
        threading.setprofile(None)
        sys.setprofile(None)
        if count is not None:
            count.write_text(str(calls))

    threading.setprofile(look)
    sys.setprofile(look)
    return stop


def run(folder: Path, tiers: dict[str, Any], call: int, count: Path | None = None) -> int:
    """Start a run and kill it at a call; -1: never."""

    def work() -> int:
        words = command(folder, {**tiers, "tiers.nvme": f"{folder / 'drive'}:64MiB"})
        stop = kill_at(call, count)
        try:
            return main(words)
        finally:
            stop()

    folder.mkdir(exist_ok=True)
    (folder / "drive").mkdir(exist_ok=True)
    return forked(work)


def go_on(folder: Path, tiers: dict[str, Any]) -> int:
    """Resume on other tiers; where the kill came before there was a run, start it."""
    if not (folder / "run" / "config.yaml").exists():
        return run(folder, tiers, -1)
    words = [f"--{name}={value}" for name, value in tiers.items() if name.startswith("tiers.")]
    return forked(lambda: main(["resume", str(folder / "run"), *words]))


def outcome(folder: Path) -> dict[str, Any]:
    """What a whole run left: digests of the export and the last checkpoint, and the losses."""
    root = folder / "run"
    exported = sorted((root / "model").glob("*.safetensors"))
    return {
        "digest": digest_of([*exported, *sorted((root / "checkpoints" / "step-00000006").glob("*/*/c/**/*"))]),
        "losses": [(record["step"], record["loss"]) for record in metrics(folder) if "loss" in record],
        "checkpoints": sorted(path.name for path in (root / "checkpoints").iterdir()),
        "run": sorted(path.name for path in root.iterdir()),
    }


def left_on_drive(folder: Path) -> list[str]:
    """What is on the mount in the end."""
    return sorted(path.name for path in (folder / "drive").iterdir())


def calls_of(folder: Path, tiers: dict[str, Any]) -> int:
    """Calls of a run that nobody stops."""
    assert run(folder, tiers, -1, folder.with_suffix(".calls")) == 0
    return int(folder.with_suffix(".calls").read_text())


def main_program(folder: Path, seed: int, count: int, kind: str) -> dict[str, Any]:
    """The uninterrupted run, and each killed one."""
    draw = random.Random(seed)
    shared, tiers = KINDS[kind]
    base = folder / "base"
    if kind == "adapters":
        write_base(base)
        shared = {**shared, "model.path": str(base)}
    before_runs = digest_of(sorted(base.glob("*")))
    places = [{**shared, **each} for each in tiers]
    # Only those are counted from which a run is killed. What nobody stopped is the first.
    calls = {0: calls_of(folder / "whole0", places[0])}
    found = []
    for number in range(count):
        start = draw.randrange(len(places))
        before, after = places[start], places[start] if kind == "savepoints" else draw.choice(places)
        if start not in calls:
            calls[start] = calls_of(folder / f"whole{start}", places[start])
        # Spread evenly over the run, at a random place of each part.
        call = 1 + int((number + draw.random()) * calls[start] / count)
        place = folder / str(number)
        # It had fewer calls, since waiting threads make them vary, or all was done.
        while (killed := run(place, before, call)) == 0 or (place / "run" / "model").exists():
            shutil.rmtree(place)
            call = call * 9 // 10
        resumed = go_on(place, after)
        told = {"call": call, "killed": killed, "resumed": resumed, "left": left_on_drive(place)}
        told["went_on_with_nvme"] = "nvme" in after["tiers.state"]
        found.append({**told, **(outcome(place) if resumed == 0 else {})})
    assert digest_of(sorted(base.glob("*"))) == before_runs
    return {"whole": outcome(folder / "whole0"), "calls": calls, "runs": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    load_before_forks()
    outcomes = main_program(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
    sys.stdout.write(json.dumps(outcomes))
