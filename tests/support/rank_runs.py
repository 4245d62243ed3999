"""Short runs of tiny models on several ranks: what each rank has in the end, and what all of them have together."""

from __future__ import annotations

import contextlib
import math
import os
import unittest.mock
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from small_setups import sections
from tiny_models import tiny_config
from tiny_runs import MODELS, NO_DROPOUT, PRODUCTS, ROUTERS, TOKENS, Place, least_budgets, random_groups
from tiny_vision import image_batch, text_batch, vision_config
from torch import Tensor
from transformers import PreTrainedModel

from megatier.adapters.lora import add_adapters
from megatier.config.lora import LoraConfig
from megatier.config.schema import ModelConfig, NumericsConfig, TiersConfig, TrainConfig
from megatier.engine.step import StepResult
from megatier.engine.unit_model import Batch
from megatier.layout import Layout
from megatier.models import weights
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.models.weights import WeightReader
from megatier.ranks import ranks as ranks_module
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.schedule.budgets import host_ram
from megatier.schedule.policy import Policy
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.tier import Kind, Phase, Tier, Transport

KINDS = (Kind.WEIGHT, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MOMENTUM)


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """Some steps of a tiny model, and all that may change their numbers or must not."""

    model: str = "untied"
    dropout: float = 0.1
    dtype: str = "bf16"
    groups: int = 4
    batch: int = 8
    slices: int = 1
    steps: int = 3
    clip: float | None = 0.5
    expert_parts: int = 1
    tile_tokens: int | None = None
    activations: Literal["keep", "recompute", "offload"] = "keep"
    frozen: tuple[str, ...] = ()
    adapters: int = 0
    """The rank of the adapters that are trained; 0: the model is."""
    learning_rate: float = 1e-2
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    optimizer: Literal["adamw", "muon", "lion"] = "adamw"
    products: Literal["bf16", "fp8"] = "bf16"
    device: Literal["cpu", "cuda"] = "cpu"
    way: Transport | None = None
    """What moves bytes between ranks; None: the best that there is."""
    images: tuple[str, ...] = ()
    """For each step, which groups have images: a letter for each, "i" if it has. The model has a vision tower then."""

    @property
    def train(self) -> TrainConfig:
        """Optimizer and numeric choices."""
        return TrainConfig(
            steps=self.steps,
            batch=self.batch,
            groups=self.groups,
            slices=self.slices,
            clip=self.clip,
            weight_decay=0.1,
            moments=self.moments,
            optimizer=self.optimizer,
            activations=self.activations,
        )


@contextlib.contextmanager
def opened(
    skeleton: PreTrainedModel, model: ModelConfig, run: RankRun, place: Place, mount: Path, ranks: Ranks | None
) -> Iterator[Session]:
    """A session of this rank, with no weights yet."""
    size = 1 if ranks is None else ranks.size
    numerics = NumericsConfig(guard=True, products=run.products)
    nvme = (f"{mount}:{size * 64}MiB",) if "nvme" in place.tiers or place.activations is not None else ()
    tiers = TiersConfig(
        device=run.device,
        nvme=nvme,
        state=place.tiers,
        io_threads=2,
        update_threads=2,
        streamed_share=place.streamed,
        generations=place.generations,
    )
    config = sections(model, tiers, run.train, numerics, TOKENS)
    least = least_budgets(config, skeleton, place, size)
    ram = host_ram(least.ram, Policy(num_ranks=size, num_host_ranks=size))
    config = config.changed({"tiers.gpu": least.gpu, "tiers.ram": ram})
    with Session(Setup.here(config, skeleton, ranks), seed=5, ranks=ranks) as session:
        yield session


@dataclass(kw_only=True)
class RankOutcome:
    """What one rank has in the end."""

    losses: list[float]
    norms: list[float]
    skipped: list[str | None]
    held: list[str]
    """Tiers that hold state."""
    streamed: tuple[str, ...]
    """Units whose state passes through the GPU."""
    moved: dict[str, int]
    demanded: dict[str, int]
    way: Transport | None
    """What moved weights and gradients between ranks."""
    runs: dict[Kind, dict[str, list[tuple[int, Any]]]] = field(default_factory=dict)
    """By kind and parameter: runs of fp32 elements, each with its first element."""


