"""What a run directory tells of its run: records of steps and processes, written, read back, and refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_commands import all_records, command

from megatier.cli import main
from megatier.errors import ConfigError
from megatier.report.history import Corrected, History, read_history

STEP: dict[str, Any] = {"step": 1, "loss": 2.0, "tokens": 8, "seconds": 0.5}
BEGINS: dict[str, Any] = {
    "step": 0,
    "run": "begins",
    "time": "2026-11-21T20:00:00+00:00",
    "device": "cpu",
    "num_parameters": 7,
    "homes": {"a": {"weight": "gpu", "grad": "slot"}},
    "streamed": [],
    "speculative": ["a"],
    "tiers": [{"tier": "gpu", "state_bytes": 84, "other_bytes": 0, "budget_bytes": 100}],
    "expected": {"seconds": 0.4, "bound_by": "nvme", "busy_seconds": {"compute": 0.3}, "moved_bytes": {}},
}


def written(path: Path, *records: object, end: str = "") -> History:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return read_history(path)


def test_history_of_a_run_has_its_processes_steps_evaluations_and_checkpoints(tmp_path: Path) -> None:
    words = command(tmp_path, {"train.steps": 2, "output.checkpoint_every": 1, "tiers.nvme": f"{tmp_path}:16MiB"})
    assert main([*words, "--tiers.state=nvme", "--tiers.gpu=512KiB"]) == 0
    history = read_history(tmp_path / "run" / "metrics.jsonl")
    [opening] = history.openings
    assert (opening.step, opening.device, opening.expected) == (0, "cpu", None)
    assert opening.homes["model.layers.0"] == {"weight": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme", "grad": "ram"}
    assert {tier.tier: bool(tier.state_bytes) for tier in opening.tiers} == {"gpu": False, "ram": False, "nvme": True}
    assert sum(tier.state_bytes for tier in opening.tiers) >= 12 * opening.num_parameters
    assert [step.step for step in history.steps] == [1, 2]
    assert all(step.busy_seconds["compute"] <= step.seconds for step in history.steps)
    assert [step for step, _ in history.heldout] == [2]
    assert [saved.step for saved in history.checkpoints] == [1, 2]
    assert history.outcome == "whole"
    assert history.moved_bytes == history.demanded_bytes != {}
    for queue, size in history.moved_bytes.items():
        assert sum(step.moved_bytes.get(queue, 0) for step in history.steps) <= size


def test_history_has_the_range_of_a_plan_and_what_the_run_made_of_it(tmp_path: Path) -> None:
    made = {"planned_seconds": 0.4, "planned_bytes_per_s": 2e9, "seconds": 0.5, "measured_bytes_per_s": 1.6e9}
    wavers = {**BEGINS, "expected": {**BEGINS["expected"], "seconds_range": [0.3, 0.6]}}
    history = written(tmp_path / "m", BEGINS, wavers, {"step": 4, "correction": made})
    assert [each.expected.seconds_range for each in history.openings if each.expected] == [(0.4, 0.4), (0.3, 0.6)]
    assert history.corrections == [Corrected(step=4, seconds=0.5, planned_bytes_per_s=2e9, measured_bytes_per_s=1.6e9)]


def test_history_of_a_run_that_went_on_counts_moves_of_each_process_anew(tmp_path: Path) -> None:
    steps = [{**STEP, "step": step, "moved_bytes": {"ram_to_gpu": size}} for step, size in ((1, 5), (2, 9), (3, 7))]
    history = written(tmp_path / "m", BEGINS, *steps[:2], {**BEGINS, "step": 2}, steps[2])
    assert [step.moved_bytes["ram_to_gpu"] for step in history.steps] == [5, 4, 7]
    assert [opening.step for opening in history.openings] == [0, 2]
    assert history.moved_bytes == {"ram_to_gpu": 7}
    older = written(tmp_path / "m", *steps)
    assert [step.moved_bytes["ram_to_gpu"] for step in older.steps] == [5, 4, 7]


def test_history_checkpoint_of_an_older_run_held_training_up_for_all_its_time(tmp_path: Path) -> None:
    older = {"step": 1, "checkpoint_bytes": 9, "checkpoint_seconds": 2.0}
    found = written(tmp_path / "m", older, {**older, "checkpoint_pause_seconds": 0.5}).checkpoints
    assert [(saved.seconds, saved.paused_seconds) for saved in found] == [(2.0, 2.0), (2.0, 0.5)]


def test_history_opening_is_read_as_it_was_written(tmp_path: Path) -> None:
    [opening] = written(tmp_path / "m", BEGINS).openings
    assert opening.homes == BEGINS["homes"]
    assert opening.speculative == ("a",)
    assert opening.tiers[0].budget_bytes == 100
    assert opening.expected is not None
    assert opening.expected.bound_by == "nvme"


def test_history_what_is_not_finite_is_read_back(tmp_path: Path) -> None:
    [step] = written(tmp_path / "m", {**STEP, "loss": "nan", "skipped": "loss"}).steps
    assert math.isnan(step.loss)
    assert step.skipped == "loss"


def test_history_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    cut = written(tmp_path / "m", STEP, end='{"step": 2, "lo')
    assert (len(cut.steps), cut.is_cut) == (1, True)
    assert not written(tmp_path / "n", STEP).is_cut


def test_history_savepoint_holds_training_up_for_all_its_time(tmp_path: Path) -> None:
    [found] = written(tmp_path / "m", {"step": 4, "savepoint_bytes": 9, "savepoint_seconds": 2.0}).savepoints
    assert (found.step, found.num_bytes, found.seconds, found.paused_seconds) == (4, 9, 2, 2)


def test_history_without_records_is_empty(tmp_path: Path) -> None:
    history = written(tmp_path / "m")
    assert (history.openings, history.steps, history.outcome) == ([], [], "")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[3]",
        "null",
        "[" * 100_000,
        '{"step": "1"}',
        '{"step": -1}',
        '{"step": true}',
        f'{{"step": {10**400}, "heldout_loss": 1}}',
        '{"step": 1e999}',
        '{"step": 1, "loss": 1}',
        '{"step": 1, "run": 3}',
        '{"step": 1, "savepoint_bytes": 3}',
        '{"step": 0, "run": "begins"}',
        json.dumps({**STEP, "seconds": "soon"}),
        json.dumps({**STEP, "tokens": [8]}),
        json.dumps({**STEP, "seconds": float("nan")}),
        json.dumps({**STEP, "seconds": "inf"}),
        json.dumps({**STEP, "tokens": -1}),
        json.dumps({**STEP, "resident_bytes": 1e308}),
        json.dumps({**STEP, "loss": None}),
        json.dumps({**STEP, "slowest_rank": {"rank": 1, "host": "a"}}),
        json.dumps({**STEP, "other_ranks": 3}),
        json.dumps({**STEP, "other_ranks": [{"rank": 1}]}),
        json.dumps({**STEP, "moved_bytes": [1]}),
        json.dumps({**STEP, "moved_bytes": {"a": {}}}),
        json.dumps({**BEGINS, "homes": []}),
        json.dumps({**BEGINS, "homes": {"a": {"weight": 1}}}),
        json.dumps({**BEGINS, "tiers": {"gpu": 1}}),
        json.dumps({**BEGINS, "expected": 4}),
        json.dumps({**BEGINS, "expected": {**BEGINS["expected"], "seconds_range": [1]}}),
        json.dumps({"step": 4, "correction": {"seconds": 1}}),
        json.dumps({**BEGINS, "expected": {"seconds": 0, "bound_by": "nvme"}}),
        "\udcff",
    ],
)
def test_history_with_a_damaged_line_is_refused_and_names_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(STEP).encode() + b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: this is no record of a run\. Remove that line"):
        read_history(path)


def test_history_of_no_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file.* Give the directory of a run"):
        read_history(tmp_path / "metrics.jsonl")


def test_train_records_how_a_process_begins_and_ends(tmp_path: Path) -> None:
    assert main(command(tmp_path)) == 0
    first, *_, last = all_records(tmp_path)
    assert (first["step"], first["run"]) == (0, "begins")
    assert (last["step"], last["run"]) == (3, "whole")
