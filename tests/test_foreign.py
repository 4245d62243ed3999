"""Whatever a foreign library raises over a file is an error of ours, and no interrupt is."""

from __future__ import annotations

import pytest

from megatier import foreign
from megatier.errors import ConfigError, DataError


class PanicException(BaseException):
    """No Exception, like the one that cannot be imported."""


@pytest.mark.parametrize(
    "error", [PanicException("out of bounds\nat x.rs"), MemoryError(), AssertionError(), RecursionError("deep")]
)
def test_whatever_a_foreign_library_raises_is_an_error_of_ours(error: BaseException) -> None:
    found = pytest.raises(DataError, match=r"^/m: reading: \w[^\n]*\. Give another\.$")
    with found as caught, foreign.reading("/m: reading", DataError, remedy="Give another."):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_interrupt_goes_through_the_wall(error: BaseException) -> None:
    with pytest.raises(type(error)), foreign.reading("/m", DataError):
        raise error


def test_error_of_ours_goes_through_the_wall_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^mine$"), foreign.reading("/m", DataError):
        raise ConfigError("mine")
