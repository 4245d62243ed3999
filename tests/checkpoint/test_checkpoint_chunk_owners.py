"""Owners of array chunks: every element is written once, by the rank that has the first one of its chunk."""

from __future__ import annotations

import math

import pytest

from megatier import layout
from megatier.checkpoint.checkpoint import list_tensors
from megatier.checkpoint.chunk_owners import ChunkOwners, sizes_of
from megatier.checkpoint.grid import Grid
from megatier.layout import Layout, TensorSlice
from megatier.models.decoder import Unit

SHAPES = {"a": (7, 30), "b": (), "c": (5, 40, 11), "d": (1000,), "e": (3, 100)}


def units(size: int) -> list[Unit]:
    """One with all sorts of tensors, the last of which is frozen, and two that hold parts of one parameter."""
    layouts = [Layout.of(SHAPES.items(), frozen=["e"]), *map(part, range(2))]
    return [
        Unit(name=f"unit {n}", module_names=(), layout=found.padded(size), is_layer=False)
        for n, found in enumerate(layouts)
    ]


def part(number: int) -> Layout:
    return Layout((TensorSlice("f", (900,), 0, whole=(1800,), offset=900 * number),), 2048, 2048)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [50, 350, 10_000])
def test_every_element_is_written_once_by_the_rank_that_has_the_first_of_its_chunk(
    size: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SHARD_ELEMENTS", 128)
    monkeypatch.setattr(Grid.of, "__defaults__", (chunks,))
    whole_units = units(size)
    owners = [ChunkOwners(whole_units, rank, size) for rank in range(size)]

    for array in ("params", "exp_avg"):
        has: dict[str, dict[int, int]] = {}
        written: dict[str, dict[int, int]] = {}
        for unit in whole_units:
            for rank in range(size):
                for tensor in list_tensors(unit.layout.shard(rank, size), array):
                    has.setdefault(tensor.name, {}).update(dict.fromkeys(range(*tensor.elements), rank))
                    written.setdefault(tensor.name, {}).update(dict.fromkeys(range(*tensor.elements), rank))
                for other in range(size):
                    sent = owners[rank].sent(unit.name, array)[other]
                    assert owners[other].received(unit.name, array)[rank] == sent
                    for piece in sent:
                        assert rank != piece.owner == other
                        written[piece.name].update(dict.fromkeys(range(piece.start, piece.stop), other))

        shapes = {**SHAPES, "f": (1800,)}
        assert has.keys() == shapes.keys() - ({"e"} if array == "exp_avg" else set())
        for name, ranks in has.items():
            assert sorted(ranks) == list(range(math.prod(shapes[name])))
            for chunk in Grid.of(shapes[name]).chunks():
                elements = range(chunk.start, chunk.start + chunk.num_elements)
                assert {written[name][element] for element in elements} == {ranks[chunk.start]}
                assert {Grid.of(shapes[name]).bounds(element) for element in elements} == {
                    (elements.start, elements.stop)
                }


def test_one_rank_sends_nothing() -> None:
    owners = ChunkOwners(units(1), 0, 1)
    assert sizes_of(owners.sent("unit 0", "params")) == sizes_of(owners.received("unit 0", "params")) == [0]
