"""The live panel: the course of the loss, what bounds a step, bars of lanes."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from megatier.report.figures import SlowestRank, StepReport
from megatier.report.panel import WIDTH, Course, bound_of, draw_panel, draw_sparkline

STALLS = {"ram_to_gpu": 0.05, "nvme_to_ram": 0.2}


def report(stalls: dict[str, float], attainment: float | None = None) -> StepReport:
    busy = {"zeta": 0.1, "ram_to_gpu": 2.0, "nvme_to_ram": 0.25}
    return StepReport(
        step=7,
        loss=3.21,
        learning_rate=1e-3,
        grad_norm=1.5,
        tokens=4096,
        seconds=1.0,
        compute_seconds=0.7,
        stall_seconds=stalls,
        host_seconds=0.05,
        attainment=attainment,
        bound_by="nvme",
        busy_seconds=busy,
    )


def drawn(report: StepReport, width: int) -> list[list[str]]:
    """Words of each row, bars left out."""
    target = io.StringIO()
    losses = Course()
    for value in (3.0, 2.0, 1.0):
        losses.add(value)
    Console(file=target, width=width).print(draw_panel(report, 20, 90, losses))
    return [[word for word in line.split() if set(word) != {"━"}] for line in target.getvalue().splitlines()]


def test_panel_has_a_row_for_every_figure_and_lane_in_a_fixed_order() -> None:
    rows = drawn(report(STALLS), 100)
    names = ["step", "loss", "tokens/s", "bound", "nvme_to_ram", "ram_to_gpu", "zeta"]
    assert [row[0] for row in rows] == names
    assert rows[0][1:] == ["7/20", "ETA", "1", "min", "30", "s"]
    assert rows[1][1:3] == ["█▅▁", "3.2100"]
    assert rows[2][1:] == ["4,096", "1.000", "s/step"]
    assert rows[3] == ["bound", "by", "nvme_to_ram", "stalled", "250", "ms,", "25.0", "%,", "host", "5.0", "%"]
    assert rows[4][-3:] == ["busy", "25.0", "%"]


def test_panel_of_a_run_with_images_has_their_rate() -> None:
    rows = drawn(replace(report(STALLS), images=3.0, seconds=0.5), 100)
    assert rows[3] == ["images/s", "6.0", "3", "in", "the", "step"]


def test_panel_of_a_run_that_ends_early_says_why() -> None:
    target = io.StringIO()
    Console(file=target, width=100).print(draw_panel(report(STALLS), 20, 0, Course(), why_over="no loss was lower"))
    assert "over         no loss was lower" in target.getvalue()


def test_panel_shows_what_all_steps_so_far_waited_for_the_compiler() -> None:
    target = io.StringIO()
    Console(file=target, width=100).print(draw_panel(report(STALLS), 20, 90, Course(), 6.5))
    assert "compiled     6.50 s" in target.getvalue()
    assert "compiled" not in " ".join(word for row in drawn(report(STALLS), 100) for word in row)


def test_panel_of_several_ranks_names_the_slowest() -> None:
    slowest = SlowestRank(rank=3, host="b", seconds=0.45, least_seconds=0.25)
    rows = drawn(replace(report(STALLS), slowest_rank=slowest), 100)
    words = "slowest rank 3 on b 450 ms itself, the fastest 250 ms"
    assert rows[4] == words.split()


def test_panel_shows_the_lanes_of_the_slowest_rank_beside_those_of_the_first() -> None:
    slowest = SlowestRank(rank=3, host="b", seconds=0.45, least_seconds=0.25)
    found = replace(report(STALLS), slowest_rank=slowest, slowest_busy_seconds={"nvme_to_ram": 0.5})
    rows = drawn(found, 100)
    assert rows[5][-7:] == ["busy", "25.0", "%,", "rank", "3", "50.0", "%"]
    assert rows[6][-3:] == ["3", "0.0", "%"]


def test_panel_lane_that_began_under_the_step_before_is_busy_all_the_time() -> None:
    assert drawn(report(STALLS), 100)[5][-3:] == ["busy", "100.0", "%"]


def test_panel_on_a_narrow_terminal_keeps_one_line_a_row() -> None:
    assert len(drawn(report(STALLS), 50)) == 7


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (report(STALLS), "nvme_to_ram"),
        (report({"ram_to_gpu": 0.019}), "compute"),
        (report({}), "compute"),
        (report(STALLS, 0.957), "nvme, attainment 96%"),
    ],
)
def test_bound_of_step_is_the_plan_or_the_longest_wait_or_compute(made: StepReport, said: str) -> None:
    assert bound_of(made) == said


def test_course_of_many_values_stays_short_and_true() -> None:
    course = Course()
    for number in range(1000):
        course.add(float(number))
    assert WIDTH // 2 <= len(course.points) < WIDTH
    assert course.points == sorted(course.points)
    assert course.points[0] == pytest.approx(15.5)


def test_course_without_finite_values_is_empty() -> None:
    course = Course()
    for value in (math.nan, math.inf, -math.inf):
        course.add(value)
    assert draw_sparkline(course.points) == ""


def test_sparkline_of_equal_values_is_flat() -> None:
    assert draw_sparkline([2.0, 2.0]) == "▁▁"
