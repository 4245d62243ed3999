from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import POOL
from rich.console import Console

from megatier._native import Batch
from megatier.optim.optimizer import RunOptimizer
from megatier.tier import Activations, Kind
from megatier.train import verify

ONE_POLICY = {
    verify.Mode(verify.CLIP): (Activations.OFFLOAD,),
    verify.Mode(None): (Activations.RECOMPUTE,),
    **{mode: policies for mode, policies in verify.MODES.items() if mode.moments != "fp32"},
}
"""All modes, with one activation policy each."""
ON_RANKS = (verify.Mode(verify.CLIP), verify.Mode(None, "fp8"))
"""Of the modes, those that default tests try on ranks: each value of either setting."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs suffice here."""
    for name, value in {"STEPS": 1, "SEQUENCES": 2, "SEQUENCE_LENGTH": 8}.items():
        monkeypatch.setattr(verify, name, value)


def report_of(
    directory: Path, *, is_quick: bool = False, optimizer: str = "adamw", products: str = "bf16"
) -> tuple[bool, str]:
    written = io.StringIO()
    console = Console(file=written, width=160)
    agrees = verify.verify("cpu", directory, console, is_quick=is_quick, optimizer=optimizer, products=products)
    return agrees, written.getvalue()


def check_report(directory: Path, num_runs: int) -> None:
    agrees, report = report_of(directory)
    assert agrees
    assert report.count("equal") == num_runs
    assert f"{num_runs} runs of 1 steps, about " in report
    assert report.count(" bf16 ") == report.count(" fp8 ") == 6
    assert "bit-identical" in report
    assert list(directory.iterdir()) == []


def test_verify_here_finds_every_placement_equal_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MODES", ONE_POLICY)
    check_report(tmp_path, 24)


@pytest.mark.slow
def test_verify_here_finds_every_placement_equal_by_every_policy(tmp_path: Path) -> None:
    check_report(tmp_path, 48)


