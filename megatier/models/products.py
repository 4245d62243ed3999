"""Decides which linear layers and experts of a model multiply in FP8 (`numerics.products`).

FP8 is used by plain linear layers inside decoder layers whose sizes allow it, by quantised ones whose codes are FP8
with a scale for each row, and by stacks of experts that transformers marks as such. Embeddings, norms, the head and
everything else outside decoder layers compute in bf16. So do routers, adapter matrices, other quantised layers, and
layers with a replaced forward. Other stacks of experts are refused, unless the user excludes them by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn
from transformers import PreTrainedModel

from megatier.compute.fp8 import ALIGNED, Fp8Linear, fits_fp8, set_fp8
from megatier.compute.fp8_stacks import (
    FIRST_MATRICES,
    LAST_MATRIX,
    Fp8Experts,
    fits_fp8_experts,
    set_fp8_experts,
    supports_fp8,
)
from megatier.compute.quantised_linear import CODES, QuantisedLinear
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.models.decoder import Unit
from megatier.models.expert_units import experts_in
from megatier.models.frozen_parameters import is_named

EXCEPT = "numerics.products_except"
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Settings of a text config with the number of experts in a layer."""
ROUTERS = ("gate", "router", "classifier", "wg")
"""Names of linear layers that are routers, if they have an output for each expert."""
_WEIGHT_NAMES = ("weight", CODES)
"""Names of what a linear layer multiplies: its matrix, or the codes of a quantised one."""
STACKS = (*FIRST_MATRICES, LAST_MATRIX)
"""Names of the matrices of a stack of experts."""
ODD = f"whose sizes are no multiples of {ALIGNED}"
CODED = "whose codes are no FP8 with a scale for each row"
LEFT_OUT = f"named in {EXCEPT}"


@dataclass(frozen=True, slots=True)
class Products:
    """The linear layers and stacks of experts that multiply in FP8, and those that stay in bf16."""

    fp8: tuple[str, ...] = ()
    """The names of those in FP8, in module order, with stacks last."""
    bf16: tuple[tuple[str, str], ...] = ()
    """The names of those in bf16 inside decoder layers, each with the reason."""

    @property
    def weights(self) -> frozenset[str]:
        """The names of the weights (or codes) of those in FP8."""
        # A module only has some of these leaves. Names of others match nothing.
        return frozenset(f"{name}.{leaf}" for name in self.fp8 for leaf in (*_WEIGHT_NAMES, *STACKS))

    def described(self) -> Iterator[str]:
        """Describe both in sentences, by the last part of the names."""
        if not self.fp8:
            return
        yield f"products of {_counted(self.fp8)} in fp8, all others in bf16"
        for reason in dict.fromkeys(reason for _, reason in self.bf16):
            yield f"in bf16 stay {_counted([name for name, why in self.bf16 if why == reason])}, {reason}"


def products_of(model: PreTrainedModel, units: Sequence[Unit], excepted: Sequence[str]) -> Products:
    """Return which linear layers and stacks of experts of a model multiply in FP8.

    Args:
        model: the skeleton.
        units: all of its units, with their schemas.
        excepted: patterns of modules to exclude, as described in `models.frozen_parameters`.

    Raises:
        ConfigError: a pattern matches no such module, or no module is left.
        UnsupportedModelError: a layer has an unknown stack of experts, and no pattern excludes it.
    """
    linears = [(name, layer) for unit in units if unit.is_layer for name, layer in _linears(model, unit)]

    # Several units may hold ranges of one stack, which counts once.
    stacks = dict(item for unit in units if unit.is_layer or unit.experts for item in _stacks(model, unit))

    # A pattern for something that stays in bf16 anyway is fine, but one that matches nothing is a mistake.
    _check_patterns(excepted, [*(name for name, _ in linears), *stacks])

    fp8, bf16 = [], []
    for name, layer in [*linears, *stacks.items()]:
        is_left_out = any(is_named(name, pattern) for pattern in excepted)
        reason = LEFT_OUT if is_left_out else _why_not(name, layer)
        if reason:
            bf16.append((name, reason))
        else:
            fp8.append(name)
    # Silently training everything in bf16 would not be what was asked for.
    if not fp8:
        why = f" ({' and '.join(dict.fromkeys(reason for _, reason in bf16))})" if bf16 else ""
        raise ConfigError(
            f"numerics.products is fp8, and no linear layer of {type(model).__name__} is left for it{why}. Set it to "
            "bf16."
        )
    return Products(tuple(fp8), tuple(bf16))


