"""What a run is told: typed, frozen, checked sections; `config.file` reads them.

One dataclass per section, a string under each field with unit and range. Every value is checked once, when the section
is built, so that a `RunConfig` that exists is a valid one. Pure: no torch, nothing allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megatier.config.data_section import DataConfig
from megatier.config.values import ByteCount, MountBudget, parse_mount, read_text
from megatier.config.values import require as _require
from megatier.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained, and how it computes."""

    path: str | None = None
    """Folder with a Hugging Face model, or hub id. Exactly one of path and config is given."""
    config: dict[str, Any] | None = None
    """Hugging Face config to start from scratch: model_type and its keys, such as hidden_size."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: names of parameters or modules, with * and ?; after ! what is trained all the
    same. The last one that names a parameter decides. Such as model.embed_tokens,model.layers.[0-7] or *,!*.q_proj."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the compute copy. Master weights and moments are fp32 either way."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation of transformers."""
    compile: bool | None = None
    """Compile layers and loss with torch.compile. Changes the order of sums. None: yes on a GPU, no on a CPU;
    never in bf16 on a CPU without bf16 instructions."""
    saved_share: float = 0.8
    """Share of a layer's activations that a compiled layer saves, 0 to 1. Its backward computes the rest again,
    cheapest first: at 0.8 products of elements and norms, at 0 all but the inputs. Changes the order of sums."""
    fused_loss: bool = True
    """Head and loss as one chunked node, so that logits never exist whole. Off, with a warning, for a model that does
    more between the two than scale and cap logits once."""
    loss_chunk: int = 1024
    """Tokens per chunk of the fused loss, at least 1."""
    expert_parts: int = 1
    """Units that the experts of a layer are cut into, at least 1, so that slots need not take all of them at once. At 1
    a layer is one unit. Changes the order of sums."""

    def __post_init__(self) -> None:
        """Check each value."""
        if (self.path is None) == (self.config is None):
            raise ConfigError(
                "give exactly one of model.path (to go on with a model) and model.config (to start anew)."
            )
        read_text(self, "model", lists=("frozen",))
        _require(self.config is None or "model_type" in self.config, "model.config", self.config, "with a model_type")
        _require(
            all(name.strip("! ") for name in self.frozen), "model.frozen", list(self.frozen), "without empty names"
        )
        _require(0 <= self.saved_share <= 1, "model.saved_share", self.saved_share, "from 0 to 1")
        _require(self.loss_chunk >= 1, "model.loss_chunk", self.loss_chunk, "at least 1 token")
        _require(self.expert_parts >= 1, "model.expert_parts", self.expert_parts, "at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """Where the state may lie, and how it moves. Made in Python it takes sizes and lists as text too."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model computes; auto: cuda where there is one. On the CPU an arena in RAM stands for GPU memory."""
    gpu: ByteCount | None = None
    """GPU memory for weights, gradients and state, such as 40GiB; activations come on top. None: from the machine."""
    gpu_limit: ByteCount | None = None
    """GPU memory that the whole process may take: tiers.gpu, activations, libraries. None: all there is."""
    ram: ByteCount | None = None
    """RAM budget (pinned where there is a GPU), such as 96GiB. None: from the machine."""
    nvme: tuple[str, ...] = ()
    """Mounts as DIR or DIR:SIZE, such as /mnt/a:500GiB; a list, or comma-separated. Empty: no NVMe tier."""
    state: tuple[str, ...] = ("gpu", "ram", "nvme")
    """Tiers that may hold state, in order of preference, out of gpu, ram, nvme."""
    chunk: ByteCount | None = None
    """State of one update chunk, at 12 bytes an element, at least 24KiB. None: chosen."""
    io_threads: int | None = None
    """Native threads that read NVMe, and as many that write, 1 to 256. None: what `megatier bench` found on these
    mounts, else 4."""
    streamed_share: float = 0.0
    """Share of the parameters at home in RAM whose state passes through the GPU to be updated there, 0 to 1. It takes
    room in tiers.gpu, and relieves the CPU where tiers.state leaves the GPU out. Without clipping and guard, or where
    RAM spills to NVMe, nothing is streamed; the run says how many units are."""
    generations: int = 1
    """Places on NVMe for the state of layers that spill: 1, 2 or 3. A second one lets them be updated in the backward,
    before it is known whether to clip, which also takes a second weight plane in RAM; with output.savepoint_every it
    holds the savepoint instead. A third one gives both. Without clipping and guard it changes nothing."""
    update_threads: int | None = None
    """Native threads that run AdamW on the CPU, 1 to 1024. None: the cores this process may use."""
    direct_io: Literal["auto", "never"] = "auto"
    """auto: O_DIRECT where the file system takes it; or never."""
    checksums: bool = True
    """Verify what is read from NVMe."""
    gpu_direct: bool = False
    """Read weights that lie on NVMe into GPU memory with kvikio, past RAM: by GPUDirect Storage where the machine has
    it. Needs a GPU and the extra gds. Without GPUDirect Storage the way through RAM is as fast, and overlaps better."""

    def __post_init__(self) -> None:
        """Check each value."""
        read_text(self, "tiers", sizes=("gpu", "gpu_limit", "ram", "chunk"), lists=("nvme", "state"))
        for name in ("gpu", "gpu_limit", "ram"):
            num_bytes = getattr(self, name)
            _require(num_bytes is None or num_bytes >= 1, f"tiers.{name}", num_bytes, "at least 1 byte")
        directories = [mount.directory for mount in self.mounts]
        _require(len(set(directories)) == len(directories), "tiers.nvme", list(self.nvme), "without repeats")
        _require(
            0 < len(self.state) == len({*self.state} & {"gpu", "ram", "nvme"}),
            "tiers.state",
            list(self.state),
            "one or more of gpu, ram, nvme, each once",
        )
        _require(self.chunk is None or self.chunk >= 24576, "tiers.chunk", self.chunk, "at least 24KiB")
        io_threads = self.io_threads
        _require(io_threads is None or 1 <= io_threads <= 256, "tiers.io_threads", io_threads, "1 to 256")
        _require(0 <= self.streamed_share <= 1, "tiers.streamed_share", self.streamed_share, "from 0 to 1")
        _require(self.generations in (1, 2, 3), "tiers.generations", self.generations, "1, 2 or 3")
        threads = self.update_threads
        _require(threads is None or 1 <= threads <= 1024, "tiers.update_threads", threads, "1 to 1024")

    @property
    def mounts(self) -> tuple[MountBudget, ...]:
        """The drives of the NVMe tier, in the order given."""
        return tuple(map(parse_mount, self.nvme))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The steps and their optimizer."""

    steps: int = 1000
    """Optimizer steps, at least 1."""
    batch: int = 8
    """Sequences per step, a multiple of groups * slices."""
    groups: int = 1
    """Forward and backward runs over the units per step, at least 1. Changes the order of sums."""
    slices: int = 1
    """Parts of a group that share one binding of the weights, at least 1. Changes the order of sums."""
    activations: Literal["keep", "recompute", "offload"] = "keep"
    """What happens to activations between forward and backward. Never changes a number."""
    kept_layers: int = 0
    """Decoder layers, counted from the last, that keep their activations whatever `activations` says; at least 0."""
    learning_rate: float = 3e-4
    """Peak learning rate, at least 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up, 0 to below steps."""
    min_learning_rate_ratio: float = 0.0
    """Last learning rate as a share of the peak, 0 to 1."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (not of biases and norms), at least 0."""
    beta1: float = 0.9
    """Decay of the first moment, 0 to below 1."""
    beta2: float = 0.999
    """Decay of the second moment, 0 to below 1."""
    eps: float = 1e-8
    """Added to the root of the second moment, above 0."""
    clip: float | None = 1.0
    """Global gradient norm to clip to, above 0. None: off."""
    seed: int = 0
    """Of initial weights and dropout, at least 0."""
    evaluate_every: int = 0
    """Steps between evaluations on the held-out text, at least 0. 0: only at the end."""
    evaluate_batches: int = 16
    """Batches of each evaluation at most, at least 1."""
    stall_timeout: float = 1800.0
    """Seconds, at least 0. When nothing moved on for so long, and for 4 times the longest that it took before, the run
    stops with an error and the state of every queue. 0: never."""

    def __post_init__(self) -> None:
        """Check each value, then those that depend on each other."""
        for name in ("steps", "batch", "groups", "slices", "evaluate_batches"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("warmup_steps", "kept_layers", "seed", "evaluate_every", "learning_rate", "weight_decay"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"train.{name}", value, "at least 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "from 0 to below 1")
        _require(0 <= self.stall_timeout < math.inf, "train.stall_timeout", self.stall_timeout, "at least 0")
        ratio, clip = self.min_learning_rate_ratio, self.clip
        _require(0 <= ratio <= 1, "train.min_learning_rate_ratio", ratio, "from 0 to 1")
        _require(0 < self.eps < math.inf, "train.eps", self.eps, "above 0")
        _require(clip is None or 0 < clip < math.inf, "train.clip", clip, "above 0, or null for no clipping")
        _require(
            self.warmup_steps < self.steps, "train.warmup_steps", self.warmup_steps, f"below train.steps {self.steps}"
        )
        parts = self.groups * self.slices
        _require(self.batch % parts == 0, "train.batch", self.batch, f"a multiple of groups * slices ({parts})")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig:
    """Choices that change bits, and what happens to numbers that are not finite."""

    deterministic: bool = True
    """Only operations that repeat bit by bit in a fresh process."""
    guard: bool = True
    """Look at each step's loss and gradient norm before a weight changes, and leave the step out if one of them is NaN
    or infinite. The gradients of a step wait for that, as for clipping. Off: such a step ends the run; without
    clipping, updates then run inside the backward, and those of the step that ends it in part."""
    max_skips: int = 3
    """Steps in a row that the guard leaves out, at least 0; one more ends the run."""

    def __post_init__(self) -> None:
        """Check each value."""
        _require(self.max_skips >= 0, "numerics.max_skips", self.max_skips, "at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What the run leaves behind."""

    directory: str = "runs/megatier"
    """Run directory: resolved config, metrics.jsonl, export. One run at a time."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the exported weights; fp32 writes the masters."""
    checkpoint_every: int | Literal["auto"] = "auto"
    """Steps between checkpoints, at least 0, and one at the end. auto: by time and by what they cost, 2 % of the run at
    most, and one where the export fails; none where savepoint_every is set, or where the drive has no room for two. 0:
    only when the run is stopped by Ctrl-C or SIGTERM, ended by steps that are not finite, or its export fails."""
    savepoint_every: int = 0
    """Steps between savepoints, at least 0. A savepoint keeps a generation of what spilled in place on NVMe and writes
    only the rest, so it takes less time than a checkpoint; `resume` goes on from it on the same tiers and drives. The
    last one is kept, until a checkpoint is newer. 0: none."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, at least 1: the last ones."""
    trace: bool = False
    """Write a Perfetto-readable trace of transfers, compute and stalls."""
    tensorboard: bool = False
    """Write the figures of each step for TensorBoard as well; needs the extra megatier[tensorboard]."""

    def __post_init__(self) -> None:
        """Check each value."""
        _require(self.directory != "", "output.directory", self.directory, "a path")
        every = self.checkpoint_every
        _require(every == "auto" or every >= 0, "output.checkpoint_every", every, "auto or at least 0")
        _require(self.savepoint_every >= 0, "output.savepoint_every", self.savepoint_every, "at least 0")
        _require(self.keep_checkpoints >= 1, "output.keep_checkpoints", self.keep_checkpoints, "at least 1")

    @property
    def saves_by_time(self) -> bool:
        """Whether the clock says when a checkpoint is written: nobody did, and there are no savepoints."""
        return self.checkpoint_every == "auto" and not self.savepoint_every


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    tiers: TiersConfig = field(default_factory=TiersConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        """Check what spans sections."""
        _require(
            self.model.path is not None or self.data.tokenizer is not None,
            "data.tokenizer",
            None,
            'a tokenizer such as "bytes", because model.config brings none',
        )
        self._check_generations()
        self._check_borders()

    def _check_generations(self) -> None:
        """A savepoint keeps one of several on NVMe, checked by the checksums that it notes."""
        tiers, every = self.tiers, self.output.savepoint_every
        if not every:
            _require(tiers.generations < 3, "tiers.generations", 3, "1 or 2 without output.savepoint_every")
        elif tiers.nvme:
            needs, waits = "with output.savepoint_every", self.train.clip is not None or self.numerics.guard
            _require(tiers.generations > 1, "tiers.generations", 1, f"2 or 3 {needs}: one of them is kept")
            _require(tiers.checksums, "tiers.checksums", False, f"true {needs}")
            _require(waits, "numerics.guard", False, f"true, or train.clip set, {needs}: updates have to wait")

    def _check_borders(self) -> None:
        """What keeps documents apart: masks that some kernels do not take, and that cannot always be cut."""
        is_apart, attention = self.data.is_apart, self.model.attention
        _require(
            not is_apart or attention != "flash_attention_2",
            "model.attention",
            attention,
            "sdpa, eager or flex_attention, because flash_attention_2 does not stop at the borders of documents "
            "(data.cross_documents)",
        )
        _require(
            self.can_slice or self.train.slices == 1,
            "train.slices",
            self.train.slices,
            "1 with flex_attention and documents that are apart (data.cross_documents), whose mask cannot be cut",
        )

    @property
    def has_mask(self) -> bool:
        """Whether attention has a mask of all pairs of tokens, and computes what is masked too."""
        return self.data.is_apart and self.model.attention != "flex_attention"

    @property
    def can_slice(self) -> bool:
        """Whether a group's mask can be cut along the batch."""
        return not self.data.is_apart or self.has_mask


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "tiers": TiersConfig,
    "train": TrainConfig,
    "numerics": NumericsConfig,
    "output": OutputConfig,
}
