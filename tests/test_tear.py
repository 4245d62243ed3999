"""Tears: which errors leave something half done, and what is refused after them."""

from __future__ import annotations

import pytest

from megatier.errors import ConfigError, StallError, TornStateError
from megatier.tear import Tear


@pytest.mark.parametrize(
    ("error", "tears"), [(StallError(9.0, "stall.txt"), True), (KeyboardInterrupt(), True), (ConfigError("no"), False)]
)
def test_call_is_torn_by_what_a_signal_handler_raises_and_by_no_refusal(error: BaseException, tears: bool) -> None:
    tear = Tear()
    with pytest.raises(type(error)), tear.call:
        raise error
    assert tear.is_torn is tears
    other = Tear()
    with pytest.raises(type(error)), other.call, other.waiting():
        raise error
    assert not other.is_torn, "nothing is half done in a wait"


def test_change_is_torn_by_any_error_also_in_a_wait() -> None:
    tear = Tear()
    with pytest.raises(ConfigError), tear.change, tear.waiting():
        raise ConfigError("no")
    with pytest.raises(TornStateError):
        tear.check()


def test_state_that_is_overwritten_is_refused_until_all_of_it_is_there() -> None:
    tear = Tear()
    with pytest.raises(OSError, match="gone"), tear.overwriting():
        raise OSError("gone")
    with pytest.raises(TornStateError):
        tear.check()
    with tear.overwriting():
        pass
    tear.check()
