"""Short runs of tiny models on chosen tiers: their losses, norms, and digests of every weight and moment."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from small_setups import sections
from tiny_models import tiny_config
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from warm_python import WarmPython

from megatier.adapters.lora import add_adapters
from megatier.config.lora import LoraConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.drives.mounts import budget_bytes
from megatier.engine.step import StepResult
from megatier.engine.unit_model import Batch
from megatier.errors import PlanError
from megatier.layout import Layout
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.expert_units import cut_units
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.models.model_class import auto_class
from megatier.models.weights import WeightReader
from megatier.schedule import placement
from megatier.schedule.budgets import Budgets
from megatier.schedule.policy import Policy
from megatier.schedule.unit_spec import UnitSpec
from megatier.schedule.world import World
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.setup.workload import Workload
from megatier.tier import STATE_KINDS, Kind, Tier, round_up

KIB, MIB = 1 << 10, 1 << 20
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Embedding and head have 67,584 elements: three update chunks of the least size there is.
    "untied": ("llama", {**SMALL, "vocab_size": 2112, "num_hidden_layers": 2, "attention_dropout": 0.2}),
    "tied": ("llama_tied", {**SMALL, "num_hidden_layers": 4, "attention_dropout": 0.1}),
    "moe": ("qwen3_moe", {**SMALL, "num_hidden_layers": 3, "num_experts": 3, "moe_intermediate_size": 8}),
}
"""What the exactness tests run: dropout and a bare head, dropout and a tied one, a router with its auxiliary loss."""
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "routers": (
        "glm4_moe",
        {**SMALL, "num_hidden_layers": 3, "n_routed_experts": 3, "moe_intermediate_size": 8, "attention_dropout": 0.1},
    ),
}
"""A model whose routers stay in fp32 beside bf16."""
PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "products": (
        "llama",
        {**SMALL, "intermediate_size": 48, "vocab_size": 2112, "num_hidden_layers": 2, "attention_dropout": 0.2},
    ),
    "expert products": (
        "qwen3_moe",
        {
            **SMALL,
            "head_dim": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 2112,
            "num_hidden_layers": 2,
            "num_experts": 3,
            "moe_intermediate_size": 16,
            "output_router_logits": False,
        },
    ),
}
"""Models all of whose linear layers, and whose experts, have sizes that FP8 products take."""
NO_DROPOUT: dict[str, tuple[str, dict[str, Any]]] = {
    # The compiler draws other random numbers than torch does: without dropout both can be compared.
    "plain": ("llama", SMALL),
    # Heads long enough for flash attention on a GPU.
    "flash": (
        "llama",
        {**SMALL, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2112},
    ),
}
"""What the tests of compilation run."""
BATCH, TOKENS = 6, 16
UNGUARDED = NumericsConfig(guard=False)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the state shall lie; budgets are the least that do, plus room for some state."""

    tiers: tuple[str, ...]
    """Tiers that must hold state in the end."""
    gpu: int = 0
    """Bytes beyond the least."""
    ram: int = 0
    streamed: float = 0.0
    """Share of the parameters in RAM whose state passes through the GPU."""
    generations: int = 1
    savepoints: bool = False
    spills_grads: bool = False
    """RAM has no room for all gradients."""
    activations: int | None = None
    """Offloaded activations for which RAM has room beyond the least; others go to NVMe. None: as the tiers say."""


PLACES = {
    "gpu": Place(tiers=("gpu",), gpu=64 * MIB),
    "ram": Place(tiers=("ram",)),
    "ram_streamed": Place(tiers=("ram",), gpu=256 * KIB, streamed=0.7),
    "nvme": Place(tiers=("nvme",)),
    "gpu_ram": Place(tiers=("gpu", "ram"), gpu=100 * KIB),
    "ram_nvme": Place(tiers=("ram", "nvme"), ram=32 * KIB),
    "gpu_ram_nvme": Place(tiers=("gpu", "ram", "nvme"), gpu=100 * KIB, ram=32 * KIB),
    "nvme_twice": Place(tiers=("nvme",), generations=2),
    "ram_twice": Place(tiers=("ram",), ram=256 * KIB, generations=2),
    "nvme_grads": Place(tiers=("nvme",), spills_grads=True),
    "nvme_grads_some": Place(tiers=("nvme",), ram=64 * KIB, spills_grads=True),
}


