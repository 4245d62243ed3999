"""`megatier train` on several ranks: one directory, one text, one model, and the bytes of one process."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from crossed import some
from image_runs import LATE, run_command
from rank_pool import POOL
from rich.console import Console
from small_commands import files_of, outcome

from megatier.checkpoint import chunkfile
from megatier.checkpoint.pace import Pace
from megatier.cli import main
from megatier.config import file
from megatier.config.schema import RunConfig
from megatier.errors import CapacityError, ExportError
from megatier.measure import probe
from megatier.planner.search import Choice, search
from megatier.schedule.rates import Rates, World
from megatier.schedule.sizes import Budgets
from megatier.session.session import Session
from megatier.setup import machine
from megatier.setup.setup import Setup
from megatier.trace.recorder import Recorder
from megatier.train import choices, export, step_report, trainer
from megatier.train.saves import Saves, Say
from megatier.train.step_report import StepReports
from megatier.train.trainer import train

CONFIG = """
model:
  config:
    model_type: llama
    vocab_size: 320
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 64
    bos_token_id: 256
    eos_token_id: 256
    tie_word_embeddings: false
data: {files: [text.txt], tokenizer: bytes, sequence_length: 32, holdout_fraction: 0.1}
train: {steps: 3, batch: 8, learning_rate: 1e-2, warmup_steps: 1, evaluate_batches: 2}
tiers: {device: cpu, gpu: 48MiB, ram: 96MiB, state: [ram], update_threads: 2}
output: {directory: run, checkpoint_every: 0}
"""


def train_in(folder: Path, words: tuple[str, ...] = (), resumes: bool = False) -> str:
    """Run the config of a folder on this rank, or go on with its run; returns what it says."""
    os.chdir(folder)
    path = folder / ("run/config.yaml" if resumes else "run.yaml")
    said = io.StringIO()
    loaded, given = file.load_given(path, words)
    train(loaded, Console(file=said, width=1000), given, resumes=resumes)
    return said.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of a text that says little" for n in range(400)))
    return tmp_path


def figures(run: Path) -> list[tuple[object, object, object]]:
    """Loss, norm and held-out loss of each record."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(r.get("loss"), r.get("grad_norm"), r.get("heldout_loss")) for r in records]
    return [row for row in found if any(row)]


sizes = pytest.mark.parametrize("shared", [2, pytest.param(4, marks=pytest.mark.slow)])


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


# ---------------------------------------------------------------------- choices

RATES = Rates(
    drives=(),
    to_gpu_bytes_per_s=1e10,
    to_ram_bytes_per_s=1e10,
    update_parameters_per_s=1e9,
    memory_bytes_per_s=1e11,
    gpu_update_parameters_per_s=1e10,
    flops_per_s=1e9,
    gather_bytes_per_s=1e9,
    scatter_bytes_per_s=1e9,
    ranks_slowdown=0.5,
)


def train_measured(folder: Path, rates: Rates | None, words: tuple[str, ...], resumes: bool = False) -> tuple[str, Any]:
    """Run the config of a folder on a machine with some rates; return what it says, and the tier budgets it plans with.

    The last rank has the least budgets.
    """
    rank = int(os.environ["RANK"])
    planned = []

    def find(setup: Setup, fixed: frozenset[str]) -> Choice:
        planned.append((setup.budgets, setup.machine.world))
        return search(setup, fixed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "cached_rates", lambda *_: rates)
        patch.setattr(choices, "search", find)
        patch.setattr(machine, "budgets_of", lambda *_: (48 << 20, (96 - rank) << 20))
        return train_in(folder, words, resumes), planned


