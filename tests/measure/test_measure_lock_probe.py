"""The limit of pinned RAM, as it is found by trying."""

from __future__ import annotations

import pytest
import torch
from small_driver import SmallDriver, check_codes_alone

from megatier.measure import lock_probe
from megatier.page_lock import SPARE_PIECES

MIB = 1 << 20


@pytest.mark.parametrize("most", [None, 32 * MIB, 20 * MIB + 4096, 2 * MIB, 0])
def test_limit_that_is_found_leaves_torch_a_few_bytes(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SmallDriver(1 << 40, 1 << 40 if most is None else most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr("megatier.page_lock.LOCK_STEP_BYTES", 2 * MIB)
    monkeypatch.setattr(lock_probe, "LOCK_TRIAL_BYTES", 48 * MIB)
    check_codes_alone(monkeypatch)
    found = lock_probe.locked_limit()
    assert found == (None if most is None else max(0, (most // (2 * MIB) - SPARE_PIECES) * 2 * MIB))
    assert not driver.locked


@pytest.mark.gpu
def test_limit_of_a_gpu_is_none_or_much() -> None:
    found = lock_probe.locked_limit()
    assert found is None or found > 64 * MIB

    # An error that the driver kept would come out here.
    assert int(torch.ones(3, dtype=torch.int64, device="cuda").sum()) == 3
