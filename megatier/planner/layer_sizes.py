"""Counts what a decoder layer computes for each token, in boundary activations: hidden sizes of one token.

`planner.memory` makes bytes of it. The docstring there says what c and f stand for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from megatier.adapters.first_weights import MAGNITUDE
from megatier.adapters.lora import adapter_config
from megatier.compute.adapted_parameter import matrices_in
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit, tiled_names
from megatier.setup.setup import Setup
from megatier.setup.workload import attention_parts, boundary_width

IN_MLP = 6
"""Widest inputs in the backward of a gated MLP: gate, up and their product, and the gradients of the three."""
NORMS = 2
"""Outputs of a layer's norms, which its products take."""
UNCOMPILED = 6
"""Boundary activations that two norms save beside their outputs if they are not compiled: what they have in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The sizes of a layer, or of its experts, for each token, in boundary activations."""

    products: float
    """c: the outputs of its products and of attention."""
    widest: float
    """f: the widest input of a product."""
    taken: float
    """The widest input of a product as it is saved. Experts in FP8 save a token's row once for all that it goes to."""
    others: float
    """Those of c that are not of the products that have f as input or output."""
    in_mlp: float
    """What the backward of its MLP holds. With experts, these are the rows of all tokens for each expert that they go
    to, what the last products give of them, the outputs of the others, and the gradients of all three."""
    dropped: float
    """Inputs that adapters with dropout save."""
    in_fp8: bool = False
    """Whether products are taken in FP8, so that what they take is saved in half as many bytes."""

    @property
    def compiled(self) -> float:
        """All that the layer could save if it is compiled, with its input."""
        taken = self.taken + NORMS
        return self.products + (taken / 2 if self.in_fp8 else taken)

    @property
    def uncompiled(self) -> float:
        """All that the layer saves if it is not compiled and keeps its graph."""
        return self.compiled + self.widest + UNCOMPILED


@dataclass(frozen=True, slots=True)
class _ProductSizes:
    """A product of tokens with a matrix, in elements for each token; all are 0 for a vector."""

    is_of_expert: bool
    input: int
    saved_input: int
    output: float


def is_of_layer(unit: Unit) -> bool:
    """Return whether a unit is a decoder layer, or the experts of one."""
    return unit.is_layer or unit.experts is not None


def layer_sizes(setup: Setup, tiled: frozenset[str]) -> dict[str, LayerSizes]:
    """Return the sizes of all layers, and of experts that are units, by the names of the units.

    Args:
        setup: the run.
        tiled: the parameters of modules in tiles (`in_tiles`).
    """
    # Widths are taken once for all layers, because a model whose text config has none is searched for its layers.
    width = boundary_width(setup.model)
    text = setup.model.config.get_text_config()
    output_bytes, _ = attention_parts(text, setup.tokens, setup.item_bytes)
    attention = output_bytes / (setup.tokens * width * setup.item_bytes)

    # Modules in tiles free their outputs tile by tile, and no token is multiplied with the adapters of a parameter.
    absent = tiled | matrices_in(setup.model)
    return {
        unit.name: _sizes_of(setup, unit, absent, width, attention if unit.is_layer else 0.0)
        for unit in setup.work.units
        if is_of_layer(unit)
    }


