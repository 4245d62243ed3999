"""Defines the configuration of a run, as typed, frozen, checked sections. `config.file` reads them.

Each section is a dataclass with a string under each field, which names unit and range and is what the help shows. Every
value is checked once, when the section is built, so a `RunConfig` that exists is a valid one. Pure: no torch, and
nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatier.config.data_section import BYTE_TOKENIZER, DataConfig
from megatier.config.lora import LoraConfig, read_lora
from megatier.config.output_section import OutputConfig
from megatier.config.section import Section, explained
from megatier.config.values import ByteCount, MountBudget, check_setting, parse_mount
from megatier.errors import ConfigError
from megatier.optimizers import OPTIMIZERS, OptimizerName
from megatier.state import Moments
from megatier.tier import ActivationsName

KEPT_FROM = 4_096
"""Tokens of a sequence from which on attention is not computed twice, if nobody says otherwise. Of a step of 8B, the
repeated forward of attention takes 2 % at 4,096 tokens, 4 % at 8,192 and a sixth at 131,072."""


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Section):
    """The model that is trained, and how it computes."""

    NAME = "model"

    path: str | None = None
    """Folder of a Hugging Face model, or its id on the hub. Give either this or model.config."""
    config: dict[str, Any] | None = None
    """Hugging Face config of a model to train from scratch: model_type and its keys, such as hidden_size."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: patterns for names of parameters or modules, with the wildcards *, ? and [0-7].
    A pattern after ! names what is trained all the same; the last pattern that fits a parameter decides. Examples:
    model.embed_tokens,model.layers.[0-7] and *,!*.q_proj."""
    lora: dict[str, Any] | None = None
    """LoRA adapters to train over the frozen model at model.path. docs/adapters.md describes the keys, such as rank; {}
    takes their defaults. This needs the extra megatier[lora]. None: the model itself is trained."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the weights in forward and backward. Master weights are fp32 either way."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel, by its name in transformers. It changes the order of sums. auto: the fastest deterministic one,
    which is flex_attention on an H100 or H200 for sequences of 1,024 tokens and more, if the model can take it, and
    otherwise sdpa. The run records its choice."""
    compile: bool | None = None
    """Compile layers and loss with torch.compile. It changes the order of sums. None: yes on a GPU, no on a CPU. A CPU
    without bf16 instructions never compiles in bf16."""
    saved_share: float = 0.8
    """Share of a layer's activations that a compiled layer saves for the backward, 0 to 1. The backward recomputes the
    rest, cheapest first: at 0.8 elementwise products and norms, at 0 everything but the layer's inputs. Lower it to
    save GPU memory. It changes the order of sums."""
    fused_loss: bool = True
    """Compute head and loss together in chunks of tokens, so that the logits never exist whole. A model that does more
    between the two than scale and cap the logits once turns this off, with a warning."""
    loss_chunk: int = 1024
    """Tokens in one chunk of the fused loss, at least 1."""
    tile_tokens: int | None = None
    """Tokens on which a layer's norms, MLP and experts work at once, at least 1. Set it for long sequences: then only
    attention needs more GPU memory for them. The backward runs each tile again. Modules whose tokens depend on one
    another run whole, with a warning. It changes the order of sums. None: all at once, unless the search sets it."""
    expert_parts: int = 1
    """Units into which the experts of a layer are cut, at least 1, so that fewer of them must fit on the GPU at once.
    It changes the order of sums."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()
        if (self.path is None) == (self.config is None):
            raise ConfigError(
                "a run needs a model: give exactly one of model.path (a folder or id) and model.config (from scratch)."
            )

        has_type = self.config is None or "model_type" in self.config
        self.need("config", has_type, "with a model_type")
        has_names = all(name.strip("! ") for name in self.frozen)
        self.need("frozen", has_names, "without empty names")

        # Before other settings are looked at, so that a stored config has all settings of the adapters.
        read_lora(self)
        self.need("saved_share", 0 <= self.saved_share <= 1, "from 0 to 1")

        # Only a lower bound: a chunk of more tokens than there are is one chunk.
        self.need("loss_chunk", self.loss_chunk >= 1, "at least 1 token")
        is_some = self.tile_tokens is None or self.tile_tokens >= 1
        self.need("tile_tokens", is_some, "at least 1 token, or null for all at once")
        self.need_least(expert_parts=1)

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters of the run; None: the model itself is trained."""
        return None if self.lora is None else LoraConfig.of(self.lora)


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig(Section):
    """Where the state may lie, and how it moves. In Python, sizes and lists may be given as text too."""

    NAME = "tiers"

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device that computes. auto: cuda if there is a GPU, otherwise cpu, where a part of RAM stands for GPU memory."""
    gpu: ByteCount | None = None
    """GPU memory for weights, gradients and state, such as 40GiB. Activations come on top. None: chosen by the plan on
    a measured machine, otherwise half of what is free (40 % of the available RAM without a GPU)."""
    gpu_limit: ByteCount | None = None
    """GPU memory that the whole process may take, with activations and libraries. None: all there is."""
    ram: ByteCount | None = None
    """RAM budget, such as 96GiB. With a GPU it is pinned. None: 80 % of the available RAM; without a GPU, 40 %."""
    locked: ByteCount | None = None
    """RAM that may be pinned, such as 512MiB. The rest is copied through pinned rings of up to 192MiB besides
    tiers.ram, which is slower. The results stay the same. None: as much as CUDA takes."""
    nvme: tuple[str, ...] = ()
    """Directories on drives that state may spill to, each as DIR or DIR:SIZE, such as /mnt/a:500GiB. Empty: nothing
    spills."""
    state: tuple[str, ...] = ("gpu", "ram", "nvme")
    """Tiers that may hold state, in order of preference, out of gpu, ram and nvme."""
    chunk: ByteCount | None = None
    """Bytes of state that an update works on at once, at least 24KiB, at 12 bytes a parameter (8 with train.moments
    bf16, 6 with fp8). None: chosen from the RAM budget."""
    io_threads: int | None = None
    """Threads that read NVMe, and as many that write, 1 to 256. None: as many as `megatier bench` found best for these
    drives, or 4 if they were not measured."""
    streamed_share: float = 0.0
    """Share of the parameters in RAM whose state passes through the GPU to be updated there, 0 to 1. It takes room in
    tiers.gpu, and relieves a slow CPU if tiers.state leaves out the GPU. No unit is streamed if state spills to NVMe,
    or if clipping and the guard are both off."""
    generations: int = 1
    """Places for the state of a layer: 1, 2 or 3. With 2 a layer is updated during the backward, before it is known
    whether the step is clipped; or, with output.savepoint_every, the second place on NVMe holds the savepoint. 3 gives
    both. In RAM there are 2 at most, for layers that fit twice. If clipping and the guard are both off, this has no
    effect. It has nothing to do with generating text."""
    update_threads: int | None = None
    """Threads that run AdamW on the CPU, 1 to 1024. None: one for each core that this process may use."""
    direct_io: Literal["auto", "never"] = "auto"
    """I/O on NVMe. auto: with O_DIRECT if the file system takes it. never: through the page cache."""
    checksums: bool = True
    """Verify checksums of everything that is read from NVMe."""
    gpu_direct: bool = False
    """Read weights from NVMe straight into GPU memory with kvikio, past RAM. This needs a GPU and the extra
    megatier[gds]. It pays only on machines with GPUDirect Storage."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()

        for name in ("gpu", "gpu_limit", "ram", "locked"):
            num_bytes = getattr(self, name)
            self.need(name, num_bytes is None or num_bytes >= 1, "at least 1 byte")

        # `mounts` parses each one, so a wrong size is refused here.
        directories = [mount.directory for mount in self.mounts]
        self.need("nvme", len(set(directories)) == len(directories), "without repeats")

        # Else the text was parted within a name, and the rest of it is a folder where the process runs.
        kinds = {directory.expanduser().is_absolute() for directory in directories}
        bound = "all absolute or all relative; a directory with a comma goes into a list, such as '[\"/mnt/a,b:5GiB\"]'"
        self.need("nvme", len(kinds) < 2, bound)

        # A name that is given twice makes the list longer than the set.
        known = {*self.state} & {"gpu", "ram", "nvme"}
        is_known_once = 0 < len(self.state) == len(known)
        self.need("state", is_known_once, "one or more of gpu, ram, nvme, each once")

        # 12 bytes of state for each of 2,048 elements, a page of bf16, to whose multiples units are padded.
        self.need("chunk", self.chunk is None or self.chunk >= 24576, "at least 24KiB")
        self.need("streamed_share", 0 <= self.streamed_share <= 1, "from 0 to 1")
        self.need("generations", self.generations in (1, 2, 3), "1, 2 or 3")

        for name, most in (("io_threads", 256), ("update_threads", 1024)):
            count = getattr(self, name)
            self.need(name, count is None or 1 <= count <= most, f"1 to {most}")

    @property
    def mounts(self) -> tuple[MountBudget, ...]:
        """The mounts of the NVMe tier, in the order given."""
        return tuple(map(parse_mount, self.nvme))


STEPS_UNBOUND = (1 << 63) - 1
"""The `train.steps` of a run in epochs whose steps are neither given nor counted yet."""


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Section):
    """The steps and their optimizer."""

    NAME = "train"

    steps: int = 1000
    """Optimizer steps, at least 1."""
    epochs: float | None = None
    """Passes over the text, above 0; the run counts the steps when it knows the text. If train.steps is given too, the
    smaller one ends the run. None: train.steps decides."""
    batch: int = 8
    """Sequences in a step, over all ranks. It must be a multiple of groups * slices."""
    groups: int = 1
    """Micro-batches in a step, over all ranks, at least 1 (gradient accumulation). All weights move again for each one.
    It changes the order of sums."""
    slices: int = 1
    """Parts into which each micro-batch is cut, at least 1. A layer runs them one after the other while its weights are
    on the GPU, so they save activation memory and move nothing again. It changes the order of sums."""
    activations: ActivationsName = "keep"
    """What happens to activations until the backward. keep: they stay on the GPU. recompute: the GPU keeps each layer's
    input, and the backward runs the layer again. offload: the same, with these inputs in RAM. The results stay the
    same."""
    kept_layers: int = 0
    """Number of decoder layers, from the last, that keep their activations whatever train.activations says; at least
    0."""
    kept_attention: bool | None = None
    """Keep attention's output on the GPU, so that it is not computed twice where the rest of a layer is: under
    recompute, offload, or a model.saved_share of 0 (in compiled layers only the last). It takes about one hidden size a
    token and layer. The results stay the same. None: from sequences of 4,096 tokens on."""
    offload_attention: bool = False
    """Under offload, move attention's output to RAM too, instead of keeping it on the GPU. The results stay the
    same."""
    optimizer: OptimizerName = "adamw"
    """Optimizer. adamw: 12 bytes of state a parameter. muon: 8 bytes in matrices of decoder layers; all others stay
    with AdamW. lion: 8 bytes; it wants a smaller learning rate, and train.beta2 0.99."""
    learning_rate: float = 3e-4
    """Peak learning rate, at least 0."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then linear to its end (train.decay_ratio)."""
    warmup_steps: int = 0
    """Steps of linear warm-up, from 0 to below train.steps."""
    warmup_ratio: float = 0.0
    """Share of all steps that is linear warm-up, 0 to below 1. Give it instead of train.warmup_steps."""
    decay_ratio: float = 0.1
    """Share of all steps, at the end, in which wsd falls, above 0 to 1."""
    min_learning_rate_ratio: float = 0.0
    """Last learning rate as a share of the peak, 0 to 1."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (not of biases and norms), at least 0."""
    beta1: float = 0.9
    """Decay of the first moment, 0 to below 1."""
    beta2: float = 0.999
    """Decay of the second moment, 0 to below 1."""
    momentum: float = 0.95
    """Decay of Muon's momentum, 0 to below 1."""
    moments: Moments = "fp32"
    """Type in which AdamW's two moments are stored. With bf16 the state takes 8 bytes a parameter instead of 12, with
    fp8 it takes 6. Moments are then rounded stochastically, by random numbers that depend on train.seed."""
    eps: float = 1e-8
    """Number that is added to the root of the second moment, above 0."""
    clip: float | None = 1.0
    """Global gradient norm to clip to, above 0. None: no clipping."""
    seed: int = 0
    """Seed of initial weights, dropout, and the rounding of moments, at least 0."""
    evaluate_every: int = 0
    """Steps between evaluations on the held-out text, at least 0. 0: evaluate only at the end."""
    evaluate_batches: int = 16
    """Most batches of each evaluation, at least 1."""
    early_stopping_patience: int | None = None
    """End the run after this many evaluations in a row without a better held-out loss, at least 1. None: never."""
    early_stopping_threshold: float = 0.0
    """How much lower than the lowest so far a held-out loss must be to count as better, at least 0."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which the run stops with an error that shows the state of every queue, at least 0.
    The wait must also be 4 times as long as the longest before it. 0: never stop."""

    def __post_init__(self) -> None:
        """Check each value, then those that depend on each other."""
        self.read()
        self.need_least(steps=1, batch=1, groups=1, slices=1, evaluate_batches=1)
        self.need_least(warmup_steps=0, kept_layers=0, seed=0, evaluate_every=0)
        for name in ("learning_rate", "weight_decay", "beta1", "beta2", "momentum", "eps", "clip"):
            check_setting(name, getattr(self, name), f"train.{name}")

        takes_moments = OPTIMIZERS[self.optimizer].narrows or self.moments == "fp32"
        bound = f"fp32 with train.optimizer {self.optimizer}, whose state is always fp32"
        self.need("moments", takes_moments, bound)

        self.need_least(stall_timeout=0, early_stopping_threshold=0)
        patience = self.early_stopping_patience
        self.need("early_stopping_patience", patience is None or patience >= 1, "at least 1, or null")
        is_used = patience is not None or not self.early_stopping_threshold
        self.need("early_stopping_threshold", is_used, "0 without train.early_stopping_patience")
        self.need("min_learning_rate_ratio", 0 <= self.min_learning_rate_ratio <= 1, "from 0 to 1")
        self.need("warmup_ratio", 0 <= self.warmup_ratio < 1, "from 0 to below 1")
        self.need("warmup_ratio", not (self.warmup_steps and self.warmup_ratio), "0 beside train.warmup_steps")
        self.need("decay_ratio", 0 < self.decay_ratio <= 1, "above 0, and at most 1")
        is_some = self.epochs is None or self.epochs > 0
        self.need("epochs", is_some, "above 0, or null for steps")

        # How many steps epochs take is not known yet, and is checked when it is. Steps that are given bound them.
        default_steps = type(self).__dataclass_fields__["steps"].default
        is_counted_later = self.epochs is not None and self.steps == default_steps
        is_short = is_counted_later or self.warmup_steps < self.steps
        self.need("warmup_steps", is_short, f"below train.steps {self.steps}")

        # Every group and every slice has as many rows as the others.
        num_slices = self.groups * self.slices
        is_even = self.batch % num_slices == 0
        self.need("batch", is_even, f"a multiple of groups * slices ({num_slices})")

    def bounded(self, *, steps_given: bool) -> TrainConfig:
        """Return these settings with steps that bound the epochs only if they were given, or are not the default."""
        # The default of the steps must not end a run that was asked for by its epochs.
        is_free = self.epochs is not None and not steps_given and self.steps == type(self)().steps
        return replace(self, steps=STEPS_UNBOUND) if is_free else self

    def keeps_attention(self, tokens: int) -> bool:
        """Return whether the output of attention is kept for the backward, for sequences of so many tokens."""
        return tokens >= KEPT_FROM if self.kept_attention is None else self.kept_attention


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig(Section):
    """Determinism, FP8 products, and what happens to numbers that are not finite."""

    NAME = "numerics"

    deterministic: bool = True
    """Use only operations that repeat bit for bit in a new process."""
    products: Literal["bf16", "fp8"] = "bf16"
    """Type of the numbers that linear layers and experts in decoder layers multiply. fp8: weights, inputs and gradients
    are rounded to FP8 for these products only, with scales taken from them; everything else stays bf16, and masters
    fp32."""
    products_except: tuple[str, ...] = ()
    """Modules that stay in bf16 under fp8, as patterns such as model.layers.0 and *.down_proj."""
    guard: bool = True
    """Check loss and gradient norm of each step, and skip a step in which one is NaN or infinite: no weight
    changes. Gradients wait for this check, as they do for clipping. False: such a step ends the run. If clipping is off
    too, layers are updated inside the backward, so that step is applied in part."""
    max_skips: int = 3
    """Steps in a row that the guard may skip, at least 0. One more ends the run."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()
        self.need_least(max_skips=0)
        self.need("products_except", all(name.strip() for name in self.products_except), "without empty names")


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    tiers: TiersConfig = field(default_factory=TiersConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        """Check the settings that depend on those of another section."""
        has_tokenizer = self.model.path is not None or self.data.tokenizer is not None
        self.data.need("tokenizer", has_tokenizer, 'a tokenizer such as "bytes", because model.config brings none')

        has_end = not (self.train.epochs and self.data.streaming)
        self.train.need("epochs", has_end, "null with data.streaming, whose end is not known: set train.steps")
        is_bf16 = self.numerics.products == "bf16" or self.model.compute_dtype == "bf16"
        self.numerics.need("products", is_bf16, "bf16 with model.compute_dtype fp32, whose products are fp32")
        asked = self.by_evaluations
        is_evaluated = asked is None or self.train.evaluate_every >= 1
        self.train.need("evaluate_every", is_evaluated, f"at least 1 with {asked}")
        self._check_generations()
        self._check_borders()
        waits = self.train.clip is not None or self.numerics.guard or not self.data.images
        self.numerics.need("guard", waits, "true, or train.clip set, with data.images: updates have to wait")

    @property
    def by_evaluations(self) -> str | None:
        """The setting by which evaluations decide what becomes of the run; None: they decide nothing."""
        if self.train.early_stopping_patience is not None:
            return "train.early_stopping_patience"
        return "output.load_best_model_at_end" if self.output.load_best_model_at_end else None

    def _check_generations(self) -> None:
        """Refuse generations that nothing uses, and a savepoint that could not be kept or checked.

        A savepoint keeps one of several generations on NVMe, and notes the checksums by which it is checked later.
        """
        tiers = self.tiers
        count = tiers.generations
        if not self.output.savepoint_every:
            tiers.need("generations", count < 3, "1 or 2 without output.savepoint_every")
            return

        # Without NVMe nothing spills, and a savepoint writes all of the state.
        if not tiers.nvme:
            return
        needs = "with output.savepoint_every"
        tiers.need("generations", count > 1, f"2 or 3 {needs}: one of them is kept")
        tiers.need("checksums", tiers.checksums, f"true {needs}")
        waits = self.train.clip is not None or self.numerics.guard
        self.numerics.need("guard", waits, f"true, or train.clip set, {needs}: updates have to wait")

    def _check_borders(self) -> None:
        """Refuse masks that keep documents apart if the kernels do not take them, or if they cannot be cut."""
        stops = not self.data.is_apart or self.model.attention != "flash_attention_2"
        self.model.need(
            "attention",
            stops,
            "sdpa, eager or flex_attention, because flash_attention_2 does not stop at the borders of documents "
            "(data.cross_documents)",
        )
        self.train.need(
            "slices",
            self.can_slice or self.train.slices == 1,
            "1 with flex_attention and documents apart (data.cross_documents), whose mask is not cut, or data.images",
        )

    def changed(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return the run with other settings, each under its dotted name, such as train.groups."""
        by_section: dict[str, dict[str, Any]] = {}
        for dotted, value in settings.items():
            name, _, key = dotted.partition(".")
            by_section.setdefault(name, {})[key] = value

        # All settings of a section at once: one by one, some would be refused beside the old value of another.
        sections: dict[str, Any] = {}
        for name, keys in by_section.items():
            sections[name] = replace(getattr(self, name), **keys)
        return replace(self, **sections)

    @property
    def has_mask(self) -> bool:
        """Whether attention has a mask of all pairs of tokens, and computes what is masked too."""
        return (self.data.is_apart or self.data.images) and self.model.attention != "flex_attention"

    @property
    def can_slice(self) -> bool:
        """Whether a group and its mask can be cut along the batch."""
        return not self.data.images and (not self.data.is_apart or self.has_mask)


OF_LOOP = DataConfig(files=("batches of the loop",), tokenizer=BYTE_TOKENIZER)
"""The section `data` of a loop that brings its own batches. Nothing of it is read but the length of a sequence."""

CONFIG_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "tiers": TiersConfig,
    "train": TrainConfig,
    "numerics": NumericsConfig,
    "output": OutputConfig,
}