def _why_not(name: str, layer: nn.Module) -> str:
    """Return why a linear layer or a stack of experts cannot multiply in FP8; empty: it can.

    Raises:
        UnsupportedModelError: it is not known how the stack computes.
    """
    if isinstance(layer, QuantisedLinear) and not layer.has_rows_in_fp8:
        return CODED
    if isinstance(layer, nn.Linear):
        return "" if fits_fp8(layer) else ODD
    if not supports_fp8(layer):
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) holds experts in stacks of matrices, and computes with them in a way of "
            f"its own, which numerics.products fp8 does not know. Name them in {EXCEPT}, as {_pattern(name)!r}, to "
            "leave them in bf16."
        )
    return "" if fits_fp8_experts(layer) else ODD


def set_products(model: PreTrainedModel, fp8: Sequence[str]) -> None:
    """Make exactly these linear layers and stacks of a skeleton multiply in FP8."""
    for layer in model.modules():
        # Earlier settings are undone first, since no other layers may be in FP8.
        if isinstance(layer, Fp8Linear):
            set_fp8(layer, is_fp8=False)
        elif isinstance(layer, QuantisedLinear):
            layer.multiplies_codes = False
        elif isinstance(layer, Fp8Experts):
            set_fp8_experts(layer, is_fp8=False)
    for name in fp8:
        layer = model.get_submodule(name)
        if isinstance(layer, QuantisedLinear):
            layer.multiplies_codes = True
        elif isinstance(layer, nn.Linear):
            set_fp8(layer)
        else:
            set_fp8_experts(layer)


def _linears(model: PreTrainedModel, unit: Unit) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain linear layers of a decoder layer's unit, with their names in the model."""
    # Parameters that stay in fp32 inside the layer belong to another unit.
    unit_names = {tensor.name for tensor in unit.layout.tensors}
    text = model.config.get_text_config()
    experts = {count for name in EXPERT_COUNTS if (count := getattr(text, name, None))}
    for module_name in unit.module_names:
        for inside, layer in model.get_submodule(module_name).named_modules():
            name = f"{module_name}.{inside}".rstrip(".")

            # A subclass or a replaced forward may compute anything.
            is_linear = type(layer) in (nn.Linear, Fp8Linear, QuantisedLinear) and "forward" not in vars(layer)
            is_own = any(f"{name}.{leaf}" in unit_names for leaf in _WEIGHT_NAMES)
            if not (is_linear and is_own) or ".lora_" in name:
                continue
            assert isinstance(layer, nn.Linear)

            # A router stays in bf16, since rounding its outputs would send tokens to other experts.
            is_router = name.rpartition(".")[2] in ROUTERS and layer.out_features in experts
            if not is_router:
                yield name, layer


def _stacks(model: PreTrainedModel, unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a unit that hold all experts in stacks of matrices, with their names in the model."""
    for module_name in unit.module_names:
        for inside, module in experts_in(model.get_submodule(module_name)):
            yield f"{module_name}.{inside}".rstrip("."), module


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the modules."""
    for pattern in patterns:
        if any(is_named(name, pattern) for name in names):
            continue

        of_all_layers = dict.fromkeys(map(_pattern, names))
        near = get_close_matches(pattern, [*names, *of_all_layers], n=3, cutoff=0.5)
        hint = f"They have names such as {', '.join(names[:1])}."
        if near:
            hint = f"Near it are {', '.join(near)}."
        raise ConfigError(f"{EXCEPT}: {pattern!r} names no linear layer of this model's decoder layers. {hint}")


def _pattern(name: str) -> str:
    """Return a pattern for the modules of all layers with the last part of a name."""
    return f"*.{_plain(name).rpartition('.')[2]}"


def _counted(names: Sequence[str]) -> str:
    """Return the number of modules, and the last parts of their names."""
    counts = Counter(_plain(name).rpartition(".")[2] for name in names)
    return f"{len(names)} modules ({', '.join(counts)})"


def _plain(name: str) -> str:
    """Return a module's name without PEFT's wrappers, which patterns use too."""
    return name.replace(".base_layer", "")