def test_train_on_ranks_on_a_measured_machine_takes_what_the_first_rank_plans(folder: Path) -> None:
    words = ("--output.checkpoint_every=1", "--output.keep_checkpoints=3", "--model.saved_share=0.5")
    (said, planned), (silent, none) = POOL.run(train_measured, 2, folder, RATES, words)
    assert planned == [(Budgets(48 << 20, 95 << 20, 0), World(2, 1))]
    assert (silent, none) == ("", [])

    # What was chosen stands in the config.
    [line] = [line for line in said.splitlines() if line.startswith("planned, ")]
    chosen = dict(re.findall(r"--(\S+) (\S+)", line))
    assert {"train.groups", "train.slices", "train.activations", "tiers.generations"} <= chosen.keys()
    assert int(chosen["train.groups"]) % 2 == 0
    recorded = yaml.safe_load((folder / "run/config.yaml").read_text())
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        assert str(recorded[section][key]) == value
    records = [json.loads(text) for text in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert all(record["attainment"] > 0 for record in records if "loss" in record)

    # So it goes on with the same numbers in one process, which plans for itself.
    run = folder / "run"
    model = (run / "model/model.safetensors").read_bytes()
    losses = figures(run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / f"checkpoints/step-{3:08d}")
    [(said, [(_, world)])] = POOL.run(train_measured, 1, folder, RATES, (), True)
    assert world == World(1, 1)
    assert re.search(r"^planned, [\d.]+ s a step$", said, re.MULTILINE)
    assert (run / "model/model.safetensors").read_bytes() == model
    assert figures(run) == losses


def test_train_on_ranks_whose_links_were_not_measured_plans_nothing(folder: Path) -> None:
    unmeasured = replace(RATES, gather_bytes_per_s=None)
    (said, planned), _ = POOL.run(train_measured, 2, folder, unmeasured, ())
    assert planned == []
    assert "`torchrun ... -m megatier bench` would measure this machine" in said
    assert "groups: 2" in (folder / "run/config.yaml").read_text()


def test_train_on_ranks_that_fit_no_plan_is_tried_as_given_and_says_so(folder: Path) -> None:
    (said, _), _ = POOL.run(train_measured, 2, folder, replace(RATES, gpu_bytes=1.0), ("--tiers.gpu=48MiB",))
    assert "no plan fits by estimate" in said


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


# ---------------------------------------------------------------------- checkpoints

SAVES = ("--train.groups=4", "--train.steps=4", "--output.checkpoint_every=1", "--output.keep_checkpoints=3")


@sizes
def test_checkpoints_of_a_run_on_ranks_are_those_of_one_process(shared: int, folder: Path) -> None:
    for size in (1, shared):
        (folder / str(size)).mkdir()
        for name in ("run.yaml", "text.txt"):
            shutil.copy(folder / name, folder / str(size) / name)
        POOL.run(train_in, size, folder / str(size), SAVES)

    expected = files_of(folder / "1/run/checkpoints")
    assert {name.split("/")[0] for name in expected} == {f"step-{step:08d}" for step in (2, 3, 4)}
    found = files_of(folder / f"{shared}/run/checkpoints")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.parametrize(("before", "after"), some([(2, 1), (4, 2)], by=2))
def test_run_on_ranks_goes_on_from_its_checkpoint_with_another_number_of_ranks(
    before: int, after: int, folder: Path
) -> None:
    POOL.run(train_in, before, folder, SAVES)
    run = folder / "run"
    model = (run / "model/model.safetensors").read_bytes()
    losses = figures(run)
    shutil.rmtree(run / "model")
    for step in (3, 4):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    POOL.run(train_in, after, folder, (), True)
    assert (run / "model/model.safetensors").read_bytes() == model
    assert figures(run) == losses


def train_apart(folder: Path) -> None:
    """Run a config in a directory that each rank has for itself."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    for name in ("run.yaml", "text.txt"):
        shutil.copy(folder / name, own / name)
    train_in(own)


def test_rank_that_sees_another_run_directory_is_refused(folder: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 does not see the run that the first rank has in run"):
        POOL.run(train_apart, 2, folder)
    assert not (folder / "0/run").exists()


def train_by_time(folder: Path, full: bool) -> None:
    """Run with checkpoints by a clock that only the first rank has; whose drive may be full."""
    is_first = os.environ["RANK"] == "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "is_due", lambda _: is_first)
        patch.setattr(Pace, "is_long", lambda _: is_first)
        if full and is_first:
            patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
        train_in(folder, ("--output.checkpoint_every=auto", "--output.export=false"))


@pytest.mark.parametrize("full", [False, True])
def test_checkpoint_by_time_is_made_or_left_out_as_the_first_rank_says(full: bool, folder: Path) -> None:
    POOL.run(train_by_time, 2, folder, full)
    checkpoints = [path.name for path in (folder / "run/checkpoints").iterdir()]
    assert ("step-00000003" in checkpoints) is not full
    assert not full or checkpoints == []


def test_train_on_ranks_with_too_little_ram_says_what_the_host_needs(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"Raise tiers\.ram to at least") as refused:
        POOL.run(train_in, 2, folder, ("--tiers.ram=4MiB",))
    found = re.search(r"Raise tiers\.ram to at least ([\d.]+) (\w+)", str(refused.value))
    assert found is not None
    POOL.run(train_in, 2, folder, (f"--tiers.ram={found[1]}{found[2]}",))


def train_with_an_export_that_fails(folder: Path, place: str) -> str:
    """Train on this rank. The first rank cannot write, or the second one's last update fails; return the error."""
    is_second = os.environ["RANK"] == "1"
    before = export.export_end

    def end(console: Console, config: RunConfig, session: Session, *others: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_: object) -> None:
                patch.undo()
                raise CapacityError("the export", 2, 1, "Free space.")

            if place == "write":
                patch.setattr(export, "write_model", fail)
            elif is_second:
                patch.setattr(session.player, "drain", fail)
            before(console, config, session, *others)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExportError) as refused:
        patch.setattr(trainer, "export_end", end)
        train_in(folder)
    return str(refused.value)


