"""The comparison with fio: what is made of its report, the ratios, and a tiny one where fio is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import compare_fio
import pytest
from compare_fio import FLOWS, Rounds, compare, rate_of, summary, table

GB = 10**9


def way(num_bytes: int, milliseconds: int) -> dict[str, int]:
    return {"io_bytes": num_bytes, "runtime": milliseconds}


def test_rate_of_both_jobs_is_over_the_longer() -> None:
    report = {"jobs": [{"read": way(3 * GB, 1500), "write": way(0, 0)}, {"read": way(0, 0), "write": way(GB, 2000)}]}
    assert rate_of(report) == 2 * GB


def made_up(*rates: tuple[int, int, int]) -> Rounds:
    names = ("megatier, 4 threads", "fio, 4 in flight", "fio, 16 in flight")
    return [{flow: dict(zip(names, (rate * GB for rate in one), strict=True)) for flow in FLOWS} for one in rates]


def test_summary_compares_each_round_with_the_better_fio() -> None:
    found = summary(made_up((2, 2, 4), (4, 3, 4), (3, 9, 4)))["write"]
    assert found["best_fio"] == "fio, 16 in flight"
    assert found["median_bytes_per_s"]["fio, 4 in flight"] == 3 * GB
    assert found["ratios"] == {"megatier, 4 threads": {"median": 0.75, "quartiles": [0.625, 0.875]}}


@pytest.mark.parametrize(("rate", "is_met"), [(96, "yes"), (94, "no")])
def test_table_says_whether_the_target_is_met(rate: int, is_met: str) -> None:
    lines = table(summary(made_up((rate, 50, 100)))).splitlines()
    assert len(lines) == 2 + len(FLOWS)
    assert lines[2].split(" | ")[-1] == f"{is_met} |"
    assert f"{rate}.00 GB/s | 100.00 GB/s (16 in flight)" in lines[2]


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio here")
def test_compare_measures_every_flow_of_every_system_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_fio, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(compare_fio, "REQUEST_BYTES", 1 << 20)
    rounds = compare(tmp_path, 16 << 20, 0.1, 2, [1, 2])
    names = {"megatier, 1 threads", "megatier, 2 threads", "fio, 4 in flight", "fio, 16 in flight"}
    assert all(set(found) == set(FLOWS) for found in rounds)
    assert all(set(rates) == names and min(rates.values()) > 0 for found in rounds for rates in found.values())
    assert json.dumps(summary(rounds))
    assert not list(tmp_path.iterdir())
