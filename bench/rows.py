"""The rows of the table in docs/benchmarks.md: each has a shape, its tokens, and the tiers where its state may lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from peers.shapes import SHAPES, model_config
from transformers import PreTrainedModel

from megatier.adapters.lora import add_adapters
from megatier.config.data_section import DataConfig
from megatier.config.lora import LoraConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton

GIB = 1 << 30
RATE = 1e-5
"""Learning rate of every step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the table."""

    shape: str
    """A name in `peers.shapes.SHAPES`."""
    batch: int
    """Sequences of a step."""
    sequence: int = 1024
    """Tokens of a sequence."""
    what: str
    """The budgets in words."""
    tiers: Mapping[str, Any]
    """Settings of the section `tiers`."""
    nvme: int = 0
    """Bytes of NVMe."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `model`."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `train`."""
    numerics: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `numerics`."""
    rank: int = 0
    """Of adapters beside all linear layers; 0: the model itself is trained."""
    in_place: bool = False
    """Whether the base is read where it lies, in a model's own files, as `megatier train` reads it."""


# The machine has 128 GiB. The system, Python and what the budgets do not count take the rest.
FREE: dict[str, Any] = {"state": ("gpu", "ram"), "ram": 116 * GIB}
# A host with four GPUs of 80 GB has 503 GiB, of which one GPU may take all.
LARGE_HOST: dict[str, Any] = {"state": ("gpu", "ram"), "ram": 462 * GIB}
# Four GPUs of that host share its RAM.
FOUR_GPUS: dict[str, Any] = {"state": ("gpu", "ram"), "ram": 460 * GIB}
# A host with eight of them and 560 GiB is planned: nobody has measured one.
EIGHT_GPUS: dict[str, Any] = {"state": ("gpu", "ram"), "ram": 512 * GIB}
RAM_ONLY: dict[str, Any] = {"state": ("ram",), "ram": 116 * GIB}

