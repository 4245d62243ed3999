"""Workers of a DataLoader in a container whose /dev/shm is small: one error that names it, and no loader that hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_drive import NO_NAMESPACES
from torch.utils.data import DataLoader
from warm_python import WarmPython

from megatier.errors import SharedMemoryError
from megatier.integrations.shared_batches import SharedBatches, naming_shared_memory, sharing

pytest.importorskip("accelerate")

PROGRAM = """
import sys

from small_drive import mount_small_drive

mount_small_drive("/dev/shm", f"size={sys.argv[1]}")

import torch
from transformers import TrainingArguments
from tiny_models import tiny_config
import megatier
from megatier.errors import SharedMemoryError
from megatier.integrations.transformers_trainer import MegatierTrainer
from megatier.models.model_class import auto_class
from megatier.ranks.shared_memory import share_memory
from megatier.ranks.channel import SingleRank

LENGTH = int(sys.argv[2])
model = auto_class(config := tiny_config("llama")).from_config(config)
arguments = TrainingArguments(
    sys.argv[3], per_device_train_batch_size=2, max_steps=1, dataloader_num_workers=1, report_to=[], use_cpu=True,
    disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, dataloader_prefetch_factor=4,
)


def collated(rows):
    # As Hugging Face's collators make them, which do not know that a worker calls them.
    return dict.fromkeys(("input_ids", "labels"), torch.ones(len(rows), LENGTH, dtype=torch.long))


with megatier.stream(model, tiers={"device": "cpu", "ram": "1GiB"}) as streamed:
    rows = [{"input_ids": 0}] * 32
    trainer = MegatierTrainer(
        streamed, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collated
    )
    for call in (trainer.train, trainer.evaluate):
        try:
            call()
        except SharedMemoryError as error:
            print("found:", error)
        else:
            print("found:", "whole")

# What ranks of a host share is a file without a name, which lies in no folder.
print("found:", len(share_memory(SingleRank(), 2 << 20)))
"""


@pytest.mark.parametrize(
    ("size", "length", "words"),
    [
        pytest.param("128k", 8192, "workers of a DataLoader hand their batches over through /dev/shm", id="batches"),
        pytest.param("4k", 8, "which is too small (4.0 KiB, 0 B free). Make it larger", id="locks"),
        pytest.param("1m", 8, "whole", id="enough"),
    ],
)
def test_trainer_with_workers_and_a_small_dev_shm_names_it(
    size: str, length: int, words: str, tmp_path: Path, python: WarmPython
) -> None:
    found = python.run(["-c", PROGRAM, size, str(length), tmp_path], timeout=100)
    if found.returncode == NO_NAMESPACES:
        pytest.skip("this user may make no mount namespaces")
    assert found.returncode == 0, found.stderr[-2000:]
    *lines, shared = [line for line in found.stdout.splitlines() if line.startswith("found:")]
    assert [words in line for line in lines] == [True, True], lines
    assert shared == f"found: {2 << 20}"


def collated(rows: list[int]) -> dict[str, object]:
    return {"x": torch.tensor(rows), "more": [(torch.zeros(0), torch.eye(2)[1])], "names": ["a"]}


def test_batches_of_a_loader_that_shares_them_are_those_of_its_collator() -> None:
    loader: DataLoader[int] = DataLoader([1, 2, 3, 4], batch_size=2, num_workers=1, collate_fn=collated)  # type: ignore[arg-type]
    shared = sharing(sharing(loader))
    assert isinstance(shared.collate_fn, SharedBatches)
    found = list(shared)
    assert [batch["x"].tolist() for batch in found] == [[1, 2], [3, 4]]
    assert found[0]["names"] == ["a"]
    plain: DataLoader[int] = DataLoader([1], collate_fn=collated)  # type: ignore[arg-type]
    assert sharing(plain).collate_fn is collated


@pytest.mark.parametrize(
    ("module", "expected"), [("multiprocessing.synchronize", SharedMemoryError), ("json", OSError)]
)
def test_lock_without_room_is_told_apart_from_a_drive_though_there_is_room_by_now(
    module: str, expected: type[Exception]
) -> None:
    # As Python raises it where it makes the semaphore of a lock: without the name of a file.
    code = "def make():\n    raise OSError(28, 'No space left on device')\n"
    made: dict[str, Any] = {"__name__": module}
    exec(code, made)
    with pytest.raises(expected) as caught, naming_shared_memory():
        made["make"]()
    assert type(caught.value) is expected
