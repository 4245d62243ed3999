"""Random weights of a measurement: one piece, repeated, in the blocks of a session or in a model's folder.

Speed does not depend on values, and a real initialisation takes longer than the steps. Which element lies where goes by
its number in its parameter, so both ways, and any placement, give the same losses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peers.shapes import SHAPES, model_config
from torch import Tensor

from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, build_skeleton, find_units
from megatier.models.export import export
from megatier.models.weights import READ_ELEMENTS, WeightReader
from megatier.session.session import Session
from megatier.tier import Kind

SHARD_BYTES = 5 * 10**9
"""The most bytes of a file of a base, unless one tensor is larger."""


def random_piece() -> Tensor:
    """Return the piece: [16M] in bf16."""
    drawn = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02
    return drawn.to(torch.bfloat16)


def lay(piece: Tensor, part: Tensor, tensor: TensorSlice, first: int) -> None:
    """Lay a piece into a part of a matrix again and again, or ones into a part of a norm.

    Args:
        piece: [m].
        part: [n], overwritten.
        tensor: the parameter, as a unit's layout has it.
        first: the number of the part's first element in the layout.
    """
    if len(tensor.parameter_shape) == 1:
        part.fill_(1)
        return
    number = tensor.offset + first - tensor.start
    done = 0
    while done < part.numel():
        source = piece[(number + done) % piece.numel() :][: part.numel() - done]
        part[done : done + source.numel()].copy_(source)
        done += source.numel()


@torch.no_grad()
def fill(session: Session, *, trained_only: bool = False) -> None:
    """Lay weights into a session.

    Args:
        session: its moments are zeros.
        trained_only: whether its weights are there already, of which those that are frozen stay.
    """
    # Planes lie on the GPU or in RAM, so the piece does so too.
    drawn = random_piece()
    device = session.engine.options.device
    pieces = {"cpu": drawn, device.type: drawn.to(device)}
    for unit in session.own_units:
        # Remainders are zeros, unless they belong to weights that are overwritten.
        kinds = unit.layout.schema.master_kinds if trained_only else (Kind.WEIGHT,)
        for elements, _ in session.blocks.runs(unit.name):
            if trained_only and elements[0] >= unit.layout.num_trained:
                continue
            with session.blocks.open_state(unit.name, elements, kinds, fresh=kinds) as state:
                for kind in kinds:
                    if kind is not Kind.WEIGHT:
                        state.planes[kind].zero_()
                plane = state.planes[Kind.WEIGHT].view(torch.bfloat16)
                for tensor in unit.layout.tensors:
                    # These elements hold a part of the tensor, all of it, or nothing: then there is nothing to lay.
                    start = max(tensor.start, elements[0])
                    stop = min(tensor.stop, elements[1])
                    if start < stop:
                        part = plane[start - elements[0] : stop - elements[0]]
                        lay(pieces[plane.device.type], part, tensor, start)

                state.write_back()

        # No update carries frozen weights over.
        session.blocks.share_frozen(unit.name)

    session.player.drain()


def load(session: Session, reader: WeightReader, folder: Path) -> None:
    """Load all weights from a base's folder as a run does, and lay those that are trained."""
    session.load(reader)
    drop_cached(folder)
    fill(session, trained_only=True)


@contextmanager
def written_base(shape: str, sequence: int, directory: Path | None) -> Iterator[Path]:
    """Write a model's folder with these weights in bf16, and leave nothing of it in the page cache.

    Args:
        shape: a name in `peers.shapes.SHAPES`.
        sequence: tokens of a sequence.
        directory: on the drive to measure.

    Yields:
        The folder, which is removed in the end.
    """
    with TemporaryDirectory(prefix="base-", dir=directory) as parent:
        folder = Path(parent) / shape
        began = time.perf_counter()
        model = build_skeleton(model_config(SHAPES[shape], sequence), "sdpa")
        drawn = random_piece()
        read = partial(_laid, torch.cat([drawn, drawn[:READ_ELEMENTS]]))
        export(folder, model, find_units(model), read, torch.bfloat16, SHARD_BYTES)
        drop_cached(folder)
        print(f"base written in {time.perf_counter() - began:.1f} s", flush=True)
        yield folder


def drop_cached(folder: Path) -> None:
    """Drop the pages of a folder's files from the page cache. They are on the drive already."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _laid(piece: Tensor, unit: Unit, start: int, stop: int) -> Tensor:
    """Return elements of a unit's layout that lie in one tensor, without a copy.

    Args:
        piece: the piece, and its first READ_ELEMENTS again, so that each of its elements may be the first one.
        unit: the unit.
        start: the first element.
        stop: at most READ_ELEMENTS further.
    """
    tensor = next(tensor for tensor in unit.layout.tensors if tensor.start <= start < tensor.stop)
    if len(tensor.parameter_shape) == 1:
        return torch.ones(stop - start, dtype=piece.dtype)
    number = (tensor.offset + start - tensor.start) % (piece.numel() - READ_ELEMENTS)
    return piece[number : number + stop - start]