@contextlib.contextmanager
def session_on_ranks(run: RankRun, place: Place, mount: Path) -> Iterator[Session]:
    """A session of this rank, without weights, with the least budgets that hold the place. Call it on all ranks."""
    if run.images:
        config = vision_config(run.model)
    else:
        family, options = {**MODELS, **NO_DROPOUT, **ROUTERS, **PRODUCTS}[run.model]
        config = tiny_config(family, **{**options, "attention_dropout": run.dropout})
    model = ModelConfig(
        config={"model_type": config.model_type},
        compute_dtype=run.dtype,  # type: ignore[arg-type]
        fused_loss=False,
        loss_chunk=20,
        expert_parts=run.expert_parts,
        tile_tokens=run.tile_tokens,
        compile=False,
    )
    skeleton = build_skeleton(config, model.attention)
    if run.adapters:
        add_adapters(skeleton, LoraConfig(rank=run.adapters, dropout=run.dropout), "base")
    freeze(skeleton, run.frozen)
    os.environ["NCCL_P2P_DISABLE"] = "0" if run.way in (None, Transport.COPIES) else "1"
    torch.set_num_threads(1)
    with (
        joined(run.device) as ranks,
        no_ram_for(run.way),
        opened(skeleton, model, run, place, mount, ranks) as session,
    ):
        yield session


def no_ram_for(way: Transport | None) -> contextlib.AbstractContextManager[object]:
    """Let ranks have no RAM to share, if they are to go another way."""
    if way not in (Transport.KERNELS, Transport.GLOO):
        return contextlib.nullcontext()
    return unittest.mock.patch.object(ranks_module, "open_shared_ram", side_effect=OSError("none here"))


def train_step(session: Session, run: RankRun, step: int) -> StepResult:
    """One step; the first one is step 1."""
    if run.images:
        groups = image_groups(run, step)
    else:
        groups = random_groups(run.train, session.model.config.get_text_config().vocab_size, step)
    return session.engine.train_step(step, run.learning_rate, groups)


def image_groups(run: RankRun, step: int) -> list[Batch]:
    """One step's batches, with images in those of which the run says so."""
    rows = run.batch // run.groups
    return [
        image_batch(run.model, rows, seed) if kind == "i" else text_batch(rows, seed=seed)
        for seed, kind in enumerate(run.images[step - 1], 10 * step)
    ]


class DrawnWeights:
    """Weights that depend on the names of parameters alone, as a source for Session.load."""

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        for tensor in (shard or unit.layout).tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
            whole = torch.randn(math.prod(tensor.parameter_shape), generator=generator) * 0.1
            yield tensor.start, whole[slice(*tensor.elements)]


def first_weights(session: Session, run: RankRun) -> WeightReader:
    """What a run begins with."""
    return DrawnWeights() if run.adapters else Initialiser(session.model, 0)


def train_on_ranks(run: RankRun, place: Place, mount: Path) -> RankOutcome:
    """Run on this rank. Call it on all."""
    with session_on_ranks(run, place, mount) as session:
        session.load(first_weights(session, run))
        return train_steps(session, run)


def train_steps(session: Session, run: RankRun) -> RankOutcome:
    """All steps of a run whose weights are loaded."""
    before = session.store.moved_bytes.copy()
    results = [train_step(session, run, step) for step in range(1, run.steps + 1)]
    session.player.drain()
    others = Counter[str]() if session.ranks is None else session.ranks.moved_bytes
    moved = session.store.moved_bytes - before + others
    return RankOutcome(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        skipped=[result.skipped for result in results],
        held=sorted(str(tier) for tier, size in session.placement.state_bytes.items() if size),
        streamed=session.placement.streamed,
        moved={name: size for name, size in moved.items() if size},
        demanded={name: size for name, size in session.player.demanded.items() if size},
        way=None if session.ranks is None else session.ranks.transport,
        runs={kind: _runs(session, kind) for kind in KINDS},
    )


def load_on_ranks(run: RankRun, place: Place, mount: Path, folder: Path) -> tuple[int, int, RankOutcome]:
    """Load a folder's weights on this rank, and train. Call it on all ranks.

    Returns:
        The bytes of weights that this rank read, the bytes of its shards in the folder, and what it has in the end.
    """
    num_bytes = 0
    read = weights.read_exactly

    def counted(file: Any, piece: Tensor, stored: Any) -> None:
        nonlocal num_bytes
        num_bytes += piece.nbytes
        read(file, piece, stored)

    with session_on_ranks(run, place, mount) as session:
        with unittest.mock.patch.object(weights, "read_exactly", counted):
            session.load(weights.SafetensorsFolder(folder, session.model))
        own = 4 * sum(tensor.num_elements for unit in session.own_units for tensor in unit.layout.tensors)
        return num_bytes, own, train_steps(session, run)


