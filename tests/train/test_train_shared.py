"""`megatier train` on several ranks: one directory, one text, one model, and the bytes of one process."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from image_runs import LATE, run_command
from rank_pool import POOL
from ranked_runs import figures, sizes, train_in, write_run
from small_commands import files_of, outcome

from megatier.cli import main
from megatier.setup import machine
from megatier.trace.recorder import Recorder
from megatier.train import step_report
from megatier.train.step_report import StepReports


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@sizes
def test_train_on_ranks_writes_the_files_of_one_process(shared: int, folder: Path) -> None:
    for size in (1, shared):
        POOL.run(train_in, size, folder, ("--train.groups=4", f"--output.directory=run{size}"))

    alone = folder / "run1"
    run = folder / f"run{shared}"
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (alone / model).read_bytes()
    assert figures(run) == figures(alone)
    assert {path.name for path in run.iterdir()} == {path.name for path in alone.iterdir()}


EARLY = (
    *("--train.groups=4", "--train.steps=12", "--train.schedule=constant", "--train.learning_rate=0.5"),
    *("--train.evaluate_every=1", "--train.early_stopping_patience=2", "--output.load_best_model_at_end=true"),
)


@sizes
def test_run_on_ranks_ends_early_and_exports_its_best_model_as_one_process_does(shared: int, folder: Path) -> None:
    for size in (1, shared):
        POOL.run(train_in, size, folder, (*EARLY, f"--output.directory=run{size}"))

    alone = folder / "run1"
    run = folder / f"run{shared}"
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [record["run"] for record in records if "run" in record]
    assert found == ["begins", "early"]
    assert figures(run) == figures(alone)
    assert files_of(run / "model") == files_of(alone / "model")
    assert files_of(run / "checkpoints").keys() == files_of(alone / "checkpoints").keys()


def train_with_a_slow_rank(folder: Path) -> None:
    """Run the config of a folder; the last rank seems to take longest."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "own_seconds", lambda _: 0.5 + rank)
        train_in(folder, ("--train.groups=4",))


def test_train_on_ranks_records_the_slowest_rank_of_each_step(folder: Path) -> None:
    for size, expected in ((4, {"rank": 3, "host": platform.node(), "seconds": 3.5, "least_seconds": 0.5}), (1, None)):
        POOL.run(train_with_a_slow_rank, size, folder)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        found = [record["slowest_rank"] for record in map(json.loads, lines) if "loss" in record]
        assert found == [expected] * 3
        shutil.rmtree(folder / "run")


def test_train_on_ranks_without_groups_computes_a_group_on_each(folder: Path) -> None:
    POOL.run(train_in, 2, folder, ())
    POOL.run(train_in, 1, folder, ("--train.groups=2", "--output.directory=alone"))
    assert figures(folder / "run") == figures(folder / "alone")
    assert "groups: 2" in (folder / "run/config.yaml").read_text()


def train_with_too_much_ram(folder: Path) -> None:
    """Run the config of a folder; the second rank's host has less RAM than the config says."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(machine, "ram_total_bytes", lambda: 1 << 20)
        train_in(folder)


def test_rank_whose_host_has_too_little_ram_is_refused_on_all_ranks(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 0:\n[^$]*tiers\.ram is 96\.0 MiB, but this machine"):
        POOL.run(train_with_too_much_ram, 2, folder)


def test_train_on_ranks_that_cannot_share_the_groups_names_the_numbers_that_can(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"train\.groups is 4, which 3 ranks cannot share equally\. Start 1, 2, 4"):
        POOL.run(train_in, 3, folder, ("--train.groups=4",))


def test_train_on_ranks_with_too_little_ram_says_what_the_host_needs(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"Raise tiers\.ram to at least") as refused:
        POOL.run(train_in, 2, folder, ("--tiers.ram=4MiB",))
    found = re.search(r"Raise tiers\.ram to at least ([\d.]+) (\w+)", str(refused.value))
    assert found is not None
    POOL.run(train_in, 2, folder, (f"--tiers.ram={found[1]}{found[2]}",))


def train_with_an_odd_rank(folder: Path) -> str:
    """Run the config of a folder on this rank; the second one has more memory and moves a byte too many."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        moved = StepReports._moved_bytes
        patch.setattr(step_report, "memory_bytes", lambda *_: {"resident_bytes": 100 + rank, "gpu_bytes": 9 - rank})
        patch.setattr(StepReports, "_moved_bytes", lambda own: moved(own) + Counter({"gpu_to_ram": rank}))
        return train_in(folder)


def test_record_has_the_most_memory_of_any_rank_and_ranks_that_moved_other_bytes_are_named(folder: Path) -> None:
    said = POOL.run(train_with_an_odd_rank, 2, folder)[0]
    assert f"rank 1 on {platform.node()} moved other bytes than demanded: gpu_to_ram" in said
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    found = {(r["resident_bytes"], r["gpu_bytes"]) for r in records if "resident_bytes" in r}
    assert found == {(101, 9)}

    # Bytes are those since the start: a rank whose drive or link is slow shows in its own queues.
    last = [record for record in records if "loss" in record][-1]
    (other,) = last.pop("other_ranks")
    assert (other["rank"], other["host"]) == (1, platform.node())
    assert other["busy_seconds"]["compute"] > 0
    assert other["moved_bytes"]["gpu_to_ram"] % 2 == 1
    for rank in (last, other):
        causes = rank["compute_seconds"], *rank["stall_seconds"].values(), rank["host_seconds"]
        assert min(causes) >= 0
        assert sum(causes) == pytest.approx(rank["seconds"], rel=1e-6)


def test_train_on_ranks_with_images_has_the_bits_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    budgets = {"tiers.gpu": "48MiB", "tiers.ram": "96MiB", "tiers.nvme": None, "tiers.state": "ram"}
    words = run_command(tmp_path, "gemma3", {**budgets, "train.groups": 2}, LATE)
    found = [POOL.run(main, size, [*words, f"--output.directory={tmp_path / str(size)}"]) for size in (1, 2)]
    assert found == [[0], [0, 0]]
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")
