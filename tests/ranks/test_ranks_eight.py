"""Eight ranks of which one is killed: all end with the cause, and four go on with the same command."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS
from small_commands import command, metrics, outcome
from test_ranks_faults import ranks
from warm_python import WarmPython

SIZE = 8
LOST = 5
"""The rank that is killed in its second checkpoint."""


def words_of(folder: Path, tiers: dict[str, Any]) -> list[str]:
    """A run in `folder/run` of eight groups, whose units are so large that all ranks have some."""
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "model.config.hidden_size": 128,
        "model.config.intermediate_size": 512,
        "tiers.gpu": "16MiB",
        "tiers.ram": "64MiB",
        "tiers.nvme": f"{folder / 'drive'}:512MiB",
        "train.batch": SIZE,
        "train.groups": SIZE,
        "train.steps": 4,
        "train.clip": 1.65,
        "output.checkpoint_every": 1,
        "output.export_dtype": "fp32",
        **tiers,
    }
    return command(folder, settings)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["gpu", "ram", "nvme"])
def test_eight_ranks_of_which_one_is_killed_end_with_the_cause_and_four_go_on_to_the_same_bits(
    place: str, tmp_path: Path, python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All in one thread each: how many there are may change bits.
    def program(words: list[str]) -> list[str | Path]:
        return [FAULTS / "killed_rank.py", str(LOST), "checkpoint", *words]

    alone = words_of(tmp_path / "alone", {"tiers.state": "ram"})
    with ranks(python, [program(alone)]) as [process]:
        process.communicate()
    expected = outcome(tmp_path / "alone" / "run")

    words = words_of(tmp_path / "eight", {"tiers.state": place})
    with ranks(python, [program(words)] * SIZE) as started:
        errors = [process.communicate()[1] for process in started]
        assert [process.wait() for process in started] == [2] * LOST + [-signal.SIGKILL] + [2] * (SIZE - LOST - 1)
    del errors[LOST]
    causes = [re.findall(rf"^megatier: error: (rank {LOST} on \S+ failed, and .*)$", error, re.M) for error in errors]
    assert all("its process ended without a word" in cause for [cause] in causes)

    # As torchrun starts what it has left: the same command, of which it says how often it was started again.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ranks(python, [program(words)] * (SIZE // 2)) as started:
        said = [process.communicate() for process in started]
        assert [process.wait() for process in started] == [0] * (SIZE // 2), said
    sys.stdout.write(f"{causes[0][0]}\n{said[0][0]}")
    assert re.search(r"^step-\S+: weights and moments in place", said[0][0], re.M)

    # In every bit those of one process.
    assert outcome(tmp_path / "eight" / "run") == expected
    assert [record["step"] for record in metrics(tmp_path / "eight") if "loss" in record] == [1, 2, 3, 4]

    # What the killed rank had on the drive stays: no rank of its number takes it over (`megatier clean`).
    left = [path.name for path in (tmp_path / "eight" / "drive").iterdir()]
    assert [name.rpartition("-")[2] for name in left] == [str(LOST)]
