"""Runs `megatier verify`: it trains one tiny model under several placements and compares every bit."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from megatier.config.schema import OF_LOOP, ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.optimizers import MOMENT_FORMATS, OPTIMIZERS
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.report.metrics import format_seconds
from megatier.report.report import WorkBar
from megatier.schedule.budgets import host_ram
from megatier.schedule.policy import Policy
from megatier.session.session import Session
from megatier.setup.machine import choose_device
from megatier.setup.setup import Setup
from megatier.state import Moments
from megatier.tier import Activations, Tier

STEPS = 5
"""The steps of each run. A wrong update shows in the loss of the step after it, and a wrong moment in later ones."""
SEQUENCES = 4
"""The sequences of each group."""
SEQUENCE_LENGTH = 32
"""The tokens of each sequence."""
TINY_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
"""A tiny model. Its dropout makes the random numbers of a forward a part of what is compared."""
DIGITS = 8
"""Digits of a digest that the table shows. All of them are compared."""
Budgeted = tuple[tuple[str, ...], int, int, float, int]
"""Tiers that may hold state, GPU budget and RAM budget in bytes, share that streams, and number of generations."""
PLACEMENTS: dict[str, Budgeted] = {
    "all on the gpu": (("gpu",), 64 << 20, 64 << 20, 0.0, 1),
    "all in ram": (("ram",), 4 << 20, 64 << 20, 0.0, 1),
    "in ram, streamed": (("ram",), 16 << 20, 64 << 20, 0.8, 1),
    "all on nvme": (("nvme",), 4 << 20, 16 << 20, 0.0, 1),
    "all on nvme, twice": (("nvme",), 4 << 20, 16 << 20, 0.0, 2),
    "gpu, ram and nvme": (("gpu", "ram", "nvme"), 3 << 20, 5 << 20, 0.0, 1),
}
"""The placements by name."""
MUON_RAM = 7 << 20
"""RAM of the placement on all tiers with Muon, in bytes: whole layers pass through it."""
NVME_BYTES = 64 << 20
"""The bytes on the drive, in each placement."""
CLIP = 3.22
"""Some of the steps are above it, and some below, so that some speculative updates are confirmed and some are void."""


class Mode(NamedTuple):
    """Settings that change numbers, so that runs are compared within one mode alone."""

    clip: float | None
    """The norm to clip to; None: off."""
    moments: Moments = "fp32"
    """The type of AdamW's moments."""
    optimizer: str = "adamw"
    """What trains the matrices of layers."""
    products: str = "bf16"
    """The type of the numbers that linear layers multiply."""


MODES = {
    Mode(CLIP): tuple(Activations),
    Mode(None): tuple(Activations),
    **{Mode(CLIP, moments): (Activations.KEEP,) for moments in MOMENT_FORMATS[1:]},
}
"""The modes, and the activation policies that are tried in each."""

RANK_PLACEMENTS: dict[str, Budgeted] = {
    "all on the gpu": (("gpu",), 64 << 20, 64 << 20, 0.0, 1),
    "all in ram": (("ram",), 16 << 20, 64 << 20, 0.0, 1),
    "in ram, streamed": (("ram",), 64 << 20, 64 << 20, 0.8, 1),
    "all on nvme": (("nvme",), 16 << 20, 24 << 20, 0.0, 1),
    "all on nvme, twice": (("nvme",), 16 << 20, 24 << 20, 0.0, 2),
}
"""The same for ranks, in bytes for each of them. Whole units pass through the GPU, so its budgets are larger."""


def list_modes(optimizer: str, products: str = "bf16") -> dict[Mode, tuple[Activations, ...]]:
    """Return the modes that an optimizer has, with products of this type."""
    narrows = OPTIMIZERS[optimizer].narrows
    return {
        mode._replace(optimizer=optimizer, products=products): policies
        for mode, policies in MODES.items()
        if narrows or mode.moments == "fp32"
    }