@pytest.mark.parametrize("place", ["write", "drain"])
def test_export_that_fails_on_one_rank_ends_all_with_a_checkpoint(place: str, folder: Path) -> None:
    first, second = POOL.run(train_with_an_export_that_fails, 2, folder, place)

    # A run that fails leaves its process groups to the end of the process.
    POOL.close()
    assert first == second
    assert "Free space." in first
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000003"]


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


# ---------------------------------------------------------------------- started again by torchrun

EACH_STEP = ("--output.checkpoint_every=1", "--train.steps=4")


def fail_after(step: int, folder: Path, words: tuple[str, ...]) -> None:
    """Run the config of a folder, and break off on all ranks before a step is saved, when the one before is."""
    with pytest.MonkeyPatch.context() as patch:
        real = Saves.after

        def after(self: Saves, now: int, say: Say, **options: Any) -> None:
            if now == step:
                self.end(say)
                raise ZeroDivisionError
            real(self, now, say, **options)

        patch.setattr(Saves, "after", after)
        with pytest.raises(ZeroDivisionError):
            train_in(folder, words)


def train_again(folder: Path, words: tuple[str, ...], failures: tuple[int, ...]) -> str:
    """Run the config of a folder as torchrun does when a rank has failed so often, as its host has seen it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(failures[int(os.environ["RANK"])]))
        return train_in(folder, words)


@pytest.mark.parametrize(("failed_at", "size", "failures"), some([(1, 2, (0, 2)), (3, 2, (1, 1)), (3, 1, (1,))], by=3))
def test_run_that_torchrun_starts_again_goes_on_to_the_same_bits(
    failed_at: int, size: int, failures: tuple[int, ...], folder: Path
) -> None:
    # Nobody gives train.groups, so it is the number of ranks that began the run.
    POOL.run(fail_after, 2, failed_at, folder, EACH_STEP)
    POOL.close()
    said = POOL.run(train_again, size, folder, EACH_STEP, failures)[0]
    begins = "There is no checkpoint yet, so the run begins again."
    assert (begins if failed_at == 1 else "step-00000002: weights and moments in place") in said

    POOL.run(train_in, 1, folder, (*EACH_STEP, "--train.groups=2", "--output.directory=alone"))
    assert figures(folder / "run") == figures(folder / "alone")
    for name in ("run", "alone"):
        assert (folder / name / "model/model.safetensors").is_file()
    model = "model/model.safetensors"
    assert (folder / "run" / model).read_bytes() == (folder / "alone" / model).read_bytes()


def test_run_that_failed_before_it_began_is_begun_when_torchrun_starts_it_again(folder: Path) -> None:
    POOL.run(train_again, 2, folder, (), (1, 1))
    assert (folder / "run/model/model.safetensors").is_file()


def test_restart_does_not_go_on_with_a_run_of_other_numbers(folder: Path) -> None:
    POOL.run(fail_after, 2, 3, folder, EACH_STEP)
    POOL.close()
    before = files_of(folder / "run")
    with pytest.raises(AssertionError, match=r"numbers of this run would change .*: train\.seed was 0 and is 7"):
        POOL.run(train_again, 2, folder, (*EACH_STEP, "--train.seed=7"), (1, 1))
    assert files_of(folder / "run") == before


def test_train_on_ranks_with_images_has_the_bits_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    budgets = {"tiers.gpu": "48MiB", "tiers.ram": "96MiB", "tiers.nvme": None, "tiers.state": "ram"}
    words = run_command(tmp_path, "gemma3", {**budgets, "train.groups": 2}, LATE)
    found = [POOL.run(main, size, [*words, f"--output.directory={tmp_path / str(size)}"]) for size in (1, 2)]
    assert found == [[0], [0, 0]]
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")
