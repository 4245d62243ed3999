from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatier.byte_counts import format_bytes
from megatier.report.figures import QueueBytes, SlowestRank, StepReport, TierState
from megatier.report.report import Progress, WorkBar, format_step, print_moves, print_placement


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    target = io.StringIO()
    return Console(file=target, force_terminal=terminal, width=100), target


def size(num_bytes: float) -> str:
    return format_bytes(num_bytes)


def report(step: int, seconds: float = 0.5) -> StepReport:
    stalls = {"update": 0.002, "nvme_to_ram": 0.1, "ram_to_gpu": 0.0}
    return StepReport(
        step=step,
        loss=3.21,
        learning_rate=1e-3,
        grad_norm=1.5,
        tokens=4096,
        seconds=seconds,
        stall_seconds=stalls,
    )


@pytest.mark.parametrize("line_seconds", [0.0, 1e9])
def test_progress_that_ends_early_shows_the_last_step_once_and_why(line_seconds: float) -> None:
    target_console, target = console()
    with Progress(target_console, 20, line_seconds) as progress:
        for step in (1, 2, 3):
            progress.update(report(step))
        progress.end("no loss was lower")
    lines = target.getvalue().splitlines()
    assert lines[-1] == "no loss was lower"
    assert [line.split()[1] for line in lines[:-1]] == (
        ["1/20", "2/20", "3/20"] if not line_seconds else ["1/20", "3/20"]
    )


def test_panel_of_a_run_that_ends_early_has_the_last_step_and_why() -> None:
    target_console, target = console(terminal=True)
    with Progress(target_console, 20) as progress:
        for step in (1, 2):
            progress.update(report(step))
        progress.end("no loss was lower")
    shown = target.getvalue()
    assert "2/20" in shown
    assert "no loss was lower" in shown[shown.rindex("2/20") :], "in the panel itself, below its step"


def test_step_line_shows_every_figure() -> None:
    assert format_step(report(7), 20, 90) == (
        "step 7/20  loss 3.2100  lr 1.00e-03  norm 1.500  tokens/s 8,192  ETA 1 min 30 s  stalled 20.4 % (nvme_to_ram)"
    )


def test_step_line_of_a_step_that_hardly_waited_fits_80_columns_and_says_nothing_of_it() -> None:
    line = format_step(replace(report(1140), stall_seconds={"update": 0.0099}, tokens=8192), 1140, 0)
    assert line == "step 1140/1140  loss 3.2100  lr 1.00e-03  norm 1.500  tokens/s 16,384  ETA 0 ms"
    assert len(line) <= 80


def test_step_line_of_a_planned_run_shows_attainment_and_what_bounds_it() -> None:
    line = format_step(replace(report(7), attainment=0.957, bound_by="nvme"), 20, 90)
    assert "tokens/s 8,192  attainment 96% (nvme)  ETA" in line


def test_step_line_of_a_step_that_compiled_says_so_and_has_the_rate_without_it() -> None:
    line = format_step(replace(report(7), compile_seconds=4.5), 20, 90)
    assert "tokens/s 8,192  ETA 1 min 30 s  compiled 4.50 s  stalled" in line


def test_step_line_of_several_ranks_names_the_slowest() -> None:
    slowest = SlowestRank(rank=3, host="b", seconds=0.45, least_seconds=0.25)
    line = format_step(replace(report(7), slowest_rank=slowest), 20, 90)
    assert "  slowest rank 3 on b (450 ms, fastest 250 ms)  stalled" in line


def test_step_line_without_norm_and_stalls_leaves_them_out() -> None:
    line = format_step(StepReport(step=1, loss=2.0, learning_rate=0.0, grad_norm=None, tokens=10, seconds=0.0), 1, 0)
    assert "norm" not in line
    assert "tokens/s -" in line
    assert line.endswith("ETA 0 ms")


def test_progress_plain_shows_first_and_last_step_alone_when_fast() -> None:
    out, target = console()
    with Progress(out, 4) as progress:
        for step in range(1, 5):
            progress.update(report(step))
    assert [line.split("  ")[0] for line in target.getvalue().splitlines()] == ["step 1/4", "step 4/4"]


def test_progress_plain_without_pause_shows_each_step_on_one_line() -> None:
    out, target = console()
    with Progress(out, 3, line_seconds=0) as progress:
        for step in range(1, 4):
            progress.update(report(step))
    assert len(target.getvalue().splitlines()) == 3


def test_progress_time_left_forgets_the_first_step() -> None:
    out, target = console()
    with Progress(out, 12, line_seconds=0) as progress:
        progress.update(report(1, seconds=100))
        progress.update(report(2, seconds=1))
    assert "ETA 10.00 s" in target.getvalue().splitlines()[1]


def test_progress_on_terminal_redraws_and_keeps_notes() -> None:
    out, target = console(terminal=True)
    with Progress(out, 2) as progress:
        progress.update(report(1))
        progress.note("held-out loss [2.2]")
        progress.update(report(2))
    assert "held-out loss [2.2]" in target.getvalue()
    assert "2/2" in target.getvalue()


def test_work_that_takes_long_is_told_in_lines_and_short_work_is_not() -> None:
    out, target = console()
    with WorkBar(out, "weights", 4 << 20, size, line_seconds=0) as work:
        for _ in range(2):
            work.advance(1 << 20)
    with WorkBar(out, "weights", 4 << 20, size) as work:
        work.advance(1 << 20)
    with WorkBar(out, "tokens", None, "{:.0f}".format, line_seconds=0) as work:
        work.advance(7)
    assert target.getvalue() == "weights: 1.0 MiB of 4.0 MiB\nweights: 2.0 MiB of 4.0 MiB\ntokens: 7\n"


def test_work_on_a_terminal_draws_a_bar_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.report.report.REDRAW_SECONDS", 0)
    out, target = console(terminal=True)
    with WorkBar(out, "weights", 4 << 20, size) as work:
        work.advance(1 << 20)
    drawn = target.getvalue()
    assert "1.0 MiB of 4.0 MiB" in drawn
    assert drawn.endswith("\x1b[2K")


def test_print_placement_shares_add_up() -> None:
    out, target = console()
    rows = [
        TierState(tier="gpu", state_bytes=1 << 20, other_bytes=512, budget_bytes=1 << 22),
        TierState(tier="ram", state_bytes=1 << 20, other_bytes=0, budget_bytes=0),
        TierState(tier="nvme", state_bytes=2 << 20, other_bytes=0, budget_bytes=0),
    ]
    print_placement(out, rows)
    text = target.getvalue()
    assert text.count("25.0 %") == 2
    assert "50.0 %" in text
    assert "4.0 MiB" in text
    assert "100.0 %" in text


def test_print_moves_names_the_difference() -> None:
    out, target = console()
    print_moves(out, [QueueBytes("nvme_to_ram", 1_234_567, 1_234_567), QueueBytes("ram_to_gpu", 5, 8)])
    lines = [line for line in target.getvalue().splitlines() if "_to_" in line]
    assert "1,234,567" in lines[0]
    assert "none" in lines[0]
    assert "-3" in lines[1]