def _sizes_of(setup: Setup, unit: Unit, absent: Collection[str], width: int, attention: float) -> LayerSizes:
    """Return the sizes of one unit.

    Args:
        setup: the run.
        unit: a layer, or the experts of one.
        absent: the parameters whose outputs do not count.
        width: elements of a boundary activation.
        attention: what attention gives, in boundary activations.
    """
    text = setup.model.config.get_text_config()

    # A model without experts goes through its one MLP.
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    names = {tensor.name for tensor in unit.layout.tensors}
    in_fp8 = setup.work.products.weights
    products = []
    for tensor in unit.layout.tensors:
        if tensor.name not in absent and not _is_added(tensor.name, names):
            products.append(_product(tensor, chosen, width, in_fp8=tensor.name in in_fp8))

    # A fused matrix of gate and up gives twice as much as the MLP's last product takes.
    widest = max((product.input for product in products), default=0)
    in_or_out = [product for product in products if widest in (product.input, product.output, product.output / 2)]
    of_mlp = sum(product.output for product in in_or_out)
    in_mlp: float = IN_MLP * widest

    # Each expert takes a copy of a token's row. Where experts are narrow, these copies are wider than all inside.
    if chosen > 1 and widest == chosen * width:
        takes_rows = [product for product in products if product.is_of_expert and product.input == widest]
        first = sum(product.output for product in takes_rows)
        in_mlp = 4 * widest + 2 * first

    outputs = sum(product.output for product in products)
    c = outputs / width + attention
    return LayerSizes(
        products=c,
        widest=widest / width,
        taken=max((product.saved_input for product in products), default=0) / width,
        others=c - of_mlp / width,
        in_mlp=in_mlp / width,
        dropped=_dropped_elements(setup, unit) / width,
        in_fp8=not names.isdisjoint(in_fp8),
    )


def _product(tensor: TensorSlice, chosen: int, width: int, *, in_fp8: bool) -> _ProductSizes:
    """Return the product with a parameter, by which each token goes through several experts if it is of experts.

    Args:
        tensor: the parameter.
        chosen: the experts that a token goes to.
        width: elements of a boundary activation.
        in_fp8: whether it is taken in FP8.
    """
    shape = tensor.parameter_shape
    num_elements = shape[-1] if len(shape) > 1 else 0

    # A stack of experts has three dimensions, and every other parameter of a product two.
    is_of_expert = len(shape) == 3
    copies = chosen if is_of_expert else 1

    # The last product of an expert adds up at once what several give, so only the first ones have an output for each.
    output = output_elements(tensor)
    if num_elements == width:
        output *= copies
    saved_copies = 1 if in_fp8 and num_elements == width else copies
    return _ProductSizes(is_of_expert, copies * num_elements, saved_copies * num_elements, output)


def output_elements(tensor: TensorSlice) -> float:
    """Return the elements that a product with a matrix gives for each token; 0 for a vector."""
    if len(tensor.shape) < 2:
        return 0.0

    # Of a parameter that several units share, a unit gives its part.
    rows = tensor.shape[-2]
    return rows * tensor.num_elements / math.prod(tensor.parameter_shape)


def _is_added(name: str, names: Collection[str]) -> bool:
    """Return whether a parameter gives what an adapter adds to an output, without DoRA, so that it is not saved.

    Args:
        name: of the parameter.
        names: of all parameters of its unit.
    """
    module, separator, _ = name.partition(".lora_B.")
    return bool(separator) and not any(other.startswith(f"{module}.{MAGNITUDE}.") for other in names)


def _dropped_elements(setup: Setup, unit: Unit) -> float:
    """Return the elements that adapters with dropout save for each token, each with its byte of the mask."""
    config = adapter_config(setup.model)
    if config is None or not config.lora_dropout:
        return 0.0

    # Each adapter drops other elements, so each saves an input of its own.
    matrices = [tensor for tensor in unit.layout.tensors if ".lora_A." in tensor.name]
    inputs = sum(matrix.parameter_shape[-1] for matrix in matrices)
    return inputs * (1 + 1 / setup.item_bytes)


def in_tiles(setup: Setup) -> frozenset[str]:
    """Return the parameters of all modules of layers that run in tiles of tokens, by their names.

    Nothing is tried here: a run may find that some of the modules have to run whole.
    """
    # A slice that is no longer than a tile is not cut.
    tile_tokens = setup.config.model.tile_tokens
    if tile_tokens is None or setup.tokens <= tile_tokens * setup.config.train.slices:
        return frozenset()

    names = set[str]()
    for unit in setup.work.units:
        for module_name in unit.module_names:
            module = setup.model.get_submodule(module_name)
            # A whole module has no name inside itself, so its dot is taken off and put on again.
            insides = tiled_names(unit, module)
            prefixes = tuple(f"{module_name}.{inside}".rstrip(".") + "." for inside in insides)
            names.update(tensor.name for tensor in unit.layout.tensors if tensor.name.startswith(prefixes))
    return frozenset(names)
