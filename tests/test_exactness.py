"""The first promise: tiers and activation policies change speed, never numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from crossed import some
from plain_adamw import PlainAdamW
from small_timelines import planned_loads, planned_updates
from tiny_runs import (
    BATCH,
    KIB,
    MODELS,
    PLACES,
    ModelWeights,
    Run,
    Short,
    exactness_config,
    opened,
    outcome,
    plain_model,
    random_groups,
    read_parameters,
    run_in_fork,
    run_in_fresh_process,
    run_steps,
)
from warm_python import WarmPython

from megatier.config.schema import TrainConfig
from megatier.schedule.moves import Moves, by_queue
from megatier.schedule.timeline import Timeline
from megatier.session.session import Session
from megatier.tier import Kind, Tier

ACTIVATIONS = ("keep", "recompute", "offload")
NUMERIC = list(itertools.product(("bf16", "fp32"), (0.5, None), (1, 3), (1, 2)))
"""Compute dtype, clip, groups, slices: what may change a bit."""
ONCE = [name for name, place in PLACES.items() if place.generations == 1 and not place.spills_grads]
ALL = list(itertools.product(ONCE, ACTIVATIONS))


FEW = [("bf16", 0.5, 3, 2), ("bf16", None, 1, 1), ("fp32", 0.5, 1, 2), ("fp32", None, 3, 1)]
"""Of NUMERIC, for larger models: any two values of dtype, clip and groups meet."""
HALF = [row for n, row in enumerate(NUMERIC) if n.bit_count() % 2 == 0]
"""Of NUMERIC, for the smallest model: any three values meet."""
WHOLE = [("bf16", 0.5, 1, 1)]
"""Of HALF, the one with all places and activation policies."""


def pairs(index: int) -> list[tuple[str, str]]:
    """Half of the places; over 24 indices every place with every activation policy."""
    # Rows are taken two by two, so that either half meets both values of each setting in HALF.
    half = (index // 2 + index // 4) % 2
    return [(place, ACTIVATIONS[(index + n) % 3]) for n, place in enumerate(ONCE) if n % 2 == half]


def matrix(model: str, *, slow: bool) -> Iterator[ParameterSet]:
    """Runs that change numbers, each with the settings that must not."""
    smallest = model == "untied"
    first = 4 * list(MODELS).index(model)
    for index, (dtype, clip, groups, slices) in enumerate(NUMERIC if slow else HALF if smallest else FEW):
        is_whole = slow or (smallest and (dtype, clip, groups, slices) in WHOLE)
        yield pytest.param(
            Run(model=model, dtype=dtype, clip=clip, groups=groups, slices=slices, steps=5 if slow else 3),
            ALL if is_whole else pairs(first + index),
            id=f"{model}-{dtype}-{'clip' if clip else 'off'}-{groups}x{slices}{'-all' if slow else ''}",
            marks=[pytest.mark.slow] if slow else [],
        )


MATRIX = [case for slow in (False, True) for model in MODELS for case in matrix(model, slow=slow)]


@pytest.mark.parametrize(("run", "settings"), MATRIX)
def test_exactness_any_tier_and_activation_policy_gives_the_same_bits(
    run: Run, settings: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    found = {pair: replace(run, place=pair[0], activations=pair[1])(tmp_path) for pair in settings}
    expected = found[settings[0]]
    assert len(expected.losses) == run.steps
    assert [pair for pair, result in found.items() if result != expected] == []


def test_exactness_bf16_products_in_fp32_give_the_same_bits_on_any_tier(tmp_path: Path) -> None:
    run = Short(model="untied", groups=3, slices=2, fp32_products=True)
    expected = run(tmp_path)
    assert replace(run, place="gpu_ram_nvme", activations="recompute")(tmp_path) == expected
    assert replace(run, place="nvme", activations="offload")(tmp_path) == expected


THROUGH_RINGS = {
    Short(model="untied", groups=3, slices=2): 1,
    Short(model="tied", clip=None): 96 * KIB,
    Short(model="moe", dtype="fp32"): 1,
    Short(model="untied", optimizer="muon"): 1,
}
"""Runs, and the bytes of RAM that are page-locked: no more than the rings, or some slots too."""


@pytest.mark.parametrize("run", THROUGH_RINGS, ids=lambda run: f"{run.model}-{run.dtype}-{run.optimizer}")
def test_exactness_ram_that_is_not_page_locked_gives_the_same_bits_in_all_places(run: Run, tmp_path: Path) -> None:
    expected = run(tmp_path)
    locked = THROUGH_RINGS[run]
    for place, activations in zip([*ONCE, "nvme_twice", "nvme_grads"], itertools.cycle(reversed(ACTIVATIONS))):
        if place != "gpu":
            through = replace(run, place=place, activations=activations, locked=locked)
            assert through(tmp_path) == expected, (place, activations)


NARROW = {
    Short(model="untied", moments="bf16"): [*pairs(0), ("nvme_grads", "recompute"), ("nvme_twice", "keep")],
    Short(model="untied", moments="bf16", dtype="fp32", clip=None, groups=3, slices=2): pairs(1),
    Short(model="tied", moments="bf16", clip=None): pairs(2),
    Short(model="moe", moments="bf16", groups=3): [("gpu", "keep"), ("nvme", "recompute"), ("gpu_ram", "offload")],
    Short(model="untied", moments="fp8"): [("gpu", "keep"), ("nvme_grads", "recompute"), ("nvme_twice", "offload")],
    Short(model="tied", moments="fp8", dtype="fp32", clip=None, groups=3): [("gpu", "offload"), ("nvme", "keep")],
    Short(model="routers", moments="fp8"): [("ram_streamed", "keep"), ("nvme", "offload"), ("gpu_ram", "recompute")],
}
"""Runs whose moments are rounded, and settings that must not change their numbers."""


@pytest.mark.parametrize("run", some(NARROW, by=2), ids=lambda run: f"{run.model}-{run.dtype}-{run.moments}")
def test_exactness_rounded_moments_have_the_same_bits_on_any_tier_under_any_policy(run: Run, tmp_path: Path) -> None:
    expected = replace(run, place="ram")(tmp_path)
    for place, activations in NARROW[run]:
        assert replace(run, place=place, activations=activations)(tmp_path) == expected, place
    exact = replace(run, moments="fp32")(tmp_path)
    assert expected.losses[:2] == exact.losses[:2]
    assert expected.losses[2:] != exact.losses[2:]


def test_exactness_moments_in_bf16_are_rounded_by_the_seed_of_the_run(tmp_path: Path) -> None:
    run = Run(model="untied", moments="bf16")
    outcomes = []
    for seed in (0, 1):
        train = replace(run.train, seed=seed)
        with opened(exactness_config("untied"), tmp_path, PLACES["ram"], train) as session:
            outcomes.append(outcome(session, run_steps(session, train)))
    assert outcomes[0] == run(tmp_path)
    assert outcomes[0].losses[:2] == outcomes[1].losses[:2]
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize(
    ("model", "groups", "moments", "place"),
    [
        ("untied", 3, "fp32", "nvme_twice"),
        ("tied", 1, "fp32", "nvme_twice"),
        ("untied", 1, "bf16", "nvme_twice"),
        ("untied", 1, "fp32", "ram_twice"),
        ("tied", 3, "fp8", "ram_twice"),
    ],
)
def test_exactness_updates_before_the_norm_is_known_give_the_same_bits(
    tmp_path: Path, model: str, groups: int, moments: str, place: str
) -> None:
    """One of the steps is clipped: its updates are void."""
    run = Run(model=model, groups=groups, moments=moments, clip=1e9, place=place)
    run = replace(run, clip=0.999 * max(run(tmp_path).norms))
    with opened(exactness_config(model), tmp_path, PLACES[place], run.train) as session:
        assert session.placement.speculative
        found = outcome(session, run_steps(session, run.train))
        assert session.speculation.outcomes["void"] == 1
        assert session.speculation.outcomes["confirmed"]
    assert replace(run, place="ram")(tmp_path) == replace(run, place="gpu")(tmp_path) == found


@pytest.mark.parametrize(
    ("model", "dtype", "groups", "clip", "place"),
    [
        *some(
            [
                ("untied", "bf16", 1, 0.5, "nvme_grads"),
                ("tied", "bf16", 3, 0.5, "nvme_grads_some"),
                ("untied", "fp32", 3, 0.5, "nvme_grads_some"),
                ("tied", "fp32", 3, None, "nvme_grads"),
                ("moe", "bf16", 3, 0.5, "nvme_grads"),
                ("untied", "bf16", 3, None, "nvme_grads_some"),
            ],
            by=2,
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                ("untied", "tied", "moe"),
                ("bf16", "fp32"),
                (1, 3),
                (0.5, None),
                ("nvme_grads",),
            )
        ),
    ],
)
def test_exactness_gradients_that_wait_on_nvme_give_the_same_bits(
    tmp_path: Path, model: str, dtype: str, groups: int, clip: float | None, place: str
) -> None:
    run = Short(model=model, dtype=dtype, groups=groups, clip=clip, slices=2, place=place)
    with opened(exactness_config(model), tmp_path, PLACES[place], run.train, compute_dtype=dtype) as session:
        assert Tier.NVME in session.placement.grad_homes.values()
        assert session.placement.sums_on_gpu is (groups > 1)
        found = outcome(session, run_steps(session, run.train, run.steps))
    assert found == replace(run, place="ram")(tmp_path)


@pytest.mark.parametrize(("dtype", "groups", "slices"), [("bf16", 1, 2), ("fp32", 3, 1)])
def test_exactness_kept_attention_gives_the_same_bits_under_any_policy(
    dtype: str, groups: int, slices: int, tmp_path: Path
) -> None:
    run = Short(model="plain", dtype=dtype, groups=groups, slices=slices)
    expected = run(tmp_path)
    for place, activations in [("ram", "recompute"), ("gpu_ram_nvme", "offload"), ("gpu", "keep")]:
        assert replace(run, kept_attention=True, place=place, activations=activations)(tmp_path) == expected


@pytest.mark.filterwarnings("ignore:.*runs whole")
@pytest.mark.parametrize(
    ("model", "dtype", "groups", "slices", "parts"),
    [
        ("tied", "fp32", 1, 2, 1),
        pytest.param("moe", "bf16", 3, 2, 2, marks=pytest.mark.slow),
        pytest.param("untied", "bf16", 3, 1, 1, marks=pytest.mark.slow),
        pytest.param("routers", "bf16", 3, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_exactness_tiles_of_tokens_give_the_same_bits_on_any_tier_under_any_policy(
    model: str, dtype: str, groups: int, slices: int, parts: int, tmp_path: Path
) -> None:
    run = Short(model=model, dtype=dtype, groups=groups, slices=slices, expert_parts=parts, tile_tokens=10)
    expected = run(tmp_path)
    for place, activations in [("nvme", "recompute"), ("gpu_ram_nvme", "offload"), ("ram_streamed", "recompute")]:
        assert replace(run, place=place, activations=activations)(tmp_path) == expected
    assert replace(run, tile_tokens=None)(tmp_path) != expected


def test_exactness_tiles_with_bf16_products_in_fp32_give_the_same_bits_under_any_policy(tmp_path: Path) -> None:
    run = Short(model="plain", slices=2, fp32_products=True, tile_tokens=10)
    expected = run(tmp_path)
    assert expected != replace(run, tile_tokens=None)(tmp_path)
    assert replace(run, place="gpu_ram_nvme", activations="offload", kept_attention=True)(tmp_path) == expected


def test_exactness_attention_with_dropout_is_not_kept_and_gives_the_same_bits(tmp_path: Path) -> None:
    run = Short(model="untied", groups=3, slices=2, activations="recompute")
    assert replace(run, kept_attention=True)(tmp_path) == run(tmp_path)


def test_exactness_another_dropout_seed_gives_other_losses(tmp_path: Path) -> None:
    for model in ("untied", "tied"):
        run = Short(model=model)
        assert run(tmp_path).losses[0] != replace(run, seed=6)(tmp_path).losses[0]


@pytest.mark.parametrize("models", [("untied", "moe"), pytest.param(tuple(MODELS), marks=pytest.mark.slow)])
def test_exactness_another_process_gives_the_same_bits(
    models: Sequence[str], tmp_path: Path, python: WarmPython
) -> None:
    runs = [Short(model=model, groups=3, place="gpu_ram_nvme", activations="recompute") for model in models]
    runs.append(replace(runs[0], optimizer="muon"))
    here = [replace(run, place="nvme", activations="offload")(tmp_path) for run in runs]
    assert run_in_fork(runs, tmp_path, python) == here


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_exactness_on_cuda_any_tier_and_activation_policy_gives_the_same_bits(model: str, tmp_path: Path) -> None:
    settings = list(itertools.product(("gpu", "ram", "nvme", "gpu_ram_nvme"), ACTIVATIONS))
    run = Run(model=model, device="cuda", compile=False)
    numeric = [replace(run, clip=clip, groups=groups) for clip in (0.5, None) for groups in (1, 3)]
    runs = [replace(run, place=p, activations=a) for run in numeric for p, a in settings]
    found = run_in_fresh_process(runs, tmp_path)
    again = run_in_fresh_process(numeric, tmp_path)
    for index, expected in enumerate(again):
        outcomes = dict(zip(settings, found[index * len(settings) :], strict=False))
        assert [pair for pair, result in outcomes.items() if result != expected] == [], numeric[index]


@pytest.mark.gpu
@pytest.mark.parametrize("locked", [1, 256 * KIB, 128 << 20])
def test_exactness_on_cuda_ram_that_is_not_page_locked_gives_the_same_bits(locked: int, tmp_path: Path) -> None:
    """Pieces of a page, pieces beside a part of RAM that is page-locked, and all of RAM page-locked."""
    settings = list(zip(("ram", "ram_streamed", "nvme", "gpu_ram_nvme", "nvme_grads"), itertools.cycle(ACTIVATIONS)))
    runs = [
        Run(model=model, clip=clip, groups=groups, place=place, activations=activations, device="cuda", compile=False)
        for model, clip, groups in (("untied", 0.5, 1), ("tied", None, 3), ("moe", 0.5, 3))
        for place, activations in settings
    ]
    expected = run_in_fresh_process(runs, tmp_path)
    found = run_in_fresh_process([replace(run, locked=locked) for run in runs], tmp_path)
    assert found == expected


@pytest.mark.gpu
def test_exactness_on_cuda_rounded_moments_have_the_same_bits_on_any_tier(tmp_path: Path) -> None:
    """Updates in RAM and on NVMe run on the CPU, others on the GPU."""
    runs = [replace(run, device="cuda", compile=False) for run in NARROW]
    places = ("ram", "gpu", "nvme", "ram_streamed")
    expected, *others = [
        run_in_fresh_process([replace(run, place=place) for run in runs], tmp_path) for place in places
    ]
    assert [found == expected for found in others] == [True] * 3


@pytest.mark.gpu
def test_exactness_on_cuda_kept_attention_gives_the_same_bits_in_uncompiled_layers(tmp_path: Path) -> None:
    run = Run(model="flash", device="cuda", compile=False, fused_loss=True, loss_chunk=32)
    kept = [replace(run, kept_attention=True, activations=activations) for activations in ACTIVATIONS]
    expected, *found = run_in_fresh_process([run, *kept], tmp_path)
    assert [result == expected for result in found] == [True, True, True]


@pytest.mark.gpu
def test_exactness_on_cuda_gradients_that_wait_on_nvme_give_the_same_bits(tmp_path: Path) -> None:
    cases = itertools.product(("untied", "tied", "moe"), (0.5, None), (1, 3))
    runs = [Run(model=model, clip=clip, groups=groups, device="cuda", compile=False) for model, clip, groups in cases]
    runs = [run for run in runs if run.groups > 1 or run.clip]
    placed = [[replace(run, place=place) for run in runs] for place in ("ram", "nvme_grads", "nvme_grads_some")]
    expected, *others = [run_in_fresh_process(these, tmp_path) for these in placed]
    assert [found == expected for found in others] == [True, True]


# ---------------------------------------------------------------------- against a plain run


@pytest.mark.parametrize(("clip", "activations"), [(0.5, "keep"), (None, "recompute")])
@pytest.mark.parametrize("model", MODELS)
def test_exactness_fp32_equals_a_plain_model_with_a_plain_adamw(
    model: str, clip: float | None, activations: str, tmp_path: Path
) -> None:
    config, train = exactness_config(model), Run(model=model, clip=clip, activations=activations).train
    plain = plain_model(config)
    source = ModelWeights(plain)
    place = PLACES["gpu_ram_nvme"]
    with opened(config, tmp_path, place, train, source=source, compute_dtype="fp32", seed=None) as session:
        torch.manual_seed(5)
        results = run_steps(session, train)
        found = {kind: read_parameters(session, kind) for kind in (Kind.WEIGHT, Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
    expected = PlainAdamW(plain, clip)
    torch.manual_seed(5)
    for step, result in enumerate(results, 1):
        [batch] = random_groups(train, config.vocab_size, step)
        loss = plain(**batch, use_cache=False).loss
        loss.backward()
        norm = expected.step(step, 1e-2)
        assert result.loss == loss.item(), f"loss of step {step}"
        assert result.grad_norm == pytest.approx(norm, rel=1e-14)
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[Kind.WEIGHT][name], parameter), name
        assert torch.equal(found[Kind.EXP_AVG][name], expected.exp_avg[name]), name
        assert torch.equal(found[Kind.EXP_AVG_SQ][name], expected.exp_avg_sq[name]), name


@pytest.mark.parametrize(("groups", "slices"), [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_exactness_fused_loss_gives_nearly_the_gradients_of_the_plain_one(
    model: str, groups: int, slices: int, tmp_path: Path
) -> None:
    config = exactness_config(model)
    # With beta1 = 0 the first moment is the gradient itself.
    train = TrainConfig(steps=1, batch=BATCH, groups=groups, slices=slices, beta1=0.0, clip=None)
    losses, grads = [], []
    for fused in (False, True):
        with opened(config, tmp_path, PLACES["gpu_ram"], train, compute_dtype="fp32", fused_loss=fused) as session:
            losses.append(run_steps(session, train, 1)[0].loss)
            grads.append(read_parameters(session, Kind.EXP_AVG))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, expected in grads[0].items():
        assert (grads[1][name] - expected).norm() <= 1e-4 * expected.norm(), name


# ---------------------------------------------------------------------- what moves, and when


STEADY = [(0.5, 1, 1, "keep"), (None, 3, 1, "offload"), (0.5, 3, 2, "offload"), (None, 1, 2, "recompute")]
"""Every place takes one, or with the slow tests all."""


@pytest.mark.parametrize(
    ("place", "clip", "groups", "slices", "activations"),
    [
        pytest.param(place, *row, marks=[] if n % 4 == number else [pytest.mark.slow])
        for n, place in enumerate(PLACES)
        for number, row in enumerate(STEADY)
    ],
)
def test_player_steady_step_follows_the_timeline_and_moves_what_it_demands(
    place: str, clip: float | None, groups: int, slices: int, activations: str, tmp_path: Path
) -> None:
    run = Run(model="untied", clip=clip, groups=groups, slices=slices, activations=activations)
    with opened(exactness_config("untied"), tmp_path, PLACES[place], run.train) as session:
        for step in (1, 2, 3):
            session.player.take_events()
            before = Counter(session.store.moved_bytes)
            session.engine.train_step(step, 1e-2, random_groups(run.train, 2112, step))
            if (exchange := session.player.updates.exchange) is not None:
                exchange.wait()  # streamed state goes and comes on its own time
            if step > 2 or (step == 2 and clip is None):
                timeline = session.player.timeline
                assert timeline is not None
                check_trace(session, timeline)
                moved = Counter(session.store.moved_bytes)
                moved.subtract(before)
                assert +moved == demanded(session, timeline)


def check_trace(session: Session, timeline: Timeline) -> None:
    """Compute used the units in the timeline's order, and weights came in the order of its loads."""
    events = session.player.take_events()
    # A use in which compute waited stands in several pieces, one after the other.
    used = [name for name, _ in itertools.groupby(event.name for event in events if event.lane == "compute")]
    assert used == [f"{access.unit} {access.phase} {access.group}" for access in timeline.accesses]
    loads = [load.unit for load in planned_loads(timeline)]
    fed = [update.unit for update in planned_updates(timeline) if update.load is not None]
    came = [event for event in events if event.lane == "ram_to_gpu" and event.name.endswith("/weight")]
    moved: Counter[str] = Counter()
    for event in came:  # a unit on NVMe comes in several pieces
        moved[event.name] += event.num_bytes
    expected: Counter[str] = Counter()
    for name in loads + fed:
        expected[f"{name}/weight"] += 2 * session.blocks.units[name].num_elements
    assert moved == expected
    if not planned_updates(timeline):
        assert [name for name, _ in itertools.groupby(event.name for event in came)] == [f"{n}/weight" for n in loads]


