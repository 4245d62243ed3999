"""Decodes quantised matrices where a product needs them, from codes and scales as stored in checkpoints.

A code is a byte or half a byte. The parameters of a `QuantisedLinear` are the bytes of its codes and scales, in the
dtype that its unit computes in: a bf16 element carries two of these bytes, an fp32 element four. So codes lie in a
plane of weights, and move and are bound like any frozen parameter. Only `decode` interprets them.

Decoding is an elementwise formula: a product in fp32, rounded once to the compute dtype.

Source: `dequantize` of compressed-tensors and of transformers' fine-grained FP8, `dequantize_4bit` of bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from megatier.compute.fp8 import linear_of_codes

CODES = "codes"
"""The part of a quantised matrix that holds its numbers. The other parts are scales and tables."""
STANDS_FOR = "stands_for"
"""The attribute of a parameter with the number of model parameters that each of its elements carries."""
DECODED_ELEMENTS = 4 << 20
"""About how many numbers are decoded at once, so that little of a matrix exists in fp32."""
NF4_BITS = 4
"""The bits of an NF4 code. FP8 codes have twice as many."""
SCHEMES: dict[str, Scheme] = {}
"""The schemes of the layers in this process, by their repr, since operators take text but no objects."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored tensor of a quantised matrix."""

    dtype: torch.dtype
    """The dtype in which it is stored."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def seen_in(self, carrier: Tensor) -> Tensor:
        """View the bytes of a carrier tensor as this part."""
        raw = carrier.detach().reshape(-1).view(torch.uint8)
        return raw[: self.num_bytes].view(self.dtype).view(self.shape)


class Scheme(Protocol):
    """How a matrix is quantised."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        """The stored parts, `codes` first."""

    @property
    def step(self) -> int:
        """Decoding may begin at multiples of this many numbers."""

    def values(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Return numbers [start, stop) of the matrix, row by row: flat, fp32. `start` is a multiple of the step."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 codes, each times the scale of its block: of a block of rows and columns, a row, or the whole matrix."""

    shape: tuple[int, int]
    """Rows and columns of the matrix."""
    scale: StoredPart
    """The scales: one for each block, in any shape."""
    block: tuple[int, int]
    """Rows and columns that share a scale; those at the edges may be smaller."""

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        """The codes and the scales."""
        return {CODES: StoredPart(torch.float8_e4m3fn, self.shape), "scale": self.scale}

    @property
    def step(self) -> int:
        """One row of blocks, or one row if there is only one row of blocks."""
        num_rows, num_columns = self.shape
        rows, _ = self.block
        return num_columns * rows if rows < num_rows else num_columns

    def values(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Return numbers [start, stop), row by row: flat, fp32."""
        num_rows, num_columns = self.shape
        rows, columns = self.block
        first = start // num_columns
        last = stop // num_columns

        # Blocks at the edges may be smaller, but count as whole ones. Only the scales of the needed rows are expanded.
        down = -(-num_rows // rows)
        across = -(-num_columns // columns)
        scales = parts["scale"].view(down, across).float()
        scale = scales[first // rows : -(-last // rows)]
        scale = _repeated(scale, 0, rows, last - first)
        scale = _repeated(scale, 1, columns, num_columns)

        codes = parts[CODES].view(num_rows, num_columns)[first:last]
        # In fp32, so that a number is rounded once, when it is converted to the compute dtype.
        values: Tensor = codes.float() * scale
        return values.flatten()


@dataclass(frozen=True, slots=True)
class Nf4:
    """4-bit codes, each the index of a number in a table, times the largest magnitude of its block.

    The magnitudes may be quantised themselves: bytes that are indices into a second table, times the scale of a block
    of them, plus an offset. All numbers are parts, so layers of one shape have the same scheme, and are compiled once.
    """

    shape: tuple[int, int]
    """Rows and columns of the matrix."""
    block: int
    """The number of consecutive numbers that share a magnitude."""
    nested_block: int | None = None
    """The number of magnitudes that share a scale; None: they are stored in fp32."""

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        """The codes, the magnitudes and the tables."""
        numbers = math.prod(self.shape)
        blocks = -(-numbers // self.block)
        is_nested = self.nested_block is not None
        parts = {
            CODES: StoredPart(torch.uint8, (-(-numbers // 2),)),
            "absmax": StoredPart(torch.uint8 if is_nested else torch.float32, (blocks,)),
            "quant_map": StoredPart(torch.float32, (1 << NF4_BITS,)),
        }
        if self.nested_block is not None:
            nested_blocks = -(-blocks // self.nested_block)
            parts["nested_absmax"] = StoredPart(torch.float32, (nested_blocks,))
            parts["nested_quant_map"] = StoredPart(torch.float32, (256,))
            parts["nested_offset"] = StoredPart(torch.float32, (1,))
        return parts

    @property
    def step(self) -> int:
        """One block of magnitudes, or of numbers, and even."""
        # Two numbers share a byte, so a step is even even if a block is odd.
        return 2 * self.block * (self.nested_block or 1)

    def values(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Return numbers [start, stop), row by row: flat, fp32."""
        count = stop - start

        # The first number of a pair is in the upper half of the byte. An odd matrix has an unused half at its end.
        pairs = parts[CODES][start // 2 : -(-stop // 2)]
        low = (1 << NF4_BITS) - 1
        places = torch.stack((pairs >> NF4_BITS, pairs & low), dim=-1).flatten()
        values = parts["quant_map"][places[:count].int()]

        first_block = start // self.block
        end_block = -(-stop // self.block)
        magnitudes = self._magnitudes(parts, first_block, end_block)
        scale = _repeated(magnitudes, 0, self.block, count)
        return values * scale

    def _magnitudes(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Return magnitudes [start, stop), in fp32."""
        stored = parts["absmax"][start:stop]
        if self.nested_block is None:
            return stored

        first_block = start // self.nested_block
        end_block = -(-stop // self.nested_block)
        scales = parts["nested_absmax"][first_block:end_block]
        scale = _repeated(scales, 0, self.nested_block, stop - start)
        values = parts["nested_quant_map"][stored.int()] * scale
        return values + parts["nested_offset"]


def decode(scheme: Scheme, carriers: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode a matrix from its codes and scales, in a dtype.

    Args:
        scheme: the way in which it is quantised.
        carriers: its parts in the scheme's order, as bytes in tensors of any dtype, on one device.
        dtype: of the result.
    """
    # There are no numbers on meta, but PEFT asks a layer for its weight about ten times while it wraps it.
    if carriers[0].is_meta:
        return torch.empty(scheme.shape, dtype=dtype, device="meta")

    # Views, so nothing is copied before a piece is decoded.
    parts = {}
    for (name, part), carrier in zip(scheme.parts.items(), carriers, strict=True):
        parts[name] = part.seen_in(carrier)

    num_elements = math.prod(scheme.shape)
    decoded = torch.empty(num_elements, dtype=dtype, device=carriers[0].device)
    for start, stop in _pieces(scheme):
        decoded[start:stop] = scheme.values(parts, start, stop)
    return decoded.view(scheme.shape)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that holds codes and scales, and decodes its weight whenever it computes."""

    def __init__(self, plain: nn.Linear, scheme: Scheme, item: int) -> None:
        """Replace a linear layer.

        Args:
            plain: the layer, whose bias stays.
            scheme: the way in which its weight is quantised.
            item: the size of an element of the dtype that the layer computes in.
        """
        # Not the constructor of nn.Linear, which would make a weight.
        nn.Module.__init__(self)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.scheme = scheme
        """The way in which the weight is quantised."""
        self.multiplies_codes = False
        """Whether it multiplies its codes directly, with inputs that are rounded to FP8 (`numerics.products`)."""
        self._key = repr(scheme)
        SCHEMES[self._key] = scheme
        for name, part in scheme.parts.items():
            # Only codes stand for model parameters, or scales would count twice.
            shape: tuple[int, ...] = (-(-part.num_bytes // item),)
            stands_for = 0
            if name == CODES:
                shape = _shape_of_codes(part.num_bytes, scheme.shape[0], item)
                stands_for = math.prod(scheme.shape) // math.prod(shape)

            # The dtype does not matter on meta. What is bound here later has the unit's compute dtype.
            carrier = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"), requires_grad=False)
            setattr(carrier, STANDS_FOR, stands_for)
            self.register_parameter(name, carrier)
        self.register_parameter("bias", plain.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight, decoded in the dtype of the parameters."""
        carriers = self._carriers()
        if not torch.compiler.is_compiling():
            return decode(self.scheme, carriers, carriers[0].dtype)
        weight: Tensor = _weight(carriers, self._key)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        carriers = self._carriers()
        if self.multiplies_codes and input.dtype is carriers[0].dtype:
            codes, scale = (
                part.seen_in(carrier) for part, carrier in zip(self.scheme.parts.values(), carriers, strict=True)
            )
            return linear_of_codes(input, codes, scale.float().view(-1, 1), self.bias)

        # To the compiler it is one operator, like any product. Otherwise it would save decoded weights for the
        # backward.
        if torch.compiler.is_compiling():
            product: Tensor = _product(input, self.bias, carriers, self._key)
        else:
            product = _DecodedProduct.apply(input, self.bias, self.scheme, *carriers)  # type: ignore[no-untyped-call]
        return product

    @property
    def has_rows_in_fp8(self) -> bool:
        """Whether its codes are FP8 with a scale for each row, or one for all, as FP8 products need."""
        if not isinstance(self.scheme, Fp8):
            return False
        num_rows, num_columns = self.scheme.shape
        rows, columns = self.scheme.block
        return columns >= num_columns and (rows == 1 or rows >= num_rows)

    def plain(self) -> nn.Linear:
        """Return a plain linear layer of the same sizes, on meta."""
        return nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")

    def _carriers(self) -> list[Tensor]:
        """Return the parts, in the scheme's order."""
        return [getattr(self, name) for name in self.scheme.parts]


def _shape_of_codes(num_bytes: int, rows: int, item: int) -> tuple[int, int]:
    """Return the shape of the carrier of codes: a row for each row of the matrix if that is even, otherwise one row."""
    if num_bytes % (rows * item):
        rows = 1
    return rows, -(-num_bytes // (rows * item))


class _DecodedProduct(torch.autograd.Function):
    """The product with a frozen matrix. Between forward and backward only its codes are kept, no decoded weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, scheme: Scheme, *carriers: Tensor) -> Tensor:  # noqa: ANN401
        # Neither the input nor the decoded weight is saved, since the weight is frozen and is decoded again.
        ctx.scheme = scheme
        ctx.save_for_backward(*carriers)
        return functional.linear(input, decode(scheme, carriers, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        carriers = ctx.saved_tensors
        return _grad_of_input(grads[0], ctx.scheme, carriers), None, None, *(None for _ in carriers)


def _grad_of_input(grad: Tensor, scheme: Scheme, carriers: Sequence[Tensor]) -> Tensor:
    """Return the gradient of a product's input, with the bits of torch's own backward of a linear layer."""
    weight = decode(scheme, carriers, grad.dtype)
    *batch, num_outputs = grad.shape
    product = grad.reshape(-1, num_outputs).mm(weight)
    return product.view(*batch, weight.shape[-1])


@torch.library.custom_op("megatier::quantised_weight", mutates_args=())
def _weight(carriers: list[Tensor], scheme: str) -> Tensor:
    """Return the decoded matrix, as one opaque operator. The scheme is a key of `SCHEMES`."""
    return decode(SCHEMES[scheme], carriers, carriers[0].dtype)


@_weight.register_fake
def _(carriers: list[Tensor], scheme: str) -> Tensor:
    return carriers[0].new_empty(SCHEMES[scheme].shape)


@torch.library.custom_op("megatier::quantised_product", mutates_args=())
def _product(input: Tensor, bias: Tensor | None, carriers: list[Tensor], scheme: str) -> Tensor:
    """Return the product with the decoded matrix, as one operator."""
    return functional.linear(input, decode(SCHEMES[scheme], carriers, input.dtype), bias)


@torch.library.custom_op("megatier::quantised_product_backward", mutates_args=())
def _product_backward(grad: Tensor, carriers: list[Tensor], scheme: str) -> Tensor:
    """Return the gradient of the product's input, as one operator."""
    return _grad_of_input(grad, SCHEMES[scheme], carriers)


@_product.register_fake
def _(input: Tensor, bias: Tensor | None, carriers: list[Tensor], scheme: str) -> Tensor:
    return input.new_empty(*input.shape[:-1], SCHEMES[scheme].shape[0])


@_product_backward.register_fake
def _(grad: Tensor, carriers: list[Tensor], scheme: str) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], SCHEMES[scheme].shape[1])


def _keep_carriers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    # As in `_DecodedProduct`, only the codes are kept between forward and backward.
    _, _, carriers, ctx.scheme = inputs
    ctx.save_for_backward(*carriers)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    carriers = list(ctx.saved_tensors)
    return _product_backward(grad, carriers, ctx.scheme), None, [None for _ in carriers], None


_product.register_autograd(_backward, setup_context=_keep_carriers)


# The compiler weighs products by their FLOPs when it chooses what to save.
@register_flop_formula(torch.ops.megatier.quantised_product)
def _(taken: Sequence[int], bias: object, carriers: object, scheme: str, **_: object) -> int:
    return 2 * math.prod(taken) * SCHEMES[scheme].shape[0]


@register_flop_formula(torch.ops.megatier.quantised_product_backward)
def _(grad: Sequence[int], carriers: object, scheme: str, **_: object) -> int:
    return 2 * math.prod(grad) * SCHEMES[scheme].shape[1]


def _pieces(scheme: Scheme) -> Iterator[tuple[int, int]]:
    """Yield the runs [start, stop) of numbers that are decoded at once."""
    num_elements = math.prod(scheme.shape)

    # Whole steps, at whose borders decoding may begin.
    num_steps = max(1, DECODED_ELEMENTS // scheme.step)
    piece = num_steps * scheme.step
    for start in range(0, num_elements, piece):
        stop = min(start + piece, num_elements)
        yield start, stop


def _repeated(scale: Tensor, dim: int, times: int, size: int) -> Tensor:
    """Repeat each slice of a tensor along a dimension, and cut the result to a size.

    A single slice is not repeated, since it broadcasts.
    """
    if scale.shape[dim] == 1 or times == 1:
        return scale
    unsqueezed = scale.unsqueeze(dim + 1)
    shape = list(unsqueezed.shape)
    shape[dim + 1] = times
    repeated = unsqueezed.expand(shape).flatten(dim, dim + 1)

    # The last block may be smaller than the others.
    return repeated.narrow(dim, 0, size)