@pytest.mark.parametrize(("optimizer", "clip"), [("muon", verify.CLIP), ("muon", None), ("lion", verify.CLIP)])
def test_verify_with_another_optimizer_finds_every_placement_equal(
    optimizer: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MODES", {verify.Mode(clip): (Activations.KEEP,)})
    agrees, report = report_of(tmp_path, optimizer=optimizer)
    assert agrees
    assert report.count("equal") == len(verify.PLACEMENTS)


def test_verify_with_products_in_fp8_finds_every_placement_equal_and_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU multiplies FP8 numbers one by one, so the model is smaller, and so are the budgets of what is on all tiers.
    monkeypatch.setattr(verify, "TINY_MODEL", {**verify.TINY_MODEL, "hidden_size": 64, "intermediate_size": 96})
    on_all = (("gpu", "ram", "nvme"), 3 << 18, 3 << 19, 0.0, 1)
    monkeypatch.setattr(verify, "PLACEMENTS", {**verify.PLACEMENTS, "gpu, ram and nvme": on_all})
    reports = [report_of(tmp_path, is_quick=True, products=products) for products in ("fp8", "bf16")]
    assert [report.count("equal") for _, report in reports] == [len(verify.PLACEMENTS)] * 2
    assert [report.count("│ 0.0 MB") for _, report in reports] == [3, 3], "what is on NVMe moves"
    digests = [set(re.findall(r"[0-9a-f]{8}", report)) for _, report in reports]
    assert len(digests[0]) == len(digests[1]) == 1
    assert digests[0] != digests[1]


def test_verify_that_is_quick_tries_every_placement_once(tmp_path: Path) -> None:
    agrees, report = report_of(tmp_path, is_quick=True)
    assert agrees
    assert report.count("equal") == len(verify.PLACEMENTS) == 6
    assert all(name in report for name in verify.PLACEMENTS)


def test_verify_one_placement_that_differs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PLACEMENTS", dict(list(verify.PLACEMENTS.items())[:2]))
    monkeypatch.setattr(verify, "MODES", ONE_POLICY)
    apply, count = RunOptimizer.apply, 0

    def unlucky(
        self: RunOptimizer,
        unit: str,
        elements: tuple[int, int],
        planes: Mapping[Kind, torch.Tensor],
        grad: torch.Tensor,
        before: Mapping[Kind, torch.Tensor],
    ) -> Batch | None:
        nonlocal count
        count += 1
        work = apply(self, unit, elements, planes, grad, before)
        if work is not None:
            work.wait()
        if count == 5:
            planes[Kind.WEIGHT][0] ^= 1
        return work

    monkeypatch.setattr(RunOptimizer, "apply", unlucky)
    agrees, report = report_of(tmp_path)
    assert not agrees
    assert "different" in report
    assert "NOT identical" in report


def test_verify_digests_that_differ_only_behind_the_digits_shown_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    made = SimpleNamespace(sha256=lambda: FakeDigest(f"{'a' * 60}{next(numbers):04}"))
    monkeypatch.setattr(verify, "hashlib", made)
    monkeypatch.setattr(verify, "PLACEMENTS", dict(list(verify.PLACEMENTS.items())[:2]))
    agrees, report = report_of(tmp_path, is_quick=True)
    assert not agrees
    assert "different" in report
    assert report.count(" aaaaaaaa ") == 2


class FakeDigest:
    """A digest that is what it was made with."""

    def __init__(self, digits: str) -> None:
        self.digits = digits

    def update(self, _: bytes) -> None:
        pass

    def hexdigest(self) -> str:
        return self.digits


def test_verify_on_ranks_whose_own_run_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_add_state", lambda *_: int("odd"))
    ranks: Any = SimpleNamespace(rank=1, size=2)
    with pytest.raises(ValueError, match="odd"):
        verify._verify_ranks("cpu", tmp_path, Console(quiet=True), ranks, [verify.Mode(verify.CLIP)])
    assert list(tmp_path.iterdir()) == []


def verify_on_ranks(
    directory: Path, optimizer: str = "adamw", *, is_quick: bool = False, modes: Sequence[verify.Mode] = ()
) -> tuple[bool, str]:
    """Verify on this rank, in short runs; of the modes in these alone, if there are any."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STEPS": 1, "SEQUENCES": 2, "SEQUENCE_LENGTH": 8}.items():
            patch.setattr(verify, name, value)
        if modes:
            patch.setattr(verify, "MODES", dict.fromkeys(modes, (Activations.KEEP,)))
        return report_of(directory, is_quick=is_quick, optimizer=optimizer)


def test_verify_with_muon_on_two_ranks_finds_every_placement_equal_to_one_process(tmp_path: Path) -> None:
    (agrees, report), _ = POOL.run(partial(verify_on_ranks, is_quick=True), 2, tmp_path, "muon")
    assert agrees
    assert report.count("equal") == len(verify.RANK_PLACEMENTS)


@pytest.mark.parametrize("modes", [ON_RANKS, pytest.param(tuple(verify.MODES), marks=pytest.mark.slow)], ids=len)
def test_verify_on_two_ranks_finds_every_placement_equal_to_one_process(
    modes: Sequence[verify.Mode], tmp_path: Path
) -> None:
    (agrees, report), (other_agrees, nothing) = POOL.run(partial(verify_on_ranks, modes=modes), 2, tmp_path)
    assert agrees
    assert other_agrees
    assert report.count("equal") == len(verify.RANK_PLACEMENTS) * len(modes)
    assert f"{5 * len(modes)} runs of 1 steps on 2 ranks: bit-identical to one process" in report
    assert nothing == ""
    assert list(tmp_path.iterdir()) == []


def test_verify_tries_an_optimizer_in_the_modes_that_it_has() -> None:
    for optimizer, moments in {"adamw": ["fp32", "fp32", "bf16", "fp8"], "lion": ["fp32", "fp32"]}.items():
        modes = verify.list_modes(optimizer)
        assert [mode.moments for mode in modes] == moments
        assert [modes[mode] for mode in modes][:2] == [tuple(Activations)] * 2
        assert [verify._make_settings("keep", mode, 1).optimizer for mode in modes] == [optimizer] * len(moments)
