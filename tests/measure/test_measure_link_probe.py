"""What a probe says of links and processors."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from probe_figures import LINKS, SECONDS

from megatier.compute.fp8 import FP8_FROM
from megatier.hardware import Gpu
from megatier.measure import link_probe
from megatier.measure.link_probe import CopyFigures
from megatier.measure.link_traffic import COPY_PIECES, CopyTraffic, UpdateTraffic
from megatier.schedule.rates import UPDATE_BYTES


def test_probe_links_on_the_cpu_measures_all() -> None:
    links = link_probe.probe_links(
        "cpu", [2, 1, 2], seconds=SECONDS, copy_bytes=1 << 20, update_elements=1 << 16, matmul_size=64
    )
    assert [update.threads for update in links.updates] == [1, 2]
    rows = [dataclasses.astuple(copies)[1:] for copies in links.copies]
    assert links.rings is not None
    rows.append(dataclasses.astuple(links.rings)[1:])
    rows += [dataclasses.astuple(update) for update in links.updates]
    assert all(number > 0 for row in rows for number in row)
    assert links.gpu_update_parameters_per_s == links.updates[-1].parameters_per_s
    assert links.flops_per_s == links.matmul_flops_per_s > 0
    assert "no GPU: the native memory copy stands for the link" in links.notes[0]
    assert not links.flags


def test_probe_links_copies_no_more_than_can_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, bool]] = []
    init = CopyTraffic.__init__

    def noted(self: CopyTraffic, device: torch.device, num_bytes: int, *, through_rings: bool = False) -> None:
        sizes.append((num_bytes, through_rings))
        init(self, device, num_bytes, through_rings=through_rings)

    monkeypatch.setattr(CopyTraffic, "__init__", noted)
    links = link_probe.probe_links(
        "cpu",
        [1],
        seconds=SECONDS,
        locked_bytes=1 << 20,
        copy_bytes=1 << 20,
        update_elements=1 << 16,
        matmul_size=64,
    )
    assert sizes == [(1 << 20, True), (1 << 18, False)]
    assert links.locked_bytes == 1 << 20


@pytest.mark.gpu
def test_probe_links_on_the_gpu_measures_all() -> None:
    links = link_probe.probe_links(
        "cuda", [1], seconds=0.1, copy_bytes=64 << 20, update_elements=1 << 22, matmul_size=1024
    )
    assert len(links.copies) == torch.cuda.device_count()
    assert links.copies[0].device == torch.cuda.get_device_name(0)
    assert 0 < links.flops_per_s < links.matmul_flops_per_s
    assert (links.fp8_flops_per_s is not None) == (torch.cuda.get_device_capability() >= FP8_FROM)
    assert links.gpu_update_parameters_per_s > 0
    assert not links.flags


def test_layers_on_a_gpu_count_at_their_share_of_a_sustained_product() -> None:
    product, layers = 662e12, 596e12  # an H200, both for seconds: docs/log/2026-11.md
    assert product * link_probe.LAYER_EFFICIENCY["cuda"] == pytest.approx(layers, rel=0.01)
    assert link_probe.link_notes(Gpu("card", 2, 1)) == (
        "flops_per_s: 0.9 of a sustained bf16 product, as measured for layers of 8B shape on an H200",
    )


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu("card", 2, 1, is_unified=True), "unified memory"),
        (Gpu("card", 2, 1, is_coherent=True), "NVLink-C2C"),
    ],
    ids=["unified", "coherent"],
)
def test_notes_on_links_say_if_memory_is_unified_or_the_link_is_coherent(gpu: Gpu, words: str) -> None:
    *_, note = link_probe.link_notes(gpu)
    assert words in note


def test_memory_of_an_integrated_gpu_carries_each_copied_byte_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"update": 1.0, "to_gpu": 2.0, "to_ram": 3.0}
    monkeypatch.setattr(link_probe, "at_once", lambda *_: rates)
    monkeypatch.setattr(link_probe, "alone", lambda *_: 1.0)
    with CopyTraffic(torch.device("cpu"), 1 << 20) as copies, UpdateTraffic(torch.device("cpu"), 1 << 10) as update:
        once, twice = (link_probe._update_figures(update, copies, 1, SECONDS, ends) for ends in (1, 2))
    assert once.shared_memory_bytes_per_s == UPDATE_BYTES + 5
    assert twice.shared_memory_bytes_per_s == UPDATE_BYTES + 10


def test_copies_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    with CopyTraffic(torch.device("cpu"), 1 << 20) as copies:
        half = copies._way_bytes
        copies._host.bytes[:half].fill_(1)
        copies._device.bytes[half:].fill_(2)
        turns = itertools.count()
        assert copies.to_gpu(lambda: next(turns) >= COPY_PIECES) > 0
        assert copies.to_ram(lambda: next(turns) >= 3 * COPY_PIECES) > 0
        assert copies._device.bytes[:half].unique().tolist() == [1]
        assert copies._host.bytes[half:].unique().tolist() == [2]


def test_updates_keep_numbers_finite() -> None:
    turns = itertools.count()
    with UpdateTraffic(torch.device("cpu"), 1 << 16) as update:
        update.on_cpu(2, lambda: next(turns) >= 1000)
        moments = update._arena.bytes[4 << 16 : 12 << 16].view(torch.float32)
        assert bool(moments.isfinite().all())
        assert not math.isclose(float(moments[0]), 0.0114, rel_tol=1e-6)


def test_link_flags_tell_what_no_link_carries() -> None:
    assert not link_probe.link_flags(LINKS)
    fast = dataclasses.replace(
        LINKS,
        copies=(
            CopyFigures(
                device="X",
                to_gpu_bytes_per_s=1e9,
                to_ram_bytes_per_s=500e9,
                to_gpu_both_bytes_per_s=1.0,
                to_ram_both_bytes_per_s=1.0,
            ),
        ),
    )
    assert link_probe.link_flags(fast) == ("X: copies at 500 GB/s, more than any link carries",)