def evaluate_on_ranks(run: RankRun, place: Place, mount: Path, num_batches: int) -> tuple[list[float | None], int]:
    """Evaluate twice, before a step and after it, on batches that count fewer and fewer tokens. Call it on all ranks.

    Returns:
        Both held-out losses, and how many forwards this rank has run for them.
    """
    forwards = 0
    with session_on_ranks(run, place, mount) as session:
        session.load(Initialiser(session.model, 0))
        batches = random_groups(replace(run.train, groups=num_batches, batch=2 * num_batches), 160, 9)
        for number, batch in enumerate(batches):
            batch["labels"][:, TOKENS - 2 * number :] = -100
        nothing = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
        loss = session.engine.model.loss

        def counted(*arguments: Any) -> Tensor:
            nonlocal forwards
            forwards += 1
            return loss(*arguments)

        losses = []
        for step in (1, 2):
            with unittest.mock.patch.object(session.engine.model, "loss", counted):
                losses.append(session.engine.evaluate([nothing, *batches]))
            train_step(session, run, step)
        return losses, forwards


def leave_units_out(place: Place, mount: Path, left_out: Sequence[Sequence[str]]) -> tuple[list[int], int]:
    """Play passes by hand, of which each rank leaves out other units. Call it on all ranks.

    Args:
        place: where the state lies.
        mount: a directory for NVMe.
        left_out: what each rank leaves out in turn; the next pass gives it to the next rank.

    Returns:
        The numbers of units of each pass that have a gradient, and of slots for whole weights.
    """
    run = RankRun()
    with session_on_ranks(run, place, mount) as session:
        session.load(Initialiser(session.model, 0))
        assert session.ranks is not None
        rank, size = session.ranks.rank, session.ranks.size
        final = []
        for step in range(1 + len(left_out)):
            missing = left_out[(step + rank) % len(left_out)] if step else ()
            session.player.begin("train")
            for group in range(run.groups // size):
                _use_all(session, group, missing)
            session.player.end()
            session.player.drain_gradients()
            final.append(len(session.player._own_gradients.final))
            session.player.drop_updates()

        session.player.drain()
        return final, session.placement.num_slots(Tier.GPU, Kind.GATHERED)


def _use_all(session: Session, group: int, missing: Sequence[str]) -> None:
    """Use all units of a group, forward and backward, but for those that are missing."""
    player = session.player
    units = [unit.name for unit in session.own_units if unit.name not in missing]
    for unit in units:
        player.weights.enter(unit, Phase.FORWARD, group).leave()
    for unit in reversed(units):
        player.weights.enter(unit, Phase.BACKWARD, group).leave()
        player.grad_sink.acquire_grad_buffer(unit).zero_()
        player.grad_sink.submit_grad(unit, group=group)


def _runs(session: Session, kind: Kind) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for unit in session.own_units:
        layout = unit.layout if kind is Kind.WEIGHT else unit.layout.trained
        if not layout.num_elements or kind not in layout.schema.kinds:
            continue
        plane = (
            session.read_master(unit, 0, layout.num_elements)
            if kind is Kind.WEIGHT
            else session.read_plane(unit, kind, 0, layout.num_elements).float()
        )
        for tensor in layout.tensors:
            found.setdefault(tensor.name, []).append((tensor.offset, plane[tensor.start : tensor.stop].numpy().copy()))
    return found


def together(outcomes: Sequence[RankOutcome], kind: Kind) -> dict[str, Tensor]:
    """Each parameter, whole and flat, from the runs that the ranks have of it."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for outcome in outcomes:
        for name, runs in outcome.runs[kind].items():
            found.setdefault(name, []).extend(runs)
    whole = {}
    for name, runs in found.items():
        ordered = sorted(runs, key=lambda run: run[0])
        ends = [offset + len(values) for offset, values in ordered]
        assert [offset for offset, _ in ordered] == [0, *ends[:-1]], f"{name} has gaps or overlaps"
        whole[name] = torch.cat([torch.from_numpy(values) for _, values in ordered])
    return whole
