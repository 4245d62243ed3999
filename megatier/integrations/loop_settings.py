"""Builds a `RunConfig` from the keyword arguments of `megatier.stream`, or from a `TrainConfig` in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import torch

from megatier.config.file import check_units
from megatier.config.names import suggest_names
from megatier.config.schema import OF_LOOP, ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.config.section import Section
from megatier.config.values import check_setting, number, require
from megatier.errors import ConfigError
from megatier.foreign import printable
from megatier.optimizers import MOMENT_FORMATS, OPTIMIZER_NAMES, OptimizerName, in_words
from megatier.setup.workload import COMPUTE_DTYPES
from megatier.state import Moments
from megatier.tier import Activations, ActivationsName

_SectionT = TypeVar("_SectionT", bound=Section)


class ShortArguments(TypedDict, total=False):
    """The keyword arguments that `megatier.stream` describes."""

    accumulation_steps: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    optimizer: OptimizerName
    momentum: float
    clip: float | None
    compute_dtype: Literal["bf16", "fp32"] | torch.dtype
    moments: Moments
    seed: int
    activations: ActivationsName
    fused_loss: bool
    compile: bool | None
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None
    frozen: str | Sequence[str]
    peft_config: Any
    num_labels: int | None
    expert_parts: int
    tile_tokens: int | None
    products: Literal["bf16", "fp8"]
    products_except: str | Sequence[str]


class Short(NamedTuple):
    """One keyword argument of `megatier.stream`, and the settings that it sets."""

    default: Any
    settings: tuple[str, ...] = ()
    """The settings that it sets, by dotted name. Arguments without one concern the model that is opened."""
    values: tuple[str, ...] = ()
    """The allowed values; empty: no fixed set."""
    least: int | None = None
    """The least whole number allowed; None: it is not a whole number."""


_POLICIES = tuple(policy for policy in Activations if not policy.offloads_input)
"""Activation policies that allow sequences of any length."""
SHORT: Mapping[str, Short] = {
    "accumulation_steps": Short(1, ("train.groups",), least=1),
    "lr": Short(1e-3, ("train.learning_rate",)),
    "betas": Short((0.9, 0.999), ("train.beta1", "train.beta2")),
    "eps": Short(1e-8, ("train.eps",)),
    "weight_decay": Short(1e-2, ("train.weight_decay",)),
    "optimizer": Short("adamw", ("train.optimizer",), OPTIMIZER_NAMES),
    "momentum": Short(0.95, ("train.momentum",)),
    "clip": Short(1.0, ("train.clip",)),
    "compute_dtype": Short("bf16", ("model.compute_dtype",), tuple(COMPUTE_DTYPES)),
    "moments": Short("fp32", ("train.moments",), MOMENT_FORMATS),
    "seed": Short(0, ("train.seed",), least=0),
    "activations": Short("keep", ("train.activations",), _POLICIES),
    "fused_loss": Short(True, ("model.fused_loss",)),
    "compile": Short(None, ("model.compile",)),
    "attention": Short(None, ("model.attention",)),
    "frozen": Short(()),
    "peft_config": Short(None),
    "num_labels": Short(None, least=1),
    "expert_parts": Short(1, ("model.expert_parts",)),
    "tile_tokens": Short(None, ("model.tile_tokens",)),
    "products": Short("bf16", ("numerics.products",), ("bf16", "fp8")),
    "products_except": Short((), ("numerics.products_except",)),
}
"""All of these arguments."""
_CHECKED = ("lr", "betas", "eps", "weight_decay", "momentum", "clip")
"""The arguments that are numbers of the optimizer."""
FOLLOWED_FIELDS = (
    *("groups", "optimizer", "learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum", "moments", "clip"),
    *("seed", "activations", "kept_layers", "kept_attention"),
)
"""Fields of TrainConfig that apply to a user's loop."""
OWN_END = "the loop itself decides when it ends"
OWN_RATE = "put a scheduler of torch over the streamed optimizer"
OWN_TEST = "the loop evaluates by forwards under torch.no_grad"
NOT_OF_LOOPS: Mapping[str, str] = {
    "steps": OWN_END,
    "epochs": OWN_END,
    "batch": "the loop makes its batches; it may also be equal to train.groups",
    "slices": "give smaller batches, and more groups",
    "offload_attention": "how long the loop's sequences are is not known, so no room is set aside for it",
    "schedule": OWN_RATE,
    "warmup_steps": OWN_RATE,
    "warmup_ratio": OWN_RATE,
    "decay_ratio": OWN_RATE,
    "min_learning_rate_ratio": OWN_RATE,
    "evaluate_every": OWN_TEST,
    "evaluate_batches": OWN_TEST,
    "early_stopping_threshold": OWN_END,
    "early_stopping_patience": OWN_END,
    "stall_timeout": "a loop has no watchdog, since it may stop between its steps",
}
"""The other fields, which are refused if they are set, and what to do instead."""
_OTHER_NAMES = {
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "gradient_clipping": "clip",
    "gradient_accumulation_steps": "accumulation_steps",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "dtype": "compute_dtype",
    "torch_dtype": "compute_dtype",
    "attn_implementation": "attention",
    "gradient_checkpointing": 'activations="recompute"',
    "torch_compile": "compile",
    "gpu": 'tiers={"gpu": ...}',
    "ram": 'tiers={"ram": ...}',
    "nvme": 'tiers={"nvme": ...}',
    "device": 'tiers={"device": ...}',
    "deepspeed": "tiers",
    "optim": "optimizer",
}
"""Our arguments, by the names of the same things in other libraries."""