@dataclass(frozen=True)
class Outcome:
    """What must not depend on tiers."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    digests: tuple[str, ...]
    """Of the masters, and of moments and momentum where there are any."""


def exactness_config(model: str) -> PretrainedConfig:
    """Config of one of these models."""
    family, options = {**MODELS, **NO_DROPOUT, **ROUTERS, **PRODUCTS}[model]
    return tiny_config(family, **options)


@contextlib.contextmanager
def opened(
    config: PretrainedConfig,
    mount: Path,
    place: Place,
    train: TrainConfig,
    *,
    source: WeightReader | None = None,
    device: str = "cpu",
    tokens: int = TOKENS,
    gpu_direct: bool = False,
    locked: int | None = None,
    numerics: NumericsConfig = UNGUARDED,
    frozen: Sequence[str] = (),
    lora: LoraConfig | None = None,
    fp32_products: bool = False,
    seed: int | None = 5,
    skeleton: PreTrainedModel | None = None,
    **model_options: Any,
) -> Iterator[Session]:
    """A loaded session with the least budgets under which the place holds.

    Args:
        config: of the model.
        mount: directory for block files.
        place: where the state shall lie.
        train: optimizer and numeric choices.
        source: initial weights; Hugging Face's own initialisation where not given.
        device: that computes.
        tokens: per sequence.
        gpu_direct: NVMe is read to the GPU past RAM.
        locked: bytes of RAM that may be page-locked; other RAM passes through rings.
        numerics: the guard; without it and without clipping, updates run inside the backward.
        frozen: parameters that are not trained.
        lora: adapters that are trained instead of the model.
        fp32_products: products as on a CPU without bf16 instructions, whatever this machine's CPU has.
        seed: of dropout, as in `megatier train`; None: as in loops of others, torch's generators are the caller's.
        skeleton: the model, with its adapters and all that is frozen; None: it is made of the config.
        model_options: of ModelConfig.
    """
    options = {"fused_loss": False, "loss_chunk": 20, **model_options}
    model = ModelConfig(config={"model_type": config.model_type}, **options)
    tiers = TiersConfig(
        device=device,  # type: ignore[arg-type]
        nvme=_mounts(mount, place),
        state=place.tiers,
        io_threads=2,
        update_threads=2,
        streamed_share=place.streamed,
        generations=place.generations,
        gpu_direct=gpu_direct,
        locked=locked,
    )
    if skeleton is None:
        skeleton = build_skeleton(config, model.attention)
        if lora is not None:
            add_adapters(skeleton, lora, "base")
        freeze(skeleton, frozen)
    run = sections(model, tiers, train, numerics, tokens, savepoints=place.savepoints)
    budgets = least_budgets(run, skeleton, place)
    run = run.changed({"tiers.gpu": budgets.gpu, "tiers.ram": budgets.ram})
    with (
        patch("megatier.setup.machine.cpu_has_bf16", return_value=not fp32_products),
        Session(Setup.here(run, skeleton), seed=seed) as session,
    ):
        session.load(source or Initialiser(session.model, 0))
        yield session


def _mounts(mount: Path, place: Place) -> tuple[str, ...]:
    if place.activations is not None:
        return (f"{mount}:128MiB",)
    return (f"{mount}:16MiB",) if "nvme" in place.tiers else ()


def least_budgets(config: RunConfig, skeleton: PreTrainedModel, place: Place, ranks: int = 1) -> Budgets:
    """Placed again with what each refusal says is missing; a session opens once, with what was found.

    With ranks, the budgets are those of one of them.
    """
    units = cut_units(skeleton, config.model.expert_parts)
    work = Workload.of(config, skeleton, units, World(ranks, ranks))
    return _least(work.specs, work.policy, sum(budget_bytes(mount) for mount in config.tiers.mounts), place)


@functools.cache
def _least(specs: tuple[UnitSpec, ...], policy: Policy, nvme: int, place: Place) -> Budgets:
    """See `least_budgets`; many runs differ in nothing that changes them."""
    budgets = Budgets(1, 1, nvme)
    while True:
        try:
            if not _is_short_of_ram(placement.place(specs, budgets, policy), place):
                size = max(round_up(unit.activation_bytes) for unit in specs)
                more = 0 if "nvme" in place.tiers else place.ram
                return replace(budgets, ram=budgets.ram + size * (place.activations or 0) + more)
            budgets = replace(budgets, ram=budgets.ram + 16 * KIB)
        except PlanError as short:
            if short.what.startswith("GPU"):
                budgets = replace(budgets, gpu=short.needed_bytes + place.gpu)
            else:
                more = place.ram * short.what.startswith("RAM slots")
                budgets = replace(budgets, ram=budgets.ram + short.needed_bytes - short.had_bytes + more)


def _is_short_of_ram(placed: placement.Placement, place: Place) -> bool:
    """Gradients or all state spill though they should not."""
    holds_some = Tier.RAM in placed.state_bytes or not {"ram", "nvme"} <= set(place.tiers)
    return not holds_some or (Tier.NVME in placed.grad_homes.values() and not place.spills_grads)


def random_groups(train: TrainConfig, vocab: int, step: int) -> list[Batch]:
    """One step's batches, one per group, with a few labels that do not count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, vocab, (train.batch, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    parts = zip(ids.chunk(train.groups), labels.chunk(train.groups), strict=True)
    return [{"input_ids": part, "labels": wanted} for part, wanted in parts]


