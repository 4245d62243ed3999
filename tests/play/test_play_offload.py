"""Activations in RAM and on NVMe: the same bits wherever they lie, bytes as planned, and drives that fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from integer_runs import fail_moves
from long_sequence import ACTIVATION_BYTES, LAYERS, watch
from tiny_models import BASE, IN_FP32, known_config, tiny_config
from tiny_runs import (
    BATCH,
    MIB,
    TOKENS,
    Outcome,
    Place,
    Run,
    Short,
    exactness_config,
    opened,
    outcome,
    random_groups,
    run_steps,
)
from warm_python import WarmPython

from megatier.config.schema import TrainConfig
from megatier.errors import BlockNotFoundError, ConfigError, IntegrityError, TransferError
from megatier.play.offload import Offload
from megatier.play.unit_blocks import activation_key
from megatier.session.session import Session
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier

NVME = Place(tiers=("gpu",), gpu=64 * MIB, activations=0)
PLACES = {
    "nvme": NVME,
    "ram nvme": Place(tiers=("gpu",), gpu=64 * MIB, activations=1),
    "with the state": Place(tiers=("nvme",), spills_grads=True),
    "speculative": Place(tiers=("nvme",), spills_grads=True, generations=2),
}
"""Where activations lie: all on NVMe, some of them, and all beside state and gradients."""
RAM = Place(tiers=("ram",))


@contextlib.contextmanager
def offloading(run: Run, mount: Path, place: Place = NVME, frozen: tuple[str, ...] = ()) -> Iterator[Session]:
    """A run that offloads, in such a place."""
    train = replace(run.train, activations="offload")
    with opened(
        exactness_config(run.model),
        mount,
        place,
        train,
        device=run.device,
        numerics=run.numerics,
        frozen=frozen,
        compute_dtype=run.dtype,
        compile=run.compile,
        saved_share=run.saved_share,
    ) as session:
        yield session


def trained(run: Run, session: Session) -> Outcome:
    """All steps of a run; the store moves what is demanded."""
    before = Counter(session.store.moved_bytes)
    results = run_steps(session, run.train, run.steps)
    session.player.drain()
    assert session.store.moved_bytes - before == session.player.demanded
    return outcome(session, results)


CASES = [
    Short(model="tied"),
    Short(model="tied", dtype="fp32", groups=3, slices=2),
    Short(model="tied", groups=2, kept_attention=True),
    Short(model="tied", slices=3, kept_attention=True, offload_attention=True),
    Short(model="tied", dtype="fp32", groups=2, kept_attention=True, offload_attention=True, clip=None),
    Short(model="moe", groups=2),
]


@pytest.mark.parametrize(
    "run", some(CASES, by=6, first=3), ids=lambda run: f"{run.model}-{run.dtype}-{run.groups}x{run.slices}"
)
def test_activations_give_the_same_bits_wherever_they_lie_and_move_what_is_demanded(run: Run, tmp_path: Path) -> None:
    expected = replace(run, activations="keep")(tmp_path)
    found = {"ram": replace(run, activations="offload")(tmp_path)}
    for name, place in PLACES.items():
        with offloading(run, tmp_path, place) as session:
            lie = [str(home) for home in session.placement.activation_homes.values()]
            assert lie == sorted(lie), "the first layers spill"
            # The slots have room for two, so with one more all three of the smaller model are in RAM.
            few = {"ram"} if run.model == "moe" else {"nvme", "ram"}
            assert set(lie) == (few if name == "ram nvme" else {"nvme"})
            found[name] = trained(run, session)
    assert [name for name, result in found.items() if result != expected] == []


def test_activations_on_nvme_above_frozen_layers_give_the_same_bits(tmp_path: Path) -> None:
    run = Run(model="tied", groups=2)
    frozen = ("model.embed_tokens", "model.layers.0")
    found = []
    for place in (PLACES["nvme"], PLACES["ram nvme"], RAM):
        with offloading(run, tmp_path, place, frozen) as session:
            found.append(trained(run, session))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("frozen", "lowest"),
    [
        pytest.param(("model.embed_tokens", "model.layers.0"), 1, id="below"),
        pytest.param(("model.embed_tokens", "model.layers.0.mlp"), 0, id="inside"),
        pytest.param((), None, id="none"),
    ],
)
@pytest.mark.parametrize("place", [RAM, NVME], ids=["ram", "nvme"])
def test_room_is_set_aside_for_those_layers_alone_whose_inputs_leave(
    place: Place, frozen: tuple[str, ...], lowest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stash = Offload.stash
    left = set[str]()

    def noting(self: Offload, unit: str, tensor: torch.Tensor) -> None:
        left.add(unit)
        stash(self, unit, tensor)

    monkeypatch.setattr(Offload, "stash", noting)
    run = Run(model="tied")
    with offloading(run, tmp_path, place, frozen) as session:
        trained(run, session)
        layers = [unit.name for unit in session.own_units if unit.is_layer]
        assert left == session.placement.activation_homes.keys()
        assert left == set(layers if lowest is None else layers[lowest + 1 :])
        for name in set(layers) - left:
            with pytest.raises(BlockNotFoundError):
                session.store.residency(activation_key(name))


def test_offload_of_layers_below_embeddings_that_stand_last_gives_the_same_bits(tmp_path: Path) -> None:
    """The embeddings of each layer come last among the modules, and reach every layer."""
    found = []
    for policy in ("offload", "keep"):
        train = TrainConfig(steps=3, batch=6, activations=policy)
        frozen = ("*", "!model.embed_tokens_per_layer")
        with opened(tiny_config("gemma4_text"), tmp_path, RAM, train, frozen=frozen) as session:
            assert not session.placement.activation_homes
            found.append(outcome(session, run_steps(session, train, 2)))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("run", CASES, ids=lambda run: f"{run.model}-{run.dtype}-{run.groups}x{run.slices}")
def test_activations_on_cuda_give_the_same_bits_wherever_they_lie(run: Run, tmp_path: Path) -> None:
    run = replace(run, model="flash" if run.model == "tied" else run.model, device="cuda", compile=False)
    expected = replace(run, activations="recompute")(tmp_path)
    for place in PLACES.values():
        with offloading(run, tmp_path, place) as session:
            assert trained(run, session) == expected


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kept_attention_leaves_the_gpu_with_the_input_of_its_layer(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[tuple[str, tuple[int, ...], bool]] = []
    real = Offload.stash_beside

    def stash_beside(self: Offload, unit: str, tensor: torch.Tensor) -> bool:
        went.append((unit, tuple(tensor.shape), real(self, unit, tensor)))
        return went[-1][-1]

    monkeypatch.setattr(Offload, "stash_beside", stash_beside)
    run = Run(model="plain", compile=compiles, saved_share=0.0, kept_attention=True, offload_attention=True)
    with offloading(run, tmp_path) as session:
        layers = [unit.name for unit in session.own_units if unit.is_layer]
        run_steps(session, run.train, 1)
        heads = session.model.config.num_attention_heads
    shapes = [(BATCH, heads, TOKENS, 8), (BATCH, heads, TOKENS)]
    assert went == [(layer, shape, True) for layer in layers for shape in shapes]


def test_weights_on_demand_come_before_the_activation_that_is_asked_for_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []
    real = TierQueues.to_gpu

    def to_gpu(self: TierQueues, key: str, *args: Any, **others: Any) -> Transfer:
        came.append(key)
        return real(self, key, *args, **others)

    monkeypatch.setattr(TierQueues, "to_gpu", to_gpu)
    run = Run(model="tied")
    with offloading(run, tmp_path, RAM) as session:
        layers = [unit.name for unit in session.own_units if unit.is_layer]
        run_steps(session, run.train, 1)

    names = list(reversed(layers))
    last, *ahead = map(activation_key, names)
    weights = [f"{name}/weight" for name in names]
    found = came[came.index(last) :]
    assert found[: 2 * len(names)] == [last, *chain(*zip(weights, ahead, strict=False)), weights[-1]]


@pytest.mark.parametrize(
    ("op", "error"), some([("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)], by=2)
)
def test_drive_that_fails_with_an_activation_ends_the_step_which_can_be_made_again(
    op: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model="tied", groups=2)
    expected = replace(run, activations="keep")(tmp_path)
    broken = TransferError(f"{op} of a block", "nvme", "/mnt/blocks", 4096, error)
    with offloading(run, tmp_path) as session:
        unit = list(session.placement.activation_homes)[1]
        results = run_steps(session, run.train, 2)
        with monkeypatch.context() as patch:
            fail_moves(patch, op, activation_key(unit), broken)
            with pytest.raises(TransferError) as caught:
                session.engine.train_step(3, 1e-2, random_groups(run.train, 128, 3))
            assert caught.value is broken
        vocab = session.model.config.get_text_config().vocab_size
        results += [session.engine.train_step(n, 1e-2, random_groups(run.train, vocab, n)) for n in (3, 4, 5)]
        assert outcome(session, results) == expected


def test_bit_that_flips_in_an_activation_on_nvme_is_found(tmp_path: Path) -> None:
    with offloading(Run(model="tied"), tmp_path) as session:
        unit, *_ = session.placement.activation_homes
        session.store.seal()
        session.player.begin("train")
        tensor = torch.randn(session.blocks.units[unit].activation_bytes // 4)
        session.player.weights.stash(unit, tensor)
        for queue in session.store.queues:
            queue.settle()
        extent = session.store.extents[activation_key(unit)]
        assert session.store.files is not None
        with session.store.files.paths[0].open("r+b") as file:
            file.seek(extent.stripes[0].file_offset + 5)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(IntegrityError, match=activation_key(unit)):
            session.player.weights.fetch(unit)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_tensors_pass_through_few_slots_in_pieces_and_come_back_whole(share: float, tmp_path: Path) -> None:
    with offloading(Run(model="tied", groups=1), tmp_path) as session:
        units = list(session.placement.activation_homes)
        planned = session.blocks.units[units[0]].activation_bytes
        assert session.placement.num_slots(Tier.RAM, Kind.ACTIVATION) == 2 < len(units)
        session.player.begin("train")
        sent = {unit: torch.randint(0, 255, (int(planned * share) // 8, 8), dtype=torch.uint8) for unit in units}
        for unit, tensor in sent.items():
            session.player.weights.stash(unit, tensor)
        for unit in reversed(units):
            [found] = session.player.weights.fetch(unit)
            assert torch.equal(found, sent[unit])


def test_files_of_activations_are_removed_when_the_run_ends(tmp_path: Path) -> None:
    with offloading(Run(model="tied"), tmp_path) as session:
        run_steps(session, Run(model="tied", activations="offload").train, 1)
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel gives no peak of its own")
def test_one_sequence_with_activations_of_ten_times_the_ram_trains_in_bounded_memory(
    tmp_path: Path, python: WarmPython
) -> None:
    found = watch(["nvme", "recompute"], tmp_path, python)
    assert found["nvme"]["ram"] <= ACTIVATION_BYTES / 10
    assert found["nvme"]["homes"] == ["nvme"] * (LAYERS - 3) + ["ram"] * 3

    # The arenas are there before the first step. What a step takes besides is one layer's work, and a few activations
    # that come and go; a run that holds them shows that the kernel would have seen more.
    assert found["nvme"]["grown"] < ACTIVATION_BYTES / 2, found["nvme"]["grown"]
    assert found["recompute"]["grown"] > ACTIVATION_BYTES * 0.9
    assert found["nvme"]["outcome"] == found["recompute"]["outcome"]


LOOPED: dict[str, Any] = {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2}
BLOCKS: dict[str, Any] = {**IN_FP32["inkling2_text"], "n_layers_per_attn_res_block": 1}


@pytest.mark.parametrize(
    ("family", "options", "cause"),
    [
        ("hrm_text", BASE, r"layers\.\d+ runs more than once"),
        ("dory", BASE, r"layers\.\d+ runs more than once"),
        ("inkling2_loop_text", {**BLOCKS, **LOOPED}, "runs more than once|one hidden state a token"),
        ("inkling2_text", BLOCKS, r"layers\.\d+ is .* for one hidden state a token .* take more\."),
    ],
)
def test_offload_of_layers_with_more_than_one_input_a_forward_is_refused_by_name(
    family: str, options: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    train = TrainConfig(steps=1, batch=BATCH, activations="offload")
    refused = pytest.raises(ConfigError, match=rf"({cause}) .* to recompute or keep")
    with opened(known_config(family, **options), tmp_path, RAM, train) as session, refused:
        run_steps(session, train, 1)


@pytest.mark.parametrize("family", some(["mamba", "mamba2", "falcon_mamba"], by=3))
def test_offload_of_layers_that_sum_in_fp32_gives_the_bits_of_keep(family: str, tmp_path: Path) -> None:
    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 1} if family == "mamba2" else {}
    config = known_config(family, **{**BASE, "state_size": 8, **heads})
    found = []
    for policy in ("keep", "offload"):
        train = TrainConfig(steps=2, batch=BATCH, activations=policy)
        with opened(config, tmp_path, RAM, train, compute_dtype="bf16") as session:
            results = run_steps(session, train, 2)
            session.player.drain()
            found.append(outcome(session, results))
    assert found[0] == found[1]
