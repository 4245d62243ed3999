"""The pool of processes that stand for ranks."""

from __future__ import annotations

import os

import pytest
from rank_pool import POOL


def variable(name: str) -> str | None:
    """An environment variable, as a rank sees it."""
    return os.environ.get(name)


def test_rank_has_the_environment_of_the_test_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "first")
    assert POOL.run(variable, 2, "OF_THIS_TEST") == ["first"] * 2

    # The processes stay. They must not keep what they were started with.
    monkeypatch.delenv("OF_THIS_TEST")
    assert POOL.run(variable, 2, "OF_THIS_TEST") == [None] * 2
    assert POOL.run(variable, 2, "RANK") == ["0", "1"]
