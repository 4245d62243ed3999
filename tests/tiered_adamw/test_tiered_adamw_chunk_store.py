"""The chunks of TieredAdamW on drives: those that fail in a step, and what is left in the end."""

from __future__ import annotations

import errno
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_optimizers import ALL, TINY, Make, give_gradients, optimizers, parameters_of, take_steps
from torch import nn
from warm_python import WarmPython

from megatier.errors import OptimizerError
from megatier.tiered_adamw.torch_optimizer import TieredAdamW


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with optimizers(tmp_path) as make:
        yield make


def test_close_removes_files_and_threads_and_refuses_what_comes_after(make: Make, tmp_path: Path) -> None:
    parameters = parameters_of()
    names = {thread.name for thread in threading.enumerate()}
    with make(parameters, ram=TINY) as optimizer:
        take_steps(optimizer, parameters, range(1))
        assert list(tmp_path.glob("megatier-*/blocks"))
    assert not list(tmp_path.iterdir())
    assert {thread.name for thread in threading.enumerate()} == names
    optimizer.close()
    give_gradients(parameters, 1)
    with pytest.raises(OptimizerError, match="closed"):
        optimizer.step()
    with pytest.raises(OptimizerError, match="closed"):
        optimizer.save_state(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_optimizer_that_nobody_closed_removes_its_files_when_it_goes(tmp_path: Path) -> None:
    parameters = parameters_of()
    optimizer = TieredAdamW(parameters, ram=TINY, nvme=[f"{tmp_path}:8MiB"])
    take_steps(optimizer, parameters, range(1))
    with pytest.warns(ResourceWarning, match=r"A TieredAdamW was dropped without close\(\)"):
        del optimizer
        gc.collect()
    assert not list(tmp_path.iterdir())


FORGOTTEN = """
import os, sys, torch, warnings
from megatier import TieredAdamW
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
weight = torch.nn.Parameter(torch.zeros(100_000))
optimizer = TieredAdamW([weight], ram="100KiB", nvme=[f"{sys.argv[1]}:8MiB"])
weight.grad = torch.ones(100_000)
optimizer.step()
if os.fork() == 0:
    optimizer.close()  # a child leaves its parent's files alone
    os._exit(0)
os.wait()
optimizer.step()
print(len(os.listdir(sys.argv[1])))
"""


def test_process_that_ends_without_close_leaves_nothing(tmp_path: Path, python: WarmPython) -> None:
    done = python.run(["-c", FORGOTTEN, tmp_path])
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("1", "", 0)
    assert not list(tmp_path.iterdir())


FAULTY = """
import json, os, sys, torch
from megatier import TieredAdamW
from megatier.errors import OptimizerError, TransferError

drive, op, code = sys.argv[1:]
weight = torch.nn.Parameter(torch.zeros(200_000))
found = []
with TieredAdamW([weight], ram="100KiB", nvme=[f"{drive}:8MiB"]) as optimizer:
    def step():
        weight.grad = torch.full((200_000,), 0.5)
        optimizer.step()
    step()
    optimizer.save_state(os.path.join(drive, "state.pt"))
    kept = weight.detach().clone()
    os.environ.update(FAULT_OP=op, FAULT_KIND=code, FAULT_PATH="/blocks")
    for attempt in (step, step, lambda: optimizer.save_state(os.path.join(drive, "no.pt"))):
        try:
            attempt()
        except (TransferError, OptimizerError) as error:
            found.append([type(error).__name__, getattr(error, "errno", None), str(error)])
    os.environ["FAULT_OP"] = ""
    optimizer.load_state_dict(torch.load(os.path.join(drive, "state.pt"), mmap=True))
    weight.data.copy_(kept)
    step()
    print(json.dumps([found, weight.detach()[::50_000].tolist()]))
"""


@pytest.mark.parametrize(("op", "code"), [("write", errno.ENOSPC), ("read", errno.EIO), ("read write", errno.ENODEV)])
def test_drive_that_fails_in_a_step_tears_the_state_until_it_is_loaded(
    tmp_path: Path, python: WarmPython, op: str, code: int
) -> None:
    done = python.run(["-c", FAULTY, tmp_path, op, str(code)])
    assert done.returncode == 0, done.stderr
    found, weights = json.loads(done.stdout)
    assert [name for name, _, _ in found] == ["TransferError", "OptimizerError", "OptimizerError"]
    assert found[0][1] == code
    assert "half way" in found[1][2]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]

    weight = nn.Parameter(torch.zeros(200_000))
    expected = TieredAdamW([weight], ram=ALL)
    for _ in range(2):
        weight.grad = torch.full((200_000,), 0.5)
        expected.step()
    assert weights == weight.detach()[::50_000].tolist()
    expected.close()
