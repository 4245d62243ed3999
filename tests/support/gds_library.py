"""What tests of reads past RAM share: when kvikio can run, and a byte that is damaged."""

from __future__ import annotations

from pathlib import Path

from from_outside import GRANULE_BYTES
from store_blocks import NUM_GRANULES

PADDED = NUM_GRANULES * GRANULE_BYTES


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
