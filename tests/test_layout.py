"""A unit whose updates need whole matrices is dealt out to shards, and no parameter is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatier.layout import ALIGN_ELEMENTS, SHARD_ELEMENTS, Layout
from megatier.state import MUON

SHAPES = [("q", (256, 256)), ("k", (64, 256)), ("up", (700, 256)), ("down", (256, 700)), ("norm", (256,))]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("frozen", [(), ("norm", "k")])
def test_parameters_of_a_unit_that_is_updated_by_matrix_are_dealt_out_whole(ranks: int, frozen: tuple[str]) -> None:
    layout = replace(Layout.of(SHAPES, frozen), schema=MUON["bf16"]).padded(ranks)
    shards = [layout.shard(rank, ranks) for rank in range(ranks)]
    trained = [tensor for shard in shards for tensor in shard.trained.tensors]
    assert sorted((tensor.name, tensor.shape) for tensor in trained) == sorted(
        (name, shape) for name, shape in SHAPES if name not in frozen
    )
    assert all(tensor.whole is None and tensor.start % ALIGN_ELEMENTS == 0 for tensor in trained)
    assert {(shard.num_elements, shard.num_trained) for shard in shards} == {
        (layout.num_elements // ranks, layout.num_trained // ranks)
    }
    assert layout.frozen == set(frozen)
    assert layout.num_trained % (ranks * SHARD_ELEMENTS) == 0
    ends = [(tensor.start, tensor.stop) for tensor in layout.tensors]
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_shards_are_as_even_as_whole_parameters_can_be() -> None:
    layout = replace(Layout.of([(name, (64, 1024)) for name in "abcd"]), schema=MUON["bf16"])
    assert layout.padded(2).num_elements == layout.padded(4).num_elements == layout.num_elements
    assert layout.padded(8).num_elements == 2 * layout.num_elements


@pytest.mark.parametrize("frozen", [(), ("b",)])
def test_shards_begin_at_whole_tiles_granules_and_pages(frozen: tuple[str, ...]) -> None:
    layout = Layout.of([("a", (70_000,)), ("b", (3,)), ("c", (300, 300))], frozen).padded(3)
    starts = [first for rank in range(3) for first, _, _ in layout.shard_runs(rank, 3)]
    assert [start % SHARD_ELEMENTS for start in starts] == [0] * len(starts)
    owned = sorted(run[:2] for rank in range(3) for run in layout.shard_runs(rank, 3))
    assert owned[0][0] == 0
    assert owned[-1][1] == layout.num_elements
    assert all(stop == start for (_, stop), (start, _) in pairwise(owned))