# These budgets are so small that 1G parameters of the 8B model spill.
SPILLED: dict[str, Any] = {
    "tiers": {"state": ("gpu", "ram", "nvme"), "gpu": 31 * GIB // 2, "ram": 163 * GIB // 2},
    "nvme": 32 * GIB,
    "model": {"saved_share": 0.15},
    "train": {"clip": 1e9, "slices": 2},
}
TWICE: dict[str, Any] = {"tiers": SPILLED["tiers"] | {"generations": 2, "ram": 84 * GIB}}
# Updates run inside the backward, so that no gradient takes room until the norm is known.
IMMEDIATE: dict[str, Any] = {"train": {"clip": None}, "numerics": {"guard": False}}
CLIPPED: dict[str, Any] = {"train": SPILLED["train"] | {"clip": 1e-3}}
ON_NVME = Run(
    shape="3b24",
    batch=16,
    what="all state on NVMe, RAM 16 GiB",
    tiers={"state": ("nvme",), "ram": 16 * GIB, "gpu": 40 * GIB},
    nvme=32 * GIB,
)
ADAPTERS = Run(shape="8b", batch=16, what="", tiers={}, model={"saved_share": 1.0}, rank=16)
ADAPTERS_BEYOND = Run(
    shape="15b",
    batch=4,
    what="adapters, base on NVMe, GPU 8 GiB",
    tiers={"state": ("nvme",), "ram": 12 * GIB, "gpu": 11 * GIB // 2, "gpu_limit": 8 * GIB},
    nvme=36 * GIB,
    model={"saved_share": 0.0, "loss_chunk": 1024},
    train={"activations": "offload"},
    rank=16,
)
ROWS = {
    1: Run(shape="8b", batch=16, what="free", tiers=FREE | {"gpu": 83 * GIB}),
    2: Run(
        shape="8b",
        batch=16,
        what="no state on the GPU",
        tiers=RAM_ONLY | {"gpu": 69 * GIB, "streamed_share": 0.54},
    ),
    3: Run(shape="8b", batch=64, what="free", tiers=FREE | {"gpu": 84 * GIB}, train={"groups": 4}),
    4: Run(
        shape="8b",
        batch=64,
        what="GPU 24 GiB",
        tiers=FREE | {"gpu": 11 * GIB, "gpu_limit": 24 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 1024},
        train={"slices": 4, "activations": "offload", "kept_layers": 8},
    ),
    5: Run(shape="3b", batch=16, what="free", tiers=FREE | {"gpu": 60 * GIB}),
    6: Run(
        shape="3b",
        batch=16,
        what="no state on the GPU",
        tiers=RAM_ONLY | {"gpu": 60 * GIB, "streamed_share": 0.5},
    ),
    7: Run(
        shape="3b",
        batch=16,
        what="GPU 24 GiB",
        tiers=FREE | {"gpu": 79 * GIB // 4, "gpu_limit": 24 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 1024},
        train={"slices": 2, "activations": "offload", "kept_layers": 4},
    ),
    8: Run(
        shape="8b",
        batch=1,
        sequence=131_072,
        what="free, one sequence",
        tiers=FREE | {"gpu": 40 * GIB},
        model={"saved_share": 0.0},
        train={"kept_attention": False},
    ),
    9: Run(
        shape="8b",
        batch=1,
        sequence=262_144,
        what="free, one sequence",
        tiers=FREE | {"gpu": 5 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"kept_attention": False},
    ),
    11: ON_NVME,
    12: Run(
        shape="3b24",
        batch=16,
        what="weights in RAM, RAM 16 GiB",
        tiers={"state": ("ram", "nvme"), "ram": 16 * GIB, "gpu": 40 * GIB},
        nvme=32 * GIB,
    ),
    13: Run(
        shape="3b24",
        batch=16,
        what="RAM 63 GB, no state on the GPU",
        tiers={"state": ("ram",), "ram": 63 * 10**9, "gpu": 60 * GIB, "streamed_share": 0.5},
    ),
    14: Run(shape="8b", batch=128, what="1G parameters spill, nothing clipped", **SPILLED),
    15: replace(Run(shape="8b", batch=128, what="the same, updated in the backward", **SPILLED), **TWICE),
    16: replace(Run(shape="8b", batch=128, what="the same, always clipped", **SPILLED), **TWICE | CLIPPED),
    17: Run(
        shape="15b",
        batch=16,
        what="free, on two GPUs",
        tiers=FREE | {"gpu": 92 * GIB, "ram": 200 * GIB},
        model={"saved_share": 0.3},
    ),
    18: Run(
        shape="32b",
        batch=16,
        what="GPUs and RAM of two, no drive",
        tiers=FREE | {"gpu": 117 * GIB, "ram": 228 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"slices": 4},
    ),
    19: Run(
        shape="8b",
        batch=8,
        sequence=8192,
        what="free, 8,192 tokens in a sequence",
        tiers=FREE | {"gpu": 68 * GIB},
        train={"groups": 4},
    ),
    20: Run(
        shape="8b",
        batch=2,
        sequence=32_768,
        what="free, 32,768 tokens in a sequence",
        tiers=FREE | {"gpu": 26 * GIB},
        train={"groups": 2},
    ),
    21: Run(
        shape="8b",
        batch=1,
        sequence=131_072,
        what="free, one sequence, attention kept",
        tiers=FREE | {"gpu": 30 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"kept_attention": True},
    ),
    22: Run(
        shape="3b",
        batch=1,
        sequence=524_288,
        what="free, one sequence in tiles of tokens, attention kept",
        tiers=FREE | {"gpu": 16 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048, "tile_tokens": 16_384},
        train={"activations": "offload", "kept_attention": True},
    ),
    23: Run(
        shape="8b",
        batch=1,
        sequence=32_768,
        what="GPU 24 GiB, 32,768 tokens in a sequence",
        tiers=FREE | {"gpu": 11 * GIB // 2, "gpu_limit": 24 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"activations": "offload", "kept_attention": True},
    ),
    24: Run(
        shape="8b",
        batch=1,
        sequence=262_144,
        what="one sequence, attention kept, inputs of layers in RAM and on NVMe",
        tiers=FREE | {"gpu": 5 * GIB},
        nvme=56 * GIB,
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"activations": "offload", "kept_attention": True},
    ),
    25: replace(ON_NVME, what="all state on NVMe, RAM 16 GiB, moments in bf16", train={"moments": "bf16"}),
    26: replace(ON_NVME, what="all state on NVMe, RAM 16 GiB, Muon", train={"optimizer": "muon"}),
    27: replace(ADAPTERS, what="adapters, base in RAM", tiers=RAM_ONLY | {"gpu": 12 * GIB}),
    28: replace(ADAPTERS, what="adapters, base on the GPU", tiers=FREE | {"gpu": 24 * GIB}),
    29: ADAPTERS_BEYOND,
    30: replace(
        ADAPTERS_BEYOND,
        what="adapters, base in RAM, GPU 8 GiB",
        tiers={**ADAPTERS_BEYOND.tiers, "state": ("ram",), "ram": 60 * GIB},
        nvme=0,
    ),
    31: replace(ON_NVME, what="all state on NVMe, RAM 16 GiB, moments in fp8", train={"moments": "fp8"}),
    32: replace(ADAPTERS_BEYOND, what="adapters, base read where it lies on NVMe, GPU 8 GiB", in_place=True),
    33: Run(
        shape="7b",
        batch=160,
        what="GPU 80 GB, RAM of a large host",
        tiers=LARGE_HOST | {"gpu": 10 * GIB},
        model={"saved_share": 0.6},
        train={"groups": 8},
    ),
    34: Run(
        shape="32b",
        batch=96,
        what="GPU 80 GB, RAM of a large host, no drive",
        tiers=LARGE_HOST | {"gpu": 36 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"slices": 4, "activations": "offload", "kept_attention": False},
    ),
    35: Run(
        shape="15b",
        batch=16,
        what="GPU 80 GB, RAM of a large host",
        tiers=LARGE_HOST | {"gpu": 13 * GIB},
        model={"saved_share": 0.4},
    ),
    36: Run(
        shape="15b",
        batch=64,
        what="GPU 80 GB, RAM of a large host",
        tiers=LARGE_HOST | {"gpu": 13 * GIB},
        model={"saved_share": 0.4},
        train={"groups": 4},
    ),
    37: Run(
        shape="30b-a3b",
        batch=128,
        what="GPU 80 GB, RAM of a large host, no drive",
        tiers=LARGE_HOST | {"gpu": 48 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"slices": 4, "activations": "offload", "kept_attention": False},
    ),
    38: Run(
        shape="117b-a5b",
        batch=16,
        what="GPU 80 GB, RAM of a large host, moments in fp8, updated in the backward",
        tiers={"state": ("gpu", "ram", "nvme"), "gpu": 48 * GIB, "ram": 462 * GIB},
        nvme=200 * GIB,
        model={"saved_share": 0.0, "loss_chunk": 1024, "expert_parts": 16},
        train={"moments": "fp8", "slices": 4, "activations": "recompute", "kept_attention": False} | IMMEDIATE["train"],
        numerics=IMMEDIATE["numerics"],
    ),
    39: Run(
        shape="68b",
        batch=8,
        what="GPU 141 GB, RAM of a large host, updated in the backward",
        tiers={"state": ("gpu", "ram", "nvme"), "gpu": 120 * GIB, "ram": 469 * GIB},
        nvme=208 * GIB,
        model={"saved_share": 0.0, "loss_chunk": 1024},
        train={"activations": "recompute", "kept_attention": False} | IMMEDIATE["train"],
        numerics=IMMEDIATE["numerics"],
    ),
    40: Run(
        shape="8b",
        batch=1,
        sequence=524_288,
        what="GPU 141 GB, RAM of a large host, one sequence, attention kept in RAM",
        tiers=LARGE_HOST | {"gpu": 18 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"activations": "offload", "kept_attention": True, "offload_attention": True},
    ),
    41: Run(
        shape="3b",
        batch=16,
        what="four GPUs of 80 GB",
        tiers=FOUR_GPUS | {"gpu": 44 * 10**9},
        model={"saved_share": 0.4},
    ),
    42: Run(
        shape="8b",
        batch=16,
        what="four GPUs of 80 GB",
        tiers=FOUR_GPUS | {"gpu": 44 * GIB},
        model={"saved_share": 0.2, "loss_chunk": 2048},
    ),
    43: Run(
        shape="15b",
        batch=16,
        what="four GPUs of 80 GB and their host's RAM",
        tiers=FOUR_GPUS | {"gpu": 44 * GIB},
        model={"saved_share": 0.15, "loss_chunk": 2048},
    ),
    44: Run(
        shape="32b",
        batch=32,
        what="four GPUs of 80 GB and their host's RAM",
        tiers=FOUR_GPUS | {"gpu": 62 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"slices": 4, "activations": "offload", "kept_attention": False},
    ),
    45: Run(
        shape="3b",
        batch=16,
        what="eight GPUs of 80 GB",
        tiers=EIGHT_GPUS | {"gpu": 44 * 10**9},
        model={"saved_share": 0.4},
    ),
    46: Run(
        shape="8b",
        batch=16,
        what="eight GPUs of 80 GB",
        tiers=EIGHT_GPUS | {"gpu": 44 * GIB},
        model={"saved_share": 0.2, "loss_chunk": 2048},
    ),
    47: Run(
        shape="15b",
        batch=16,
        what="eight GPUs of 80 GB",
        tiers=EIGHT_GPUS | {"gpu": 44 * GIB},
        model={"saved_share": 0.15, "loss_chunk": 2048},
    ),
    48: Run(
        shape="32b",
        batch=32,
        what="eight GPUs of 80 GB",
        tiers=EIGHT_GPUS | {"gpu": 62 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 2048},
        train={"slices": 4, "activations": "offload", "kept_attention": False},
    ),
    49: Run(
        shape="68b",
        batch=4,
        what="eight GPUs of 80 GB and their host's RAM, no drive",
        tiers=EIGHT_GPUS | {"gpu": 63 * GIB},
        model={"saved_share": 0.0, "loss_chunk": 1024},
        train={"activations": "recompute", "kept_attention": False},
    ),
    50: Run(
        shape="100b",
        batch=4,
        what="eight GPUs of 80 GB, their host's RAM and drive",
        tiers={"state": ("gpu", "ram", "nvme"), "gpu": 63 * GIB, "ram": 512 * GIB},
        nvme=440 * GIB,
        model={"saved_share": 0.0, "loss_chunk": 1024},
        train={"activations": "recompute", "kept_attention": False},
    ),
}
"""The rows by number. 9 is the second half of row 8, 11 to 16, 25, 26, 29, 31, 32, 38 and 39 have state on NVMe, 19 to
24 and 40 have long sequences, 24 has activations on NVMe, 27 to 30 and 32 train adapters, and 33 to 38 have what one
GPU of 80 GB does on a host with the RAM of four. 37 and 38 have experts. 41 to 44 are for four GPUs and
45 to 50 for eight, each of which has the row's sequences."""


def config_of(run: Run, deterministic: bool, directory: Path | None, base: Path | None = None) -> RunConfig:
    """Make the run's settings, as `megatier train` would take them.

    Args:
        run: the row.
        deterministic: choose deterministic kernels.
        directory: where block files lie, on the drive to measure.
        base: the folder of the base, if it is read where it lies.
    """
    nvme = (f"{directory}:{run.nvme}",) if run.nvme else ()
    shape = SHAPES[run.shape]
    sizes: dict[str, Any] = {"config": shape.settings(run.sequence)}
    model = sizes if base is None else {"path": str(base), "lora": {"rank": run.rank}}
    return RunConfig(
        model=ModelConfig(**(model | {"loss_chunk": 4096} | dict(run.model))),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=run.sequence),
        tiers=TiersConfig(nvme=nvme, **run.tiers),
        train=TrainConfig(**{"batch": run.batch, "learning_rate": RATE, "clip": 1.0} | dict(run.train)),
        numerics=NumericsConfig(deterministic=deterministic, **run.numerics),
    )


def skeleton(run: Run, attention: str) -> PreTrainedModel:
    """Build the row's model without weights, with its adapters if it has some."""
    model = build_skeleton(model_config(SHAPES[run.shape], run.sequence), attention)
    if run.rank:
        add_adapters(model, LoraConfig(rank=run.rank), "random weights")
    return model


def changed(run: Run, words: list[str]) -> Run:
    """Change the run by settings such as tiers.gpu=80530636800 or model.saved_share=0.5."""
    for word in words:
        name, _, value = word.partition("=")
        section, _, key = name.partition(".")
        number: Any = yaml.safe_load(value)

        # `run.batch=8` changes the row itself.
        if section == "run":
            run = replace(run, **{key: number})
        else:
            changed_section: Any = {section: {**getattr(run, section), key: number}}
            run = replace(run, **changed_section)

    return run


def shared(run: Run, ranks: int) -> Run:
    """Return the row with as many sequences, and groups, for each of several ranks."""
    groups = ranks * run.train.get("groups", 1)
    return changed(replace(run, batch=ranks * run.batch), [f"train.groups={groups}"])