def run_steps(session: Session, train: TrainConfig, num_steps: int = 5) -> list[StepResult]:
    """Train on the same batches as every other run of as many groups."""
    vocab = session.model.config.get_text_config().vocab_size
    return [session.engine.train_step(n, 1e-2, random_groups(train, vocab, n)) for n in range(1, num_steps + 1)]


def read_parameters(session: Session, kind: Kind) -> dict[str, Tensor]:
    """Every parameter's fp32 master (Kind.WEIGHT), or moment if it is trained, by name, on the CPU."""
    session.player.drain()
    found: dict[str, list[Tensor]] = {}
    shapes = {tensor.name: tensor.parameter_shape for unit in session.own_units for tensor in unit.layout.tensors}
    for unit in session.own_units:
        plane, layout = read_unit(session, unit, kind), unit.layout if kind is Kind.WEIGHT else unit.layout.trained
        for tensor in layout.tensors:
            found.setdefault(tensor.name, []).append(plane[tensor.start : tensor.stop])
    return {name: torch.cat(parts).view(shapes[name]) for name, parts in found.items()}


def read_unit(session: Session, unit: Unit, kind: Kind) -> Tensor:
    """A whole plane with its padding, the fp32 master for Kind.WEIGHT."""
    if kind is Kind.WEIGHT:
        return session.read_master(unit, 0, unit.layout.num_elements)
    return session.read_plane(unit, kind, 0, unit.layout.num_trained)


def outcome(session: Session, results: Sequence[StepResult]) -> Outcome:
    """Summarise a run that is over."""
    session.player.drain()
    held = {kind for unit in session.own_units for kind in unit.layout.schema.kinds} - {Kind.REMAINDER}
    digests = []
    for kind in sorted(held, key=STATE_KINDS.index):
        digest = hashlib.sha256()
        for unit in session.own_units:
            if kind in unit.layout.schema.kinds:
                digest.update(read_unit(session, unit, kind).view(torch.uint8).numpy().tobytes())
        digests.append(digest.hexdigest())
    return Outcome(tuple(r.loss for r in results), tuple(r.grad_norm for r in results), tuple(digests))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some steps of one of these models, and all that may change their numbers or must not."""

    model: str
    dtype: str = "bf16"
    clip: float | None = 0.5
    groups: int = 1
    slices: int = 1
    place: str = "ram"
    activations: str = "keep"
    kept_attention: bool = False
    offload_attention: bool = False
    attention: str = "sdpa"
    device: str = "cpu"
    seed: int = 5
    fp32_products: bool = False
    """As on a CPU without bf16 instructions; slower for tiny models."""
    compile: bool | None = None
    """None: on a GPU."""
    saved_share: float = 0.8
    fused_loss: bool = False
    loss_chunk: int = 20
    tile_tokens: int | None = None
    eps: float = 1e-8
    """AdamW's. With a large one, an update is in proportion to its gradient, and no gradient near zero decides."""
    moments: str = "fp32"
    optimizer: str = "adamw"
    expert_parts: int = 1
    gpu_direct: bool = False
    locked: int | None = None
    guard: bool = False
    """Without it and without clipping, updates run inside the backward."""
    steps: int = 5
    products: str = "bf16"

    @property
    def numerics(self) -> NumericsConfig:
        """The guard, and the type of products."""
        return NumericsConfig(guard=self.guard, products=self.products)  # type: ignore[arg-type]

    @property
    def train(self) -> TrainConfig:
        """Optimizer, numeric choices, activation policy."""
        return TrainConfig(
            steps=self.steps,
            batch=BATCH,
            groups=self.groups,
            slices=self.slices,
            activations=self.activations,  # type: ignore[arg-type]
            kept_attention=self.kept_attention,
            offload_attention=self.offload_attention,
            clip=self.clip,
            weight_decay=0.1,
            eps=self.eps,
            moments=self.moments,  # type: ignore[arg-type]
            optimizer=self.optimizer,  # type: ignore[arg-type]
        )

    def __call__(self, mount: Path) -> Outcome:
        """Run; check that the state lies where it shall."""
        place = PLACES[self.place]
        config = exactness_config(self.model)
        options: dict[str, Any] = {
            "compute_dtype": self.dtype,
            "attention": self.attention,
            "compile": self.compile,
            "saved_share": self.saved_share,
            "fused_loss": self.fused_loss,
            "loss_chunk": self.loss_chunk,
            "tile_tokens": self.tile_tokens,
            "expert_parts": self.expert_parts,
            "gpu_direct": self.gpu_direct,
            "locked": self.locked,
            "fp32_products": self.fp32_products,
            "seed": self.seed,
        }
        with opened(config, mount, place, self.train, device=self.device, numerics=self.numerics, **options) as session:
            held = {tier for tier, size in session.placement.state_bytes.items() if size}
            assert held == {Tier(name) for name in place.tiers}, f"{self.place} lies on {held}"
            assert self.locked is not None or session.store.staging is None
            assert bool(session.placement.streamed) == bool(place.streamed and (self.clip or self.guard))
            return outcome(session, run_steps(session, self.train, self.steps))


