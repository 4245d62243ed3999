"""The blocks of state that make up a savepoint: where they lie, and how those outside NVMe are written and read back.

A block at home on NVMe stays where it is: its savepoint is a generation that is kept, with a checksum for each of its
granules. A block at home in RAM or on the GPU is copied into a file. Files hold 32-bit words, which are the bytes of
the block whatever they mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatier.checkpoint.arrays import ArrayWriter
from megatier.checkpoint.checkpoint import NUM_READING_THREADS
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid, StoredArray
from megatier.checkpoint.manifest import Manifest, digest_of
from megatier.drives.extent import Extent
from megatier.play.unit_blocks import block_key
from megatier.session.session import Session
from megatier.tier import Kind, Tier

SAVED_STATE_FOLDER = "state"
"""Folder of a savepoint with the blocks that are written to it."""
CHECKSUM_FOLDER = "checksums"
"""Folder of a savepoint with the checksums of the blocks that stay on NVMe."""
WORD_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidBlock:
    """A block of state in the generation that is valid."""

    name: str
    """Its name, which is the same for all generations."""
    key: str
    """Its key in the store, which names the generation too."""
    num_bytes: int
    """Its size."""
    home: Tier
    """The tier where it lies."""


def resident_bytes(session: Session) -> int:
    """Return the bytes of the blocks that a savepoint of this run writes."""
    return sum(block.num_bytes for block in _resident_blocks(session))


def fingerprint(session: Session) -> str:
    """Return a digest of where every block of state lies, in all of its generations on NVMe."""
    # A digest is compared, and no place is read from the manifest: a writer of that cannot lead a run to other
    # bytes than its own plan names.
    blocks = session.blocks
    lies: dict[str, Any] = {}
    for (unit, kind), home in session.placement.homes.items():
        stripes = []

        # Blocks in memory are written out, so it does not matter where they lie.
        places = blocks.generations.places(unit, kind) if home is Tier.NVME else ()
        for place in places:
            extent = session.store.extents[block_key(unit, kind, place)]
            stripes.append([astuple(stripe) for stripe in extent.stripes])

        _, size = blocks.whole(unit, kind)
        lies[block_key(unit, kind)] = [str(home), size, stripes]
    return digest_of(lies)


def write_blocks(session: Session, folder: Path) -> tuple[int, dict[str, list[int]]]:
    """Write every block that is not on NVMe into a folder, and the checksums of those that are.

    Returns:
        The bytes written, and the checksums of the files by the array that they belong to.

    Raises:
        TransferError: writing failed.
    """
    resident = _resident_blocks(session)

    # The checksums of all blocks on NVMe are written as one array, block after block.
    tables = [extent.checksums for extent in _spilled_extents(session)]
    table = np.concatenate(tables or [np.zeros(0, np.uint32)])

    # Staging buffers are made once for all of them, as large as the largest needs.
    sizes = [block.num_bytes for block in resident]

    checksums: dict[str, list[int]] = {}
    with _files([*sizes, table.nbytes]) as files:
        for block in resident:
            node = f"{SAVED_STATE_FOLDER}/{block.name}"
            with session.store.lease(block.key, block.home) as lease:
                words = lease.bytes.view(torch.int32)
                checksums[node] = _write_words(files, folder / node, words)

        if table.size:
            words = torch.from_numpy(table.view(np.int32))
            checksums[CHECKSUM_FOLDER] = _write_words(files, folder / CHECKSUM_FOLDER, words)
        files.flush()

    return sum(sizes) + table.nbytes, checksums


def read_blocks(session: Session, folder: Path, manifest: Manifest | None) -> None:
    """Put back what `write_blocks` wrote.

    Args:
        session: its blocks lie where they lay when they were written.
        folder: the savepoint, with all links resolved.
        manifest: the checksums of its files; None if an older version wrote it.

    Raises:
        DamagedCheckpointError: a file is missing, or holds something else than was written to it.
        TransferError: the drive failed.
    """
    resident = _resident_blocks(session)
    extents = _spilled_extents(session)
    table = np.zeros(sum(extent.checksums.size for extent in extents), np.uint32)

    # The checksums come last, so the number of an array tells whether it is one of them or a block.
    sizes = {f"{SAVED_STATE_FOLDER}/{block.name}": block.num_bytes for block in resident}
    if table.size:
        sizes[CHECKSUM_FOLDER] = table.nbytes
    arrays = [_array(manifest, folder, node, size) for node, size in sizes.items()]

    with _files(sizes.values()) as files:
        for index, first, words in files.read(arrays):
            values = words.view(torch.uint8)
            start = WORD_BYTES * first
            stop = start + values.numel()
            if index == len(resident):
                table.view(np.uint8)[start:stop] = values.numpy()
                continue

            block = resident[index]
            with session.store.lease(block.key, block.home, (start, stop), fresh=True) as lease:
                lease.bytes.copy_(values)
            session.store.mark_dirty(block.key, block.home, (start, stop))
            session.filling.num_runs += 1

    # The store compares what it reads from NVMe with these from now on.
    for extent in extents:
        # The numbers are replaced and not the array, whose address native threads may have.
        extent.checksums[:] = table[: extent.checksums.size]
        table = table[extent.checksums.size :]


def verify_spilled(session: Session) -> None:
    """Read everything that was kept on NVMe once, a chunk ahead; the store compares it with its checksums.

    Raises:
        IntegrityError: a granule is damaged.
        TransferError: a drive failed.
    """
    blocks = session.blocks
    store = session.store
    chunks: list[tuple[str, tuple[int, int], list[Kind]]] = []

    # Cut as updates cut it, so that every chunk fits the slots that there are.
    for unit in blocks.units:
        spilled = blocks.spilled(unit)
        for elements, kinds in blocks.runs(unit):
            on_nvme = [kind for kind in kinds if kind in spilled]
            if on_nvme:
                chunks.append((unit, elements, on_nvme))

    # The store verifies whatever it reads, so it is enough to lease every chunk.
    for index, (unit, elements, on_nvme) in enumerate(chunks):
        for name, ahead, ahead_kinds in chunks[index + 1 : index + 2]:
            for kind in ahead_kinds:
                span = blocks.span(name, kind, ahead)

                # Drives read the next chunk while this one is verified.
                store.prefetch(blocks.key(name, kind), Tier.RAM, span, wait=True)
        with blocks.open_state(unit, elements, on_nvme):
            pass


def _valid_blocks(session: Session) -> list[ValidBlock]:
    """Return all blocks of state, in an order that is the same in every process."""
    blocks = session.blocks
    valid = []
    for (unit, kind), home in sorted(session.placement.homes.items()):
        _, size = blocks.whole(unit, kind)
        key = blocks.key(unit, kind)
        valid.append(ValidBlock(name=block_key(unit, kind), key=key, num_bytes=size, home=home))
    return valid


def _resident_blocks(session: Session) -> list[ValidBlock]:
    """Return the blocks that do not lie on NVMe."""
    return [block for block in _valid_blocks(session) if block.home is not Tier.NVME]


def _spilled_extents(session: Session) -> list[Extent]:
    """Return the extents of the blocks that lie on NVMe, each of the generation that is valid."""
    return [session.store.extents[block.key] for block in _valid_blocks(session) if block.home is Tier.NVME]


def _write_words(files: ChunkFiles, folder: Path, words: Tensor) -> list[int]:
    """Write int32 [n] as an array, and return the checksum of each of its files."""
    writer = ArrayWriter(files, folder, Grid.of(words.shape))
    for first, target in writer.buffers(0, words.numel()):
        # As words and not as fp32: whether a copy keeps every NaN is up to the processor.
        stop = first + target.numel()
        target_words = target.view(torch.int32)
        target_words.copy_(words[first:stop])
    return list(writer.checksums.values())


def _array(manifest: Manifest | None, folder: Path, node: str, num_bytes: int) -> StoredArray:
    """Return where an array of so many bytes lies, with its checksums if there is a manifest that has them."""
    grid = _grid(num_bytes)
    if manifest is None:
        return StoredArray(folder / node, grid)
    return manifest.array(folder, node, grid, has_metadata=False)


def _grid(num_bytes: int) -> Grid:
    return Grid.of((num_bytes // WORD_BYTES,))


def _files(sizes: Iterable[int]) -> ChunkFiles:
    """Open staging buffers that take the chunks of arrays of these bytes."""
    largest = max(_grid(size).chunk_elements for size in sizes if size)
    return ChunkFiles(largest, NUM_READING_THREADS)