def demanded(session: Session, timeline: Timeline) -> dict[str, int]:
    blocks = session.blocks
    moves = Moves(blocks.units, session.placement, blocks.policy)
    parts = [moves.of(item) for item in timeline.items]
    parts += [moves.gradients(unit) for unit in blocks.units]
    if not blocks.policy.deferred:
        parts += [moves.update(unit) for unit in blocks.units]
    moved = by_queue(move for part in parts for move in part)
    for unit in blocks.units.values():
        if size := unit.activation_bytes:
            offloaded = by_queue([*moves.stash(unit.name, size), *moves.unstash(unit.name, size)])
            moved += Counter({lane: blocks.policy.groups * moved for lane, moved in offloaded.items()})
    return moved


def test_player_state_on_nvme_is_read_and_written_once_a_step(tmp_path: Path) -> None:
    run = Run(model="untied")
    with opened(exactness_config("untied"), tmp_path, PLACES["nvme"], run.train) as session:
        num_elements = sum(unit.layout.num_elements for unit in session.own_units)
        assert session.placement.state_bytes[Tier.NVME] == 12 * num_elements
        assert len(session.blocks.chunks("model.embed_tokens")) == 3
        run_steps(session, run.train, 2)
        before = Counter(session.store.moved_bytes)
        [batch] = random_groups(run.train, 2112, 3)
        session.engine.train_step(3, 1e-2, [batch])
        moved = Counter(session.store.moved_bytes)
        moved.subtract(before)
    assert moved["ram_to_nvme"] == 12 * num_elements
    assert 12 * num_elements < moved["nvme_to_ram"] <= 14 * num_elements
    assert moved["gpu_to_ram"] == 2 * num_elements


def test_outcome_of_other_weights_differs(tmp_path: Path) -> None:
    run = Run(model="tied")
    with opened(exactness_config("tied"), tmp_path, PLACES["ram"], run.train) as session:
        untrained = outcome(session, [])
        results = run_steps(session, run.train, 1)
        trained = outcome(session, results)
    assert all(a != b for a, b in zip(untrained.digests, trained.digests, strict=True))
