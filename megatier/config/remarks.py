"""Tells about settings that are allowed and do not do what they seem to. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatier.config.schema import RunConfig

RATE_MAX = 1.0
"""Learning rate from which on it is remarked on. Weights of models are far below 1."""


def list_remarks(config: RunConfig, rate: str = "train.learning_rate") -> Iterator[str]:
    """Yield a sentence for each such setting.

    Args:
        config: the run, with what the planner chose.
        rate: how the learning rate was given.
    """
    if (peak := config.train.learning_rate) >= RATE_MAX:
        yield (
            f"{rate} is {peak:g}. A step moves each weight by about that much, which is more than the weights "
            "themselves, so the model will learn nothing, though its loss may stay finite. Usual rates are 1e-6 to "
            "1e-2."
        )

    for name, (is_idle, why) in _idle(config).items():
        section_name, _, key = name.partition(".")
        section = getattr(config, section_name)
        value = getattr(section, key)

        # At its default nobody expects an effect of it.
        default = type(section).__dataclass_fields__[key].default
        if is_idle and value != default:
            yield f"{name} is {value} and has no effect, because {why}."


def _idle(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """Return for settings that depend on others whether they have no effect, and why they have none then."""
    train = config.train
    keeps = train.activations == "keep"

    # Updates wait for nothing but the norm of all gradients, and the guard's word that they are finite.
    at_once = train.clip is None and not config.numerics.guard
    return {
        "train.kept_layers": (keeps, "under train.activations keep all layers keep theirs"),
        "train.kept_attention": (
            keeps and config.model.saved_share > 0,
            "train.activations keep keeps it anyway",
        ),
        "train.offload_attention": (train.activations != "offload", f"train.activations is {train.activations}"),
        "train.momentum": (train.optimizer != "muon", f"train.optimizer {train.optimizer} does not read it"),
        "train.eps": (train.optimizer == "lion", "train.optimizer lion does not read it"),
        "train.min_learning_rate_ratio": (train.schedule == "constant", "train.schedule is constant"),
        "train.decay_ratio": (train.schedule != "wsd", f"train.schedule is {train.schedule}"),
        "tiers.generations": (at_once, "no update waits: train.clip is null and numerics.guard false"),
        "numerics.max_skips": (not config.numerics.guard, "numerics.guard is false"),
    }
