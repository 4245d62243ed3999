"""Numbers of bytes as people read them."""

from __future__ import annotations

UNITS = ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)


def format_bytes(num_bytes: float) -> str:
    """Return bytes as "26.0 MiB" or "512 B". Medians and means may leave them with a fraction."""
    whole = round(num_bytes)
    for unit, scale in UNITS:
        if whole >= scale:
            return f"{whole / scale:.1f} {unit}"
    return f"{whole} B"


def format_bytes_up(num_bytes: int) -> str:
    """Return the same, rounded up, so that a minimum is enough when it is typed in."""
    for unit, scale in UNITS:
        if num_bytes >= scale:
            # Divided as whole numbers, because a float may come out a little too small.
            return f"{-(-10 * num_bytes // scale) / 10:.1f} {unit}"
    return f"{num_bytes} B"