def loop_config(
    given: Mapping[str, Any],
    tiers: TiersConfig | Mapping[str, Any] | None,
    train: TrainConfig | Mapping[str, Any] | None,
    attention: str,
) -> RunConfig:
    """Return the config of a loop.

    Args:
        given: the keyword arguments.
        tiers: as for `megatier.stream`.
        train: settings of the steps; None: the keyword arguments have them.
        attention: the attention implementation, unless an argument names one.

    Raises:
        ConfigError: an argument or field cannot be used. The message names it.
    """
    refuse_unknown_arguments(given)
    settings: dict[str, Any] = {}
    for name, argument in SHORT.items():
        value = _checked(name, given.get(name, argument.default))
        # Betas set two settings, and arguments about the model set none.
        values = value if len(argument.settings) > 1 else (value,)
        settings |= zip(argument.settings, values, strict=False)
    if settings["model.attention"] is None:
        settings["model.attention"] = attention

    if train is not None:
        train = read_section(TrainConfig, train)
        check_train(train, given)
        for field in fields(train):
            settings[f"train.{field.name}"] = getattr(train, field.name)

    # The loop makes its own batches. A config needs at least as many rows as groups.
    settings["train.batch"] = settings["train.groups"]

    # The guard is on by default: updates wait for the norm, because `optimizer.step` comes after the last backward.
    return RunConfig(model=ModelConfig(path=""), data=OF_LOOP, tiers=read_tiers(tiers)).changed(settings)


def check_train(train: TrainConfig, given: Iterable[str]) -> None:
    """Refuse settings that a loop cannot follow, or that are given twice.

    Args:
        train: the settings.
        given: the names of the keyword arguments that are given too.

    Raises:
        ConfigError: there is one. The message says what to do instead.
    """
    for name in given:
        of_train = [setting for setting in SHORT[name].settings if setting.startswith("train.")]
        if of_train:
            raise ConfigError(f"{name} and train are given, and both say {' and '.join(of_train)}. Leave out {name}.")

    # A copy with replaced values has all fields set, so it is not known which of them the user wrote.
    fields_of = TrainConfig.__dataclass_fields__
    written = train.given if len(train.given) < len(fields_of) else frozenset()
    meets = {"batch": train.groups, "schedule": "constant"}
    for name, instead in NOT_OF_LOOPS.items():
        value = getattr(train, name)
        is_given = name in written or value != fields_of[name].default
        # A value that the loop has anyway is accepted.
        is_met = name in meets and value == meets[name]
        if is_given and not is_met:
            raise ConfigError(f"train.{name} is {value!r}, which a loop does not follow: {instead}. Leave it out.")
    # A TrainConfig may name a policy for sequences of one length, which a loop does not guarantee.
    _checked("activations", train.activations, "train.activations")


def _checked(name: str, value: Any, told: str = "") -> Any:  # noqa: ANN401 - of any argument
    """Return the value of an argument as a config takes it.

    Raises:
        ConfigError: the value is not allowed. The message names the argument, or `told`.
    """
    argument = SHORT[name]
    if name in _CHECKED:
        check_setting(name, value)
    elif argument.least is not None and not (value is None and argument.default is None):
        return number(name, value, f"at least {argument.least}", least=argument.least, whole=True)
    elif argument.values:
        # A torch dtype is replaced by its name.
        choice = next((text for text, dtype in COMPUTE_DTYPES.items() if value is dtype), value)
        require(choice in argument.values, told or name, value, in_words(argument.values))
        return choice
    return value


def refuse_unknown_arguments(names: Iterable[str]) -> None:
    """Refuse arguments that `megatier.stream` does not have, and suggest those that are meant.

    Raises:
        ConfigError: there is one. The message names the first.
    """
    known = ["tiers", "train", *SHORT]
    for name in names:
        if name not in known:
            near = suggest_names(name, known, _OTHER_NAMES, cutoff=0.7)
            hint = f"Did you mean {near}?" if near else f"It takes {', '.join(known)}."
            raise ConfigError(f"megatier.stream has no argument {printable(name)}. {hint}")


def read_tiers(given: TiersConfig | Mapping[str, Any] | None) -> TiersConfig:
    """Return the section `tiers`; None: its defaults.

    Raises:
        ConfigError: as `read_section`, or a budget has no unit.
    """
    if isinstance(given, Mapping):
        # A TiersConfig no longer knows how its sizes were written.
        check_units(given)
    return TiersConfig() if given is None else read_section(TiersConfig, given)


def read_section(kind: type[_SectionT], given: _SectionT | Mapping[str, Any]) -> _SectionT:
    """Return a section, given as an object or as a mapping.

    Raises:
        ConfigError: it is of another type, or has a key or value that no such section has.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{kind.NAME} is {printable(repr(given))}; it must be a {kind.__name__} or keys with values, as in a "
            "config."
        )
    return kind(**{str(key): value for key, value in given.items()})
