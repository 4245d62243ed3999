"""What a run's first steps say of its plan: with drives of injected rates, and in a real run that spills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_commands import all_records, command, metrics, outcome
from small_setups import elsewhere
from small_timelines import RATES
from test_planner_plan import MIB, SLOW, budgets, run_config

from megatier.cli import main
from megatier.forecast.forecast import QUEUES_OF_DISK, Forecast
from megatier.measure.probe import cache_rates
from megatier.planner.prediction import MEASURED_STEPS, Correction, Prediction, measured_rate
from megatier.planner.search import Choice
from megatier.planner.trial import Trial
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.setup.skeleton import skeleton_of
from megatier.trace.events import TraceEvent

WAVERS = replace(
    SLOW,
    drives=(
        DriveRates(
            directory="a",
            read_bytes_per_s=3e6,
            write_bytes_per_s=2e6,
            mixed_bytes_per_s=2.5e6,
            io_threads=None,
            first_write_bytes_per_s=None,
            mixed_low_bytes_per_s=2e6,
            mixed_high_bytes_per_s=3e6,
        ),
    ),
)


def trial(rates: Rates) -> Trial:
    config = run_config()
    model = skeleton_of(config.model)
    sizes = budgets(gpu=MIB, ram=5 * MIB // 2)
    return Trial.of(elsewhere(config, rates, sizes, compiles=True, model=model))


def prediction(rates: Rates) -> Prediction:
    tried = trial(rates)
    placement = tried.placed()
    made = tried.forecast(placement)
    return Prediction(Choice(settings={}, trial=tried, placement=placement, forecast=made))


def step_of(made: Forecast) -> list[TraceEvent]:
    """What a run would trace whose drives did as in a forecast."""
    return [event for lane in QUEUES_OF_DISK for event in lane_of(made, lane)]


def lane_of(made: Forecast, lane: str) -> Iterator[TraceEvent]:
    spans = [(max(0.0, span.start), min(made.seconds, span.end)) for span in made.spans if span.lane == lane]
    whole = sum(end - start for start, end in spans)
    for start, end in spans:
        num_bytes = round(made.moved_bytes[lane] * (end - start) / whole)
        yield TraceEvent(
            lane=lane, name="block", start_ns=round(start * 1e9), end_ns=round(end * 1e9), num_bytes=num_bytes
        )


def test_measured_rate_counts_time_in_which_any_drive_lane_is_busy() -> None:
    moves = [
        TraceEvent(lane="nvme_to_ram", name="a", start_ns=0, end_ns=2_000_000_000, num_bytes=3000),
        TraceEvent(lane="ram_to_nvme", name="a", start_ns=1_000_000_000, end_ns=3_000_000_000, num_bytes=2000),
        TraceEvent(lane="nvme_to_gpu", name="b", start_ns=7_000_000_000, end_ns=8_000_000_000, num_bytes=1000),
        TraceEvent(lane="ram_to_gpu", name="c", start_ns=0, end_ns=9_000_000_000, num_bytes=9999),
        TraceEvent(lane="stall", name="c", start_ns=0, end_ns=9_000_000_000, cause="nvme_to_ram"),
    ]
    assert measured_rate(moves) == 6000 / 4
    assert measured_rate(moves[3:]) == 0


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25])
def test_prediction_becomes_that_of_the_drives_as_they_are(factor: float) -> None:
    planned, real = prediction(SLOW), prediction(SLOW.times(factor)).forecast
    assert abs(real.seconds / planned.forecast.seconds - 1) > 0.1
    placement = planned._choice.placement
    corrections = [planned.observe(step_of(real)) for _ in range(MEASURED_STEPS + 3)]
    assert [number for number, made in enumerate(corrections) if made is not None] == [MEASURED_STEPS]
    made = corrections[MEASURED_STEPS]
    assert made is not None
    assert made.is_worth_saying
    assert made.seconds == planned.forecast.seconds == pytest.approx(real.seconds, rel=0.02)
    assert made.measured_bytes_per_s / made.planned_bytes_per_s == pytest.approx(factor, rel=0.1)
    assert planned._choice.placement is placement
    assert planned.forecast.moved_bytes == real.moved_bytes


def test_prediction_that_the_steps_confirm_stays() -> None:
    planned = prediction(SLOW)
    before = planned.forecast.seconds
    (made,) = [found for _ in range(MEASURED_STEPS + 1) if (found := planned.observe(step_of(planned.forecast)))]
    assert not made.is_worth_saying
    assert made.seconds == pytest.approx(before, rel=0.01)


def test_prediction_takes_the_median_step_and_none_in_which_drives_were_idle() -> None:
    planned, real, odd = (prediction(SLOW.times(factor)).forecast for factor in (1.0, 0.8, 0.1))
    steps = [step_of(odd), step_of(real), [], step_of(odd), step_of(real)]  # the first learns the order of units
    run = prediction(SLOW)
    *before, made = [run.observe(step) for step in steps]
    assert before == [None] * 4
    assert made is not None
    assert made.seconds == pytest.approx(real.seconds, rel=0.02)
    assert made.planned_seconds == planned.seconds


def test_prediction_of_a_run_without_drives_is_left_alone() -> None:
    config = run_config()
    model = skeleton_of(config.model)
    tried = Trial.of(elsewhere(config, RATES, budgets(gpu=64 * MIB), compiles=True, model=model))
    placement = tried.placed()
    made = tried.forecast(placement)
    run = Prediction(Choice(settings={}, trial=tried, placement=placement, forecast=made))
    assert all(run.observe(step_of(prediction(SLOW).forecast)) is None for _ in range(9))
    assert run.forecast is made


def test_prediction_of_drives_that_take_no_time_is_left_alone() -> None:
    run = prediction(SLOW.times(1e30))
    assert run.forecast.uses_drives
    assert all(run.observe(step_of(prediction(SLOW).forecast)) is None for _ in range(9))


def test_prediction_gives_a_range_until_the_run_knows_better() -> None:
    run = prediction(WAVERS)
    low, high = run.seconds_range
    assert low == prediction(SLOW.times(1.2)).forecast.seconds < run.forecast.seconds < high
    assert high == prediction(SLOW.times(0.8)).forecast.seconds
    for _ in range(MEASURED_STEPS + 1):
        run.observe(step_of(run.forecast))
    assert run.seconds_range == (run.forecast.seconds,) * 2
    assert prediction(SLOW).seconds_range == (prediction(SLOW).forecast.seconds,) * 2


def test_correction_says_both_rates_and_steps() -> None:
    made = Correction(planned_seconds=31.8, planned_bytes_per_s=2.2e9, seconds=36.9, measured_bytes_per_s=1.9e9)
    assert made.is_worth_saying
    assert str(made) == (
        "the plan said 31.8 s a step with drives that do 2.2 GB/s; in this run they do 1.9 GB/s: 36.9 s"
    )
    assert not replace(made, seconds=33.0).is_worth_saying


def test_run_whose_drive_does_less_than_measured_says_so_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "train.steps": 7,
        "train.evaluate_every": 0,
        "tiers.state": "nvme",
        "tiers.gpu": "512KiB",
        "tiers.generations": 1,
        "tiers.streamed_share": 0.0,
        "train.groups": 1,
        "train.slices": 1,
        "train.activations": "keep",
        "model.saved_share": 0.8,
    }
    # A step this small is mostly the host's own time. How much of it a drive adds is up to the machine.
    monkeypatch.setattr("megatier.planner.prediction.WORTH_SAYING", 0.0)
    outcomes = []
    for name in ("plain", "planned"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        if name == "planned":  # a drive of another world
            drive = DriveRates(
                directory=str(folder),
                read_bytes_per_s=3e12,
                write_bytes_per_s=2e12,
                mixed_bytes_per_s=2.5e12,
                io_threads=2,
            )
            cache_rates(replace(RATES, drives=(drive,)), "cpu")
        assert main(command(folder, settings | {"tiers.nvme": f"{folder}:16MiB"})) == 0
        outcomes.append(outcome(folder / "run"))
    assert outcomes[0] == outcomes[1]
    assert "the plan said" in capsys.readouterr().out
    (found,) = [record for record in metrics(tmp_path / "planned") if "correction" in record]
    assert found["step"] == 1 + MEASURED_STEPS
    correction = found["correction"]
    assert correction["seconds"] > correction["planned_seconds"]
    assert correction["measured_bytes_per_s"] < correction["planned_bytes_per_s"]
    steps = [record for record in metrics(tmp_path / "planned") if "loss" in record]
    expected = [correction["planned_seconds"]] * (1 + MEASURED_STEPS) + [correction["seconds"]] * 3
    assert [step["attainment"] * step["seconds"] for step in steps] == pytest.approx(expected)
    begins = all_records(tmp_path / "planned")[0]
    assert begins["expected"]["seconds_range"] == [correction["planned_seconds"]] * 2
