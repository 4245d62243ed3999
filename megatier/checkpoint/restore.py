"""Restores the state of a session from the arrays of a checkpoint, several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from megatier.checkpoint.checkpoint import (
    check_moments,
    check_parameters,
    list_arrays,
    list_tensors,
    make_chunk_files,
    open_arrays,
)
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import StoredArray
from megatier.errors import CheckpointError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.session.filling import Source
from megatier.session.session import Session
from megatier.state import ARRAYS, MASTERS
from megatier.tier import Kind

READERS_MAX = 4
"""Arrays that are restored at once, if there are as many cores. Each takes 1.8 GB/s, so more would wait for drives, and
their buffers are in no budget."""
STAGED_EACH = 3
"""Staging buffers for each of them: one is checked and taken, two arrive."""


def restore(
    session: Session,
    path: Path,
    progress: Callable[[Unit], None] = lambda _: None,
    take_rest: Callable[[], None] = lambda: None,
    weights_only: bool = False,
) -> None:
    """Fill the whole state of a run, also after something broke off while state was changed.

    A rank reads the elements of its shards. It does not matter how many ranks have written them. The base of adapters
    stays as it is, so it has to be loaded before.

    Args:
        session: sealed.
        path: the checkpoint.
        progress: is called after each unit.
        take_rest: takes what belongs to the state and is no array. If it fails, the state is torn.
        weights_only: fill the masters alone; moments stay as they are, so the state must not be torn.

    Raises:
        CheckpointError: the arrays are not those of this model or checkpoint, or damaged.
        TransferError: the drive failed.
    """
    root = path.resolve()
    check_parameters(path, session.whole_units)

    # Looked at first, so that a run whose moments are missing is refused before its state is touched.
    for name, parameter in list_arrays(session.whole_units):
        if not (root / name / parameter).exists() and (root / MASTERS / parameter).exists():
            raise CheckpointError(
                f"{path} has no moments of {parameter}, which was frozen in its run. Freeze it as before, or export "
                "the checkpoint and begin a run with that model."
            )

    # Metadata that does not fit is refused on all ranks while each has its whole state.
    all_ranks = session.all_ranks
    with all_ranks.failing_together():
        arrays = open_arrays(path, list_arrays(session.own_units))

        if weights_only:
            check_moments(path, session.whole_units)

    # If something breaks off in here, also on another rank, the state is torn until it is loaded again. `loading` is
    # outermost, so that it sees the error of another rank, which `failing_together` raises here.
    with session.player.loading(), all_ranks.failing_together():
        _fill(session, arrays, progress, (MASTERS,) if weights_only else ARRAYS)
        take_rest()


def _fill(
    session: Session,
    arrays: dict[tuple[str, str], StoredArray],
    progress: Callable[[Unit], None],
    groups: Collection[str],
) -> None:
    """Fill state from groups of arrays, in as many threads as cores and a few arrays at once keep busy."""
    threads = min(session.num_cores, READERS_MAX)
    with ExitStack() as stack:
        idle: SimpleQueue[ChunkFiles] = SimpleQueue()
        for _ in range(threads):
            idle.put(stack.enter_context(make_chunk_files(arrays.values(), STAGED_EACH)))

        @contextmanager
        def open_pieces(name: str, tensors: Sequence[TensorSlice]) -> Iterator[Iterator[tuple[int, Tensor]]]:
            files = idle.get()
            try:
                # Units that hold parts of one parameter read their own elements of its array alone.
                places = [arrays[name, tensor.name] for tensor in tensors]
                with closing(files.read(places, [tensor.elements for tensor in tensors])) as pieces:
                    yield ((tensors[i].place(first), values) for i, first, values in pieces)
            finally:
                idle.put(files)

        def sources(unit: Unit) -> list[tuple[Sequence[Kind], Source]]:
            named = {name: list_tensors(unit.layout, name) for name in groups}
            return [
                (planes, partial(open_pieces, name, named[name]))
                for name, planes in unit.layout.schema.arrays.items()
                if named.get(name)
            ]

        session.fill_arrays(sources, threads, progress)
