"""The first promise of scale-out: the number of ranks never changes a bit of weights, moments, norms or losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from crossed import crossed
from rank_pool import POOL
from rank_runs import (
    KINDS,
    RankOutcome,
    RankRun,
    evaluate_on_ranks,
    leave_units_out,
    load_on_ranks,
    together,
    train_on_ranks,
)
from tiny_runs import KIB, MIB, Place, exactness_config, plain_model

from megatier.tier import Transport

SIZES = (2, 4)
PLACES = {
    "gpu": Place(tiers=("gpu",), gpu=64 * MIB),
    "ram": Place(tiers=("ram",)),
    "ram, streamed": Place(tiers=("ram",), gpu=4 * MIB, streamed=0.7),
    "nvme": Place(tiers=("nvme",)),
    "nvme twice": Place(tiers=("nvme",), generations=2),
    "gpu, ram": Place(tiers=("gpu", "ram"), gpu=2 * MIB),
    "gpu, ram, nvme": Place(tiers=("gpu", "ram", "nvme"), gpu=2 * MIB, ram=512 * KIB),
}
"""A shard has 65,536 elements at least, so these have more room than those of one process."""
ALL_PLACES = PLACES | {
    "gpu, ram, streamed": Place(tiers=("gpu", "ram"), gpu=2 * MIB + 900 * KIB, streamed=1.0),
    "ram twice": Place(tiers=("ram",), ram=4 * MIB, generations=2),
    "gpu, activations on nvme": Place(tiers=("gpu",), gpu=64 * MIB, activations=0),
}
"""Of two ranks, the one that streams has two units at home on the GPU and streams one."""


@cache
def alone(run: RankRun, mount: Path) -> RankOutcome:
    """The same run in one process, at home in RAM."""
    (outcome,) = POOL.run(train_on_ranks, 1, run, PLACES["ram"], mount)
    assert isinstance(outcome, RankOutcome)
    return outcome


def check(run: RankRun, place: str, size: int, mount: Path) -> list[RankOutcome]:
    """Train on so many ranks, and compare everything with one process."""
    if run.adapters:
        pytest.importorskip("peft")
    reference = alone(replace(run, way=None), mount.parent)
    outcomes: list[RankOutcome] = POOL.run(train_on_ranks, size, run, ALL_PLACES[place], mount)
    for outcome in outcomes:
        assert outcome.way is (run.way or (Transport.COPIES if run.device == "cuda" else Transport.RAM))
        assert repr(outcome.losses) == repr(reference.losses)  # NaN is not equal to itself
        assert repr(outcome.norms) == repr(reference.norms)
        assert outcome.skipped == reference.skipped
        assert outcome.moved == outcome.demanded
        assert set(outcome.held) == set(ALL_PLACES[place].tiers)
        assert bool(outcome.streamed) == (ALL_PLACES[place].streamed > 0)

    check_state(outcomes, reference)
    return outcomes


def check_state(outcomes: Sequence[RankOutcome], reference: RankOutcome) -> None:
    """Compare masters and moments with those of one process."""
    for kind in KINDS:
        expected = together([reference], kind)
        found = together(outcomes, kind)
        assert expected.keys() == found.keys()
        assert [
            name
            for name in expected
            if not torch.equal(expected[name].view(torch.int32), found[name].view(torch.int32))
        ] == []


@pytest.mark.parametrize(("place", "size"), crossed(PLACES, SIZES, by=2))
def test_ranks_in_every_placement_have_the_bits_of_one_process(place: str, size: int, tmp_path: Path) -> None:
    check(RankRun(), place, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_eight_ranks_have_the_bits_of_one_process_with_as_many_groups(place: str, tmp_path: Path) -> None:
    """Nobody has run a host with eight GPUs yet."""
    check(RankRun(groups=16, batch=16), place, 8, tmp_path)


def test_ranks_read_their_shards_of_a_folder_and_no_more(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("untied"))
    plain.save_pretrained(tmp_path / "model")
    reference: list[RankOutcome] = []
    for size in (1, 2, 4):
        found = POOL.run(load_on_ranks, size, RankRun(steps=1), PLACES["ram"], tmp_path, tmp_path / "model")
        assert [num_bytes for num_bytes, _, _ in found] == [own for _, own, _ in found]
        assert sum(own for _, own, _ in found) == sum(parameter.nbytes for parameter in plain.parameters())
        outcomes = [outcome for _, _, outcome in found]
        reference = reference or outcomes
        assert {repr((outcome.losses, outcome.norms)) for outcome in [*outcomes, *reference]} == {
            repr((reference[0].losses, reference[0].norms))
        }
        check_state(outcomes, reference[0])


IN_RAM = ("ram", "ram, streamed")
RUNS = {
    "tied": RankRun(model="tied"),
    "fp32": RankRun(dtype="fp32"),
    "slices": RankRun(slices=2),
    "frozen": RankRun(frozen=("model.embed_tokens", "model.layers.0.self_attn", "model.layers.1.mlp")),
    "one unit trained": RankRun(groups=8, frozen=("model.embed_tokens", "model.layers.0", "model.layers.1")),
    "expert parts": RankRun(model="moe", expert_parts=3),
    "tiles of tokens": RankRun(model="tied", tile_tokens=10),
    "routers in fp32": RankRun(model="routers"),
    "moments in bf16": RankRun(moments="bf16"),
    "moments in 8 bits": RankRun(moments="fp8"),
    "muon": RankRun(optimizer="muon"),
    "lion": RankRun(optimizer="lion"),
    "muon on experts": RankRun(model="moe", optimizer="muon", expert_parts=3),
    "adapters": RankRun(adapters=3),
    "products in FP8": RankRun(model="products", products="fp8"),
    "experts in FP8": RankRun(model="expert products", products="fp8", expert_parts=3, steps=2),
    "one round": RankRun(groups=2),
    "not clipped": RankRun(clip=None),
    "steps skipped": RankRun(learning_rate=1e38),
}


SPILLED = ("frozen", "moments in bf16", "muon", "adapters")
"""Of RUNS, those that spill by default."""
SLOW = (*SPILLED, "muon on experts", "experts in FP8")
"""Those that stay in RAM in slow tests alone."""


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *crossed([name for name in RUNS if name not in SLOW], IN_RAM, by=2),
        *(pytest.param(name, place, marks=pytest.mark.slow) for name in SLOW for place in IN_RAM),
    ],
)
def test_two_ranks_have_the_bits_of_one_process(name: str, place: str, tmp_path: Path) -> None:
    check(RUNS[name], place, 2, tmp_path)


def test_two_ranks_that_stream_beside_homes_on_the_gpu_have_the_bits_of_one_process(tmp_path: Path) -> None:
    check(RankRun(), "gpu, ram, streamed", 2, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *SPILLED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "expert parts", "routers in fp32")),
    ],
)
def test_two_ranks_that_spill_have_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    check(RUNS[name], "nvme", 2, tmp_path)


def test_two_ranks_whose_activations_spill_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Each rank takes its own to files of its own."""
    for outcome in check(RankRun(model="tied", activations="offload"), "gpu, activations on nvme", 2, tmp_path):
        assert outcome.moved["ram_to_nvme"] == outcome.moved["nvme_to_ram"] > 0


