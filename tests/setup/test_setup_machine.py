"""What a run may take of its machine, where GPU memory and RAM are one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_setups import ROUND

from megatier import hardware
from megatier.config.schema import TiersConfig
from megatier.errors import ConfigError
from megatier.hardware import DefaultBudgets, Gpu
from megatier.measure import probe
from megatier.schedule.budgets import Budgets
from megatier.schedule.world import World
from megatier.setup import machine
from megatier.setup.machine import Machine, choose_budgets, limit_gpu

GIB = 1 << 30
UNIFIED = replace(ROUND, gpu_bytes=100.0 * GIB, unified_bytes=100.0 * GIB)
CUDA = torch.device("cuda")


@pytest.fixture
def _integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 100 GiB, of which budgets are 50 and 30 by default."""
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu("NVIDIA GB10", 100 * GIB, 100 * GIB, is_unified=True),))
    monkeypatch.setattr(machine, "ram_total_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(machine, "default_budgets", lambda device: DefaultBudgets(50 * GIB, 30 * GIB))


@pytest.mark.usefixtures("_integrated")
@pytest.mark.parametrize(
    ("gpu", "ram", "expected"),
    [
        (None, None, (50, 30)),
        (20, None, (20, 30)),
        (70, None, (70, 10)),
        (90, None, (90, 0)),
        (None, 10, (50, 10)),
        (None, 60, (20, 60)),
        (80, 20, (80, 20)),
    ],
)
def test_budgets_of_unified_memory_are_divided(gpu: int | None, ram: int | None, expected: tuple[int, int]) -> None:
    tiers = TiersConfig(gpu=gpu and gpu * GIB, ram=ram and ram * GIB)
    assert choose_budgets(tiers, CUDA) == tuple(size * GIB for size in expected)


@pytest.mark.usefixtures("_integrated")
def test_budgets_above_unified_memory_are_refused_here() -> None:
    with pytest.raises(ConfigError, match=r"tiers.gpu is 81.0 GiB and tiers.ram is 20.0 GiB, but .* one memory of 100"):
        choose_budgets(TiersConfig(gpu=81 * GIB, ram=20 * GIB), CUDA)


@pytest.mark.usefixtures("_integrated")
def test_unified_memory_here_is_what_other_programs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    monkeypatch.setattr(machine, "rates_or_assumed", lambda *_: (UNIFIED, ()))
    for available, expected in ((90, 90), (120, 100)):
        monkeypatch.setattr(machine, "ram_available_bytes", lambda available=available: available * GIB)
        here = Machine.here(TiersConfig())
        assert here.rates.unified_bytes == expected * GIB
        assert (here.budgets.gpu, here.budgets.ram) == (50 * GIB, 30 * GIB)


def test_budgets_above_unified_memory_are_refused_elsewhere() -> None:
    for gpu, ram, world in ((81, 20, World()), (41, 20, World(2))):
        with pytest.raises(ConfigError, match="one memory of 100"):
            Machine.elsewhere(TiersConfig(), UNIFIED, Budgets(gpu * GIB, ram * GIB, 0), world)
    assert Machine.elsewhere(TiersConfig(), UNIFIED, Budgets(80 * GIB, 20 * GIB, 0)).rates is not None


def test_budgets_of_a_gpu_with_its_own_memory_are_apart() -> None:
    rates = replace(UNIFIED, unified_bytes=None)
    Machine.elsewhere(TiersConfig(), rates, Budgets(90 * GIB, 90 * GIB, 0))
    assert rates.gpu_bytes_beside(90 * GIB) == 100 * GIB
    assert UNIFIED.gpu_bytes_beside(90 * GIB) == 10 * GIB
    assert UNIFIED.gpu_bytes_beside(200 * GIB) == 0


def test_limit_of_a_gpu_is_refused_where_its_memory_is_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        is_integrated = 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    with pytest.raises(ConfigError, match=r"tiers.gpu_limit is 1.0 GiB, but the memory of this GPU is RAM"):
        limit_gpu(GIB)


def test_rates_of_an_integrated_gpu_have_the_memory_that_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("NVIDIA GB10", 100, 90, compute_capability=12.1)
    monkeypatch.setattr(hardware, "ram_total_bytes", lambda root=None: 95)
    for is_unified, expected in ((True, 95.0), (False, None)):
        found = replace(card, is_unified=is_unified)
        monkeypatch.setattr(hardware, "gpus", lambda found=found: (found,))
        rates, assumed = probe.rates_or_assumed([], "cuda")
        assert rates.unified_bytes == expected
        assert "unified_bytes" not in assumed
