"""A gradient that is not finite in the immediate mode: what is said, what is not saved, and how the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed
from small_commands import IMMEDIATE, PLACES, command, metrics
from torch import Tensor

from megatier.cli import main
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.optimizer import RunOptimizer

STEPS, SPOILT = 5, 4
UNITS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"]
RUN: dict[str, Any] = {**IMMEDIATE, "train.steps": STEPS, "train.evaluate_every": STEPS}


@pytest.fixture
def spoils() -> Iterator[Callable[[str], None]]:
    """Spoils the gradient of a unit in one step; undone in the end, or by an empty name."""
    with pytest.MonkeyPatch.context() as patch:
        real, begin, current = GradientSums.measure, RunOptimizer.begin_step, [0]

        def spoil(unit: str) -> None:
            def begin_step(self: RunOptimizer, step: int, rate: float) -> None:
                current[0] = step
                begin(self, step, rate)

            def measure(self: GradientSums, name: str, grad: Tensor) -> None:
                if (name, current[0]) == (unit, SPOILT):
                    grad[1] = float("inf")
                real(self, name, grad)

            patch.setattr(RunOptimizer, "begin_step", begin_step)
            patch.setattr(GradientSums, "measure", measure)

        yield spoil


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model that a run without the fault ends with."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, {**RUN, "tiers.state": "gpu"})) == 0
    return (folder / "run/model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("unit", "place"),
    crossed(["lm_head", "model.layers.1", "model.embed_tokens"], ["gpu", "gpu_ram_nvme"], by=2),
)
def test_train_gradient_that_is_not_finite_names_updated_units_and_the_run_goes_on_from_its_checkpoint(
    unit: str,
    place: str,
    whole: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoils: Callable[[str], None],
) -> None:
    spoils(unit)
    settings = {**RUN, **PLACES[place], "tiers.nvme": f"{tmp_path}:16MiB", "output.checkpoint_every": SPOILT - 1}
    assert main(command(tmp_path, settings)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"step {SPOILT}: the gradient of {unit}." in said

    # The backward comes to the last unit first.
    before = UNITS[UNITS.index(unit) + 1 :]
    if before:
        assert f"{len(before)} of {len(UNITS)} units had theirs: {', '.join(before)}. So" in said
    else:
        assert "No update of this step was written" in said
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved == [f"step-{SPOILT - 1:08}"]
    assert f"`megatier resume {tmp_path / 'run'}` goes on from {tmp_path / 'run/checkpoints' / saved[0]}." in said

    spoils("")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == whole


def test_train_gradient_that_is_not_finite_in_a_run_that_saved_nothing_says_that_it_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoils: Callable[[str], None]
) -> None:
    spoils("model.layers.1")
    assert main(command(tmp_path, {**RUN, "tiers.state": "ram", "output.checkpoint_every": 0})) == 2
    assert "the run has to begin anew: set output.checkpoint_every" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*"))
