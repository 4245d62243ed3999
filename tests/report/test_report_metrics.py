from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatier.errors import ConfigError
from megatier.report import metrics
from megatier.report.metrics import MetricsLog, format_count, format_range, format_seconds, format_share


def test_write_record_is_on_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "loss": 2.5, "stall_seconds": {"nvme_to_ram": 0.1}, "tiers": (1, 2)})
        expected = {"step": 1, "loss": 2.5, "stall_seconds": {"nvme_to_ram": 0.1}, "tiers": [1, 2]}
        assert json.loads(path.read_text()) == expected


def test_write_non_finite_stays_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"loss": float("nan"), "norms": [float("inf")]})
    assert json.loads(path.read_text()) == {"loss": "nan", "norms": ["inf"]}


def test_open_after_torn_line_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with MetricsLog(path) as log:
        log.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'


@pytest.mark.parametrize("step", ["[" * 100_000, "9" * 4000, "[3]", "null", "NaN", '"x"'])
def test_cut_after_drops_what_has_no_step(step: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n{{"step": 2}}\n{{"step": 3}}\n')
    with MetricsLog(path) as log:
        assert log.cut_after(2) == ([2], 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_open_again_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricsLog(path) as log:
            log.write({"step": step})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_open_impossible_path_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl: No such file"):
        MetricsLog(tmp_path / "none" / "metrics.jsonl")


def test_write_that_a_drive_takes_a_part_of_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        real = log._file

        class NearlyFull:
            """Takes three bytes."""

            close, seek, truncate = real.close, real.seek, real.truncate

            def write(self, data: bytes) -> int:
                return real.write(data[:3])

        monkeypatch.setattr(log, "_file", NearlyFull())
        with pytest.raises(ConfigError, match="space"):
            log.write({"step": 1})
        monkeypatch.setattr(log, "_file", real)
        log.write({"step": 2})
    assert path.read_text() == '{"step": 2}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_write_on_full_drive_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(metrics, "_append_to", lambda _: full)
        with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ConfigError, match="No space left"):
            log.write({"step": 1})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.035, "35 ms"),
        (0.9999, "1.00 s"),
        (4.2, "4.20 s"),
        (59.999, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_format_seconds_fits_the_size(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(950, "950"), (2_400_000, "2.40M"), (8.03e9, "8.03B"), (250_000, "250k")])
def test_format_count_fits_the_size(number: float, text: str) -> None:
    assert format_count(number) == text


def test_format_share_of_nothing_is_a_dash() -> None:
    assert (format_share(1, 3), format_share(0, 0)) == ("33.3 %", "-")


def test_cut_after_half_a_line_keeps_what_is_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    with MetricsLog(path) as log:
        assert log.cut_after(2) == ([3], 2)
        log.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_open_of_a_pipe_is_refused_and_one_where_the_log_is_cut_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl: it is no regular file"):
        MetricsLog(path)
    path.unlink()
    os.mkfifo(tmp_path / ".metrics.jsonl.partial")
    with MetricsLog(path) as log:
        log.write({"step": 1})
        log.cut_after(0)
        log.write({"step": 2})
    assert path.read_text() == '{"step": 2}\n'


def test_wavering_says_from_what_to_what_where_that_shows() -> None:
    assert format_range((29.51, 36.44)) == " (29.5 to 36.4 as the drives waver)"
    assert format_range((1.0, 1.0)) == format_range((1.0, 1.0001)) == ""
