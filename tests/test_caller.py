"""Warnings point at the line outside of megatier that led to them: `session.kept_code` and `stream` are tried so."""

from __future__ import annotations

import pytest

from megatier.caller import warn


def test_warn_points_at_the_line_outside_of_megatier() -> None:
    with pytest.warns(UserWarning, match="look here") as caught:
        warn("look here")
    assert caught[0].filename == __file__
