"""Torn state: which errors leave something half done, and what is refused after them."""

from __future__ import annotations

import pytest

from megatier.consistency import Consistency
from megatier.errors import ConfigError, StallError, TornStateError


@pytest.mark.parametrize(
    ("error", "tears"), [(StallError(9.0, "stall.txt"), True), (KeyboardInterrupt(), True), (ConfigError("no"), False)]
)
def test_call_is_torn_by_what_a_signal_handler_raises_and_by_no_refusal(error: BaseException, tears: bool) -> None:
    consistency = Consistency()
    with pytest.raises(type(error)), consistency.call:
        raise error
    assert consistency.is_torn is tears
    other = Consistency()
    with pytest.raises(type(error)), other.call, other.waiting():
        raise error
    assert not other.is_torn, "nothing is half done in a wait"


def test_change_is_torn_by_any_error_also_in_a_wait() -> None:
    consistency = Consistency()
    with pytest.raises(ConfigError), consistency.change, consistency.waiting():
        raise ConfigError("no")
    with pytest.raises(TornStateError):
        consistency.check()


def test_state_that_is_overwritten_is_refused_until_all_of_it_is_there() -> None:
    consistency = Consistency()
    with pytest.raises(OSError, match="gone"), consistency.overwriting():
        raise OSError("gone")
    with pytest.raises(TornStateError):
        consistency.check()
    with consistency.overwriting():
        pass
    consistency.check()
