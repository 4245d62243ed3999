"""The measured rates of one drive. `megatier bench` measures them, and `Rates` holds those of all drives. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """The rates of one drive, measured through the store's own block files."""

    directory: str
    """A directory on the drive, or a name for it."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Bytes read plus bytes written a second when both go on at once, in the proportions of an update. A full-duplex
    drive reaches up to the sum of both rates."""
    io_threads: int | None = None
    """Native I/O threads in each direction during the measurement; None: not known."""
    first_write_bytes_per_s: float | None = None
    """Rate of writing new bytes of a file, as a checkpoint does; None: not known."""
    mixed_low_bytes_per_s: float | None = None
    """The mixed rate in the slowest seconds of the measurement; None: not known. mixed_bytes_per_s is the median."""
    mixed_high_bytes_per_s: float | None = None
    """The mixed rate in the fastest seconds; None: not known."""

    def times(self, factor: float) -> DriveRates:
        """Return the drive with all rates multiplied by a factor."""
        # Slow, usual and fast seconds vary together, so one factor changes all rates.
        rates = {}
        for field in dataclasses.fields(self):
            rate = getattr(self, field.name)
            if field.name.endswith("_per_s") and rate is not None:
                rates[field.name] = rate * factor
        return dataclasses.replace(self, **rates)
