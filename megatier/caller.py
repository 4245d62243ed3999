"""Warnings that point at the line of the user's program that has called megatier."""

from __future__ import annotations

import sys
import warnings

PASSED = ("megatier", "contextlib")
"""Modules on the way from the user's line. Python's own lies between where one of our functions is decorated."""


def warn(text: str) -> None:
    """Warn at the innermost line outside of megatier."""
    # To `warnings`, 1 is the line that calls it, which is below, and 2 is that of the caller.
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED:
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