@pytest.mark.parametrize(("clip", "place"), [(None, "nvme twice"), (0.5, "nvme twice"), (0.5, "ram twice")])
def test_two_ranks_that_update_in_the_backward_have_the_bits_of_one_process(
    clip: float | None, place: str, tmp_path: Path
) -> None:
    check(RankRun(clip=clip), place, 2, tmp_path)


@pytest.mark.parametrize("place", [pytest.param("ram", marks=pytest.mark.slow), "nvme"])
def test_evaluation_is_dealt_over_ranks_and_has_the_bits_of_one_process(place: str, tmp_path: Path) -> None:
    found = {size: POOL.run(evaluate_on_ranks, size, RankRun(), PLACES[place], tmp_path, 5) for size in (1, 2, 4)}
    (expected, _), *_ = found[1]
    assert len(set(expected)) == 2
    for outcomes in found.values():
        assert [losses for losses, _ in outcomes] == [expected] * len(outcomes)

    # Rounds of one batch for each rank, twice; the batch without tokens that count is in none of them.
    forwards = {size: {count for _, count in outcomes} for size, outcomes in found.items()}
    assert forwards == {1: {10}, 2: {6}, 4: {4}}


def test_units_in_a_row_that_one_rank_leaves_out_hold_nobody_up(tmp_path: Path) -> None:
    """There are fewer slots than these units, so gathers stand between the scatters of what is left out."""
    many = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    left_out = [many, [], ["model.layers.0"]]
    for final, num_slots in POOL.run(leave_units_out, 2, PLACES["ram"], tmp_path, left_out):
        assert num_slots == 2
        # Only in the third pass do both ranks leave the same unit out.
        assert final == [5, 5, 4, 5]


@pytest.mark.parametrize(("place", "size"), [("gpu, ram, nvme", 2), ("ram, streamed", 4)])
def test_ranks_that_go_by_gloo_have_the_bits_of_one_process(place: str, size: int, tmp_path: Path) -> None:
    check(RankRun(way=Transport.GLOO), place, size, tmp_path)


OTHER_WAYS = [
    ("gpu, ram", Transport.KERNELS),
    *((place, Transport.RAM) for place in ("gpu, ram", "ram, streamed", "nvme twice")),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("place", "way"), [(place, Transport.COPIES) for place in PLACES] + OTHER_WAYS)
def test_ranks_on_two_gpus_have_the_bits_of_one(place: str, way: Transport, tmp_path: Path) -> None:
    check(RankRun(device="cuda", groups=2, model="flash", way=way), place, 2, tmp_path)


LEFT_OUT = RankRun(model="qwen3_vl", steps=5, images=("iiii", "itti", "tttt", "titi", "iitt"))
"""Two ranks have groups 0 and 2, and 1 and 3. In steps 2 to 5 they leave the tower out of different rounds, both of
all, one of all, and both of the second.
"""


@pytest.mark.parametrize(
    ("place", "size"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpu", 4), ("nvme", 2))), ("ram, streamed", 2)],
)
def test_ranks_that_leave_a_vision_tower_out_have_the_bits_of_one_process(
    place: str, size: int, tmp_path: Path
) -> None:
    check(LEFT_OUT, place, size, tmp_path)


def test_rank_that_leaves_a_vision_tower_out_of_the_first_step_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run = replace(LEFT_OUT, steps=1, images=("titi",))
    with pytest.raises(AssertionError) as caught:
        POOL.run(train_on_ranks, 2, run, PLACES["ram"], tmp_path)
    assert re.findall(r"TimelineError: rank (\d) comes to", str(caught.value)) == ["0", "1"]


def test_unit_that_the_first_step_left_out_is_refused_with_a_remedy_on_all_ranks(tmp_path: Path) -> None:
    run = replace(LEFT_OUT, steps=2, images=("tttt", "itit"))
    with pytest.raises(AssertionError, match="put an image into each batch of the first step"):
        POOL.run(train_on_ranks, 2, run, PLACES["ram"], tmp_path)