Short = functools.partial(Run, steps=3)
"""A run of three steps, which see all that steps may do with state: the first finds new moments, the second what the
first wrote, and the third writes over what the first read."""


def placements_that_differ(
    run: Run, settings: Sequence[tuple[str, str]], mount: Path
) -> tuple[Outcome, list[tuple[str, str]]]:
    """The outcome of a run, and those of its other places and activation policies that have another one."""
    expected = run(mount)
    found = {pair: replace(run, place=pair[0], activations=pair[1])(mount) for pair in settings}
    return expected, [pair for pair, result in found.items() if result != expected]


def run_in_fresh_process(runs: Sequence[Run], mount: Path, compiled: Path | None = None) -> list[Outcome]:
    """The same runs, one after another, in one new interpreter with deterministic kernels.

    Args:
        runs: what to run.
        mount: directory for block files.
        compiled: directory for compiled code; the user's own where not given.
    """
    command = [sys.executable, *_program(runs, mount)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if compiled is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=540)
    return _outcomes(done)


def run_in_fork(runs: Sequence[Run], mount: Path, python: WarmPython) -> list[Outcome]:
    """The same runs in a fork of another interpreter, on the CPU: its hashes and its addresses are others too."""
    return _outcomes(python.run(_program(runs, mount)))


def _program(runs: Sequence[Run], mount: Path) -> list[str]:
    """This file, with the words that `main` takes."""
    return [__file__, str(mount), *(json.dumps(asdict(run)) for run in runs)]


def _outcomes(done: subprocess.CompletedProcess[str]) -> list[Outcome]:
    """What `main` wrote."""
    assert done.returncode == 0, done.stderr
    return [Outcome(*(tuple(part) for part in parts)) for parts in json.loads(done.stdout.splitlines()[-1])]


class ModelWeights:
    """The parameters of a plain model, as a source for Session.load."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters())

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        for tensor in (shard or unit.layout).tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]


def plain_model(config: PretrainedConfig, attention: str = "sdpa") -> PreTrainedModel:
    """The model as Hugging Face builds it, in fp32, training, with every parameter moved off its default."""
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "attn_implementation": attention}
    model = auto_class(config).from_config(config, **options)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.train()
    return model


def main() -> None:
    """Mount and runs, as JSON, on the command line; their outcomes as one line of JSON."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    outcomes = [Run(**json.loads(text))(Path(sys.argv[1])) for text in sys.argv[2:]]
    sys.stdout.write(json.dumps([astuple(outcome) for outcome in outcomes]) + "\n")


if __name__ == "__main__":
    main()