def verify(
    device: str,
    directory: Path,
    console: Console,
    *,
    is_quick: bool = False,
    optimizer: str = "adamw",
    products: str = "bf16",
) -> bool:
    """Train under every placement and activation policy in several modes, and print a table of the outcomes.

    Under torchrun the ranks share the state under some placements, and each of them also trains alone.

    Args:
        device: auto, cuda or cpu.
        directory: on the drive to try; it holds the block files meanwhile.
        console: where the table goes.
        is_quick: try every placement with one activation policy in one mode.
        optimizer: as `train.optimizer` names it.
        products: as `numerics.products` names them.

    Returns:
        Whether all outcomes are equal, within each mode.
    """
    # Otherwise kernels may add up in another order in each run, whatever the placement is.
    torch.use_deterministic_algorithms(True)
    quick = Mode(CLIP, optimizer=optimizer, products=products)
    modes = {quick: (Activations.KEEP,)} if is_quick else list_modes(optimizer, products)
    with joined(choose_device(device, "--device").type) as ranks:
        if ranks is not None:
            quiet = console if ranks.rank == 0 else Console(quiet=True)
            return _verify_ranks(device, directory, quiet, ranks, tuple(modes))

    runs = [run for mode, policies in modes.items() for run in itertools.product((mode,), PLACEMENTS, policies)]
    total = len(runs)
    table = Table("state", "activations", "clip", "moments", "NVMe bytes", "digest", "")
    agree = True

    # The numbers of two modes differ, so the first run of each mode says what the others must give.
    expected: dict[Mode, str] = {}
    began = time.monotonic()
    with WorkBar(console, "runs", total, "{:.0f}".format) as work:
        for number, (mode, name, activations) in enumerate(runs):
            digest, moved = _run_placement(device, directory, PLACEMENTS[name], activations, mode)
            is_equal = digest == expected.setdefault(mode, digest)
            agree &= is_equal
            table.add_row(
                name,
                activations,
                *_describe_mode(mode),
                format_megabytes(moved),
                digest[:DIGITS],
                _describe_verdict(is_equal),
            )

            if not number:
                about = format_seconds((time.monotonic() - began) * total)
                console.print(f"{total} runs of {STEPS} steps, about {about} in all", highlight=False)
            work.advance(1)

    console.print(table)
    outcome = "bit-identical" if agree else "NOT identical; please report this with `megatier doctor`"
    console.print(
        f"{total} runs of {STEPS} steps, compared if clipping and moments are the same: {outcome}", soft_wrap=True
    )
    return agree


def _verify_ranks(device: str, directory: Path, console: Console, ranks: Ranks, modes: Sequence[Mode]) -> bool:
    """Train on all ranks under some placements, and on each rank alone, and print a table of the outcomes."""
    table = Table("state", "processes", "clip", "moments", "NVMe bytes", "digest", "")
    agree = True
    for mode in modes:
        # All ranks train alone at the same time, so each has a folder of its own. Groups are a numeric choice, so there
        # are as many in both kinds of runs.
        alone = directory / f"alone-{ranks.rank}"
        alone.mkdir(parents=True, exist_ok=True)
        try:
            expected, _ = _run_placement(
                device, alone, PLACEMENTS["all in ram"], Activations.KEEP, mode, groups=ranks.size
            )
        finally:
            # Empty by now, since a run removes its block files. Those that it could not remove stay, as its error says.
            with contextlib.suppress(OSError):
                alone.rmdir()
        table.add_row("all in ram", "1", *_describe_mode(mode), "0.0 MB", expected[:DIGITS], "")

        for name, placement in RANK_PLACEMENTS.items():
            digest, moved = _run_placement(
                device, directory, placement, Activations.KEEP, mode, groups=ranks.size, ranks=ranks
            )
            # Every rank compares, so a GPU that computes other bits than the others is found.
            is_equal = all(ranks.all_gather_object(digest == expected))
            agree &= is_equal
            table.add_row(
                name,
                str(ranks.size),
                *_describe_mode(mode),
                format_megabytes(moved),
                digest[:DIGITS],
                _describe_verdict(is_equal),
            )

    console.print(table)
    total = len(RANK_PLACEMENTS) * len(modes)
    outcome = "bit-identical to one process" if agree else "NOT identical; please report this with `megatier doctor`"
    console.print(f"{total} runs of {STEPS} steps on {ranks.size} ranks: {outcome}", soft_wrap=True)
    return agree


