"""`megatier train` on several ranks of a machine that was measured: all take what the first one plans."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_pool import POOL
from ranked_runs import figures, train_in, write_run
from small_setups import ROUND

from megatier.measure import probe
from megatier.planner.search import Choice, search
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates import Rates
from megatier.schedule.world import World
from megatier.setup import machine
from megatier.setup.setup import Setup
from megatier.train import choices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


RATES = replace(ROUND, flops_per_s=1e9, gather_bytes_per_s=1e9, scatter_bytes_per_s=1e9, ranks_slowdown=0.5)


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
        patch.setattr(machine, "choose_budgets", lambda *_: (48 << 20, (96 - rank) << 20))
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
