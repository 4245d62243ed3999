"""The picture of a machine: bars as long as rates, a curve with its knee, and what is not to be believed."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from megatier.measure.drive_probe import DriveFigures
from megatier.measure.drive_traffic import Flow
from megatier.measure.link_probe import CopyFigures, LinkFigures, UpdateFigures
from megatier.report.probe_picture import INSIDE, LEFT, MIXED, PLOT, READ, UPDATE_COLOUR, WRITE, draw
from megatier.report.svg import WIDTH

SVG = "{http://www.w3.org/2000/svg}"
GB = 1e9


def flow(bytes_per_s: float) -> Flow:
    return Flow(num_bytes=int(10 * bytes_per_s), seconds=10.0, p50_ms=12.3, p99_ms=45.6, device_bytes=None)


DRIVE = DriveFigures(
    directory="/mnt/a",
    device="nvme0n1",
    logical_block_bytes=512,
    num_drives=1,
    file_system="ext4",
    is_direct=True,
    alignment_bytes=4096,
    size_bytes=8 << 30,
    block_bytes=32 << 20,
    read=flow(4 * GB),
    write=flow(2 * GB),
    mixed=flow(3 * GB),
    sustained_bytes_per_s=(),
    knee_bytes=None,
)
LINKS = LinkFigures(
    device="cuda",
    copies=(
        CopyFigures(
            device="card",
            to_gpu_bytes_per_s=50 * GB,
            to_ram_bytes_per_s=40 * GB,
            to_gpu_both_bytes_per_s=25 * GB,
            to_ram_both_bytes_per_s=20 * GB,
        ),
    ),
    updates=(
        UpdateFigures(
            threads=1,
            parameters_per_s=1 * GB,
            memory_bytes_per_s=26 * GB,
            shared_parameters_per_s=0.5 * GB,
            shared_to_gpu_bytes_per_s=GB,
            shared_to_ram_bytes_per_s=GB,
            shared_memory_bytes_per_s=GB,
        ),
        UpdateFigures(
            threads=2,
            parameters_per_s=2 * GB,
            memory_bytes_per_s=52 * GB,
            shared_parameters_per_s=GB,
            shared_to_gpu_bytes_per_s=GB,
            shared_to_ram_bytes_per_s=GB,
            shared_memory_bytes_per_s=GB,
        ),
    ),
    gpu_update_parameters_per_s=GB,
    matmul_flops_per_s=GB,
    flops_per_s=GB,
)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str, colour: str) -> list[float]:
    """How long bars of a colour are, as shares of the longest there could be."""
    found = [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("fill") == colour]
    assert all(float(rect.get("x") or 0) == LEFT for rect in found)
    return [round(float(rect.get("width") or 0) / PLOT, 3) for rect in found]


def test_draw_needs_nothing_but_itself() -> None:
    svg = draw([DRIVE], LINKS, "a & b")
    root = ElementTree.fromstring(svg)
    assert root[0].text == "a & b"
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "text", "path"}
    assert "href" not in svg
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x") or -1) <= WIDTH
        assert 0 <= float(element.get("y") or -1) <= float(root.get("height") or 0)


def test_draw_bars_are_as_long_as_rates() -> None:
    svg = draw([DRIVE], LINKS, "bench")
    assert bars(svg, READ) == [1.0, 1.0], "a drive's reads; copies to the GPU"
    assert bars(svg, WRITE) == [0.5, 0.8], "a drive's writes; copies to RAM"
    assert bars(svg, MIXED) == [0.75]
    assert bars(svg, UPDATE_COLOUR) == [0.5, 1.0]
    assert bars(svg, INSIDE) == [0.5, 0.4, 0.25, 0.5]


def test_draw_drives_share_a_scale() -> None:
    slow = dataclasses.replace(DRIVE, directory="/mnt/b", read=flow(1 * GB), write=flow(1 * GB), mixed=flow(1 * GB))
    assert bars(draw([DRIVE, slow], LINKS, "bench"), MIXED) == [0.75, 0.25]


def test_draw_figures_stand_beside_the_bars() -> None:
    found = texts(draw([DRIVE], LINKS, "bench"))
    assert "/mnt/a: nvme0n1, ext4, O_DIRECT, blocks of 32.0 MiB" in found
    start = found.index("mixed 14:12")
    assert found[start : start + 4] == ["mixed 14:12", "3.00", "12.3 ms", "45.6 ms"]
    start = found.index("2 threads")
    assert found[start : start + 3] == ["2 threads", "2.00", "1.00"]
    assert "card: GPU to RAM" in found


def test_draw_without_drives_or_gpu_has_links_alone() -> None:
    found = texts(draw([], dataclasses.replace(LINKS, device="cpu"), "bench"))
    assert "native copy: RAM to GPU" in found
    assert not any("GiB written" in words for words in found)


def test_draw_long_write_is_a_curve_with_its_knee() -> None:
    rates = (4 * GB, 4 * GB, 1 * GB, 1 * GB)
    svg = draw([dataclasses.replace(DRIVE, sustained_bytes_per_s=rates, knee_bytes=2 << 30)], LINKS, "bench")
    (curve,) = (path.get("d") or "" for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("fill"))
    levels = [float(level) for level in re.findall(r"V([\d.]+)", curve)]
    assert [float(x) for x in re.findall(r"H([\d.]+)", curve)] == [LEFT + PLOT * part / 4 for part in (1, 2, 3, 4)]
    assert levels[0] == levels[1] < levels[2] == levels[3]
    (knee,) = (p.get("d") or "" for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("stroke-dasharray"))
    assert knee.startswith(f"M{LEFT + PLOT / 2:.1f} ")
    assert "write cache ends after 2.0 GiB" in texts(svg)
    assert "1.00 to 4.00 GB/s" in texts(svg)


@pytest.mark.parametrize("rates", [(), (4 * GB,)])
def test_draw_short_write_is_no_curve(rates: tuple[float, ...]) -> None:
    found = texts(draw([dataclasses.replace(DRIVE, sustained_bytes_per_s=rates)], LINKS, "bench"))
    assert not any("GiB written" in words for words in found)


def test_draw_long_write_without_a_knee_says_so() -> None:
    svg = draw([dataclasses.replace(DRIVE, sustained_bytes_per_s=(GB, GB))], LINKS, "bench")
    assert "no knee" in texts(svg)
    assert "stroke-dasharray" not in svg


def test_draw_flags_are_told_in_red() -> None:
    svg = draw([dataclasses.replace(DRIVE, flags=("a <cache>",))], dataclasses.replace(LINKS, flags=("odd",)), "bench")
    red = [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}text") if t.get("fill")]
    assert red == ["not to be believed: a <cache>", "not to be believed: odd"]
