"""The file of TieredAdamW's state: what torch would save, in little memory, whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_optimizers import STEPS, TINY, Make, optimizers, parameters_of, placements, same, take_steps
from warm_python import WarmPython

from megatier.errors import TransferError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with optimizers(tmp_path) as make:
        yield make


STREAMED = """
import re, resource, sys, torch
from megatier import TieredAdamW


def limit_memory(more):
    used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (more << 20), resource.RLIM_INFINITY))


path = sys.argv[1] + "/state.pt"
weight = torch.nn.Parameter(torch.zeros(10_000_000))
weight.grad = torch.ones(10_000_000)
with TieredAdamW([weight], ram="2MiB", nvme=[sys.argv[1] + ":128MiB"]) as optimizer:
    optimizer.step()
    limit_memory(30)
    optimizer.save_state(path)
    limit_memory(200)  # a mapping counts
    saved = torch.load(path, mmap=True)
    limit_memory(30)
    optimizer.load_state_dict(saved)
    optimizer.step()
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        print("can't allocate memory" in str(error))
"""


def test_saving_and_loading_need_far_less_memory_than_the_state(tmp_path: Path, python: WarmPython) -> None:
    done = python.run(["-c", STREAMED, tmp_path])
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@placements
def test_file_is_what_torch_would_save(make: Make, tmp_path: Path, ram: str) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = make([("weight", parameters[0]), ("bias", parameters[1])], ram=ram)
    take_steps(optimizer, parameters[:2], range(STEPS))
    optimizer.save_state(tmp_path / "ours.pt")
    optimizer.save_state(tmp_path / "ours.pt")  # replaced
    torch.save(optimizer.state_dict(), tmp_path / "theirs.pt")
    for mmap in (True, False):
        assert same(torch.load(tmp_path / "ours.pt", mmap=mmap), torch.load(tmp_path / "theirs.pt"))
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_file_that_cannot_be_written_is_one_error_and_the_old_one_stays(make: Make, tmp_path: Path) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    with pytest.raises(TransferError, match="No such file"):
        optimizer.save_state(tmp_path / "missing" / "state.pt")


FULL = """
import resource, sys, torch
from megatier import TieredAdamW
from megatier.errors import TransferError
weight = torch.nn.Parameter(torch.zeros(200_000))
with TieredAdamW([weight], ram="64MiB") as optimizer:
    weight.grad = torch.ones(200_000)
    optimizer.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        optimizer.save_state(sys.argv[1] + "/state.pt")
    except TransferError as error:
        print(error)
"""


@pytest.mark.parametrize("limit", [100, 500_000])
def test_state_file_that_finds_no_room_is_one_error_and_leaves_nothing(
    tmp_path: Path, python: WarmPython, limit: int
) -> None:
    done = python.run(["-c", FULL, tmp_path, str(limit)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("writing optimizer state failed in ")
    assert not list(tmp_path.iterdir())