def _run_placement(
    device: str,
    directory: Path,
    placement: Budgeted,
    activations: str,
    mode: Mode,
    *,
    groups: int = 1,
    ranks: Ranks | None = None,
) -> tuple[str, int]:
    """Return a digest of losses, weights and moments after a few steps, and the bytes moved from and to NVMe.

    Args:
        device: auto, cuda or cpu.
        directory: holds the block files.
        placement: one of `PLACEMENTS` or `RANK_PLACEMENTS`.
        activations: the policy.
        mode: settings that change numbers.
        groups: groups of a step.
        ranks: the ranks that share the state. Every one of them has to call it, and gets the same digest.
    """
    state, gpu, ram, share, generations = placement
    if len(state) > 1 and OPTIMIZERS[mode.optimizer].matrices:
        ram = MUON_RAM

    # A config has what a host has in all, and the table above what each rank is to get.
    on_host = 1 if ranks is None else ranks.local_size
    model = build_skeleton(AutoConfig.for_model(**TINY_MODEL), "sdpa")
    tiers = TiersConfig(
        device=device,  # type: ignore[arg-type]
        gpu=gpu,
        ram=host_ram(ram, Policy(num_ranks=1 if ranks is None else ranks.size, num_host_ranks=on_host)),
        nvme=(f"{directory}:{NVME_BYTES * on_host}",),
        state=state,
        streamed_share=share,
        generations=generations,
    )
    train = _make_settings(activations, mode, groups)
    digest = hashlib.sha256()

    # Without clipping and guard, updates run inside the backward, unless ranks share the state.
    numerics = NumericsConfig(guard=mode.clip is not None, products=mode.products)  # type: ignore[arg-type]
    data = replace(OF_LOOP, sequence_length=SEQUENCE_LENGTH)
    config = RunConfig(
        model=ModelConfig(config=TINY_MODEL),
        data=data,
        tiers=tiers,
        train=train,
        numerics=numerics,
    )
    setup = Setup.here(config, model, ranks)
    with Session(setup, seed=0, ranks=ranks) as session:
        session.load(Initialiser(model, seed=0))
        for step in range(1, STEPS + 1):
            result = session.engine.train_step(step, 1e-3, _make_batches(step, groups))

            # `repr` writes as many digits as tell a float from every other one, so no bit is lost.
            digest.update(repr((result.loss, result.grad_norm)).encode())

        session.player.drain()
        _add_state(digest, session)

        # Only the state of updates that wait for the norm can be streamed.
        defers = mode.clip is not None or ranks is not None
        _check_placement(session, state, streams=share > 0 and defers)
        moved = session.store.moved_bytes

    return digest.hexdigest(), moved["nvme_to_ram"] + moved["ram_to_nvme"]


def _make_batches(step: int, groups: int) -> list[dict[str, torch.Tensor]]:
    """Return the tokens of a step, in its groups."""
    # The step's number is its seed, so that each run sees the same tokens.
    generator = torch.Generator().manual_seed(step)
    shape = (SEQUENCES * groups, SEQUENCE_LENGTH)
    tokens = torch.randint(0, 512, shape, generator=generator, dtype=torch.int64, device="cpu")
    return [{"input_ids": rows, "labels": rows} for rows in tokens.chunk(groups)]


def _describe_mode(mode: Mode) -> tuple[str, str]:
    """Return the words of the table for a mode."""
    return "global" if mode.clip is not None else "off", mode.moments


def _describe_verdict(is_equal: bool) -> str:
    """Return the words of the table for a digest."""
    return "[green]equal[/]" if is_equal else "[red]different[/]"


def format_megabytes(num_bytes: int) -> str:
    """Return bytes as the table has them."""
    return f"{num_bytes / 1e6:.1f} MB"


def _make_settings(activations: str, mode: Mode, groups: int) -> TrainConfig:
    """Return the settings of a run, with the same sequences in each group."""
    return TrainConfig(
        steps=STEPS,
        batch=SEQUENCES * groups,
        groups=groups,
        activations=activations,  # type: ignore[arg-type]
        clip=mode.clip,
        moments=mode.moments,
        optimizer=mode.optimizer,  # type: ignore[arg-type]
        weight_decay=0.1,
    )


def _check_placement(session: Session, state: tuple[str, ...], *, streams: bool) -> None:
    """Make sure of a placement. One that was not what its name says would compare nothing."""
    placement = session.placement
    is_mixed = all(placement.state_bytes.get(tier) for tier in Tier)
    if state == ("gpu", "ram", "nvme"):
        assert is_mixed, "this placement is meant to be mixed"
    assert bool(placement.streamed) is streams, "this placement is meant to stream"


def _add_state(digest: hashlib._Hash, session: Session) -> None:
    """Add all weights and moments to a digest, whichever rank has them."""
    all_ranks = session.all_ranks
    for whole, unit in zip(session.whole_units, session.own_units, strict=True):
        # Ranks pad their shards to equal size, and deal out matrices, so parameters come by their names.
        tensors = sorted(whole.layout.tensors, key=lambda tensor: tensor.name)
        for kind in unit.layout.schema.kinds:
            shard = session.read_plane(unit, kind, 0, unit.layout.num_elements)
            plane = torch.cat(all_ranks.all_gather_object(shard))
            for tensor in tensors:
                # As bytes, since numpy has no bf16.
                elements = plane[tensor.start : tensor.stop]
                digest.update(elements.view(torch.uint8).numpy().tobytes())
