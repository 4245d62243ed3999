"""Collectives: what a gradient on its way to the other ranks tells whoever waits for it."""

from __future__ import annotations

import pytest

from megatier.errors import StepAbandonedError
from megatier.play.collectives import Handover
from megatier.schedule.timeline import ReduceScatter


def test_handover_that_is_abandoned_twice_stays_abandoned() -> None:
    handover = Handover(ReduceScatter(unit="u0", group=0, after_access=0, width=4))
    handover.abandon()
    handover.abandon()
    assert not handover.is_given
    with pytest.raises(StepAbandonedError):
        handover.wait()


def test_handover_that_was_given_stays_given() -> None:
    handover = Handover(ReduceScatter(unit="u0", group=0, after_access=0, width=4))
    handover.give(None)
    handover.abandon()
    assert handover.is_given
    handover.wait()
