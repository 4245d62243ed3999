"""Quantised matrices are decoded by the formulas of their checkpoints, and multiply as decoded ones do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch._functorch.config
from tiny_quantised import BLOCK, KINDS
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional

from megatier.compute import quantised_linear
from megatier.compute.quantised_linear import CODES, STANDS_FOR, Fp8, Nf4, QuantisedLinear, Scheme, StoredPart, decode
from megatier.optim.masters import write_rounded

ROWS, COLUMNS = 72, 64
ENDS = {
    "_scale": "scale",
    "_scale_inv": "scale",
    ".absmax": "absmax",
    ".quant_map": "quant_map",
    ".nested_absmax": "nested_absmax",
    ".nested_quant_map": "nested_quant_map",
    "": CODES,
}


def quantised_matrix(kind: str) -> tuple[Scheme, dict[str, Tensor], Tensor]:
    """A matrix of a kind: its scheme, what is stored of it by the scheme's names, and its numbers."""
    torch.manual_seed(3)
    parts, decoded = KINDS[kind][0](torch.randn(ROWS, COLUMNS))
    stored = {ENDS[end]: part for end, part in parts.items() if end in ENDS}
    if "scale" not in stored:
        nested = "nested_absmax" in stored
        noted = json.loads(bytes(parts[".quant_state.bitsandbytes__nf4"].tolist()))
        if nested:
            stored["nested_offset"] = torch.tensor([noted["nested_offset"]])
        return Nf4((ROWS, COLUMNS), 64, 16 if nested else None), stored, decoded
    scale = stored["scale"]
    block = {"channel": (1, COLUMNS), "tensor": (ROWS, COLUMNS), "block": BLOCK}[kind]
    return Fp8((ROWS, COLUMNS), StoredPart(scale.dtype, tuple(scale.shape)), block), stored, decoded


def carriers(scheme: Scheme, stored: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The parts as bytes in tensors of a dtype, as they lie in a plane of weights."""
    found = []
    for name in scheme.parts:
        raw = stored[name].contiguous().reshape(-1).view(torch.uint8)
        padded = torch.cat((raw, torch.zeros(-raw.numel() % dtype.itemsize, dtype=torch.uint8)))
        found.append(padded.view(dtype))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_matrix_is_decoded_in_pieces_as_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, stored, expected = quantised_matrix(kind)
    for size in (1, 3 * scheme.step, 1 << 22):
        monkeypatch.setattr(quantised_linear, "DECODED_ELEMENTS", size)
        for carrier in (torch.uint8, torch.bfloat16, torch.float32):
            found = decode(scheme, carriers(scheme, stored, carrier), torch.float32)
            assert torch.equal(found, expected), (size, carrier)
    assert torch.equal(decode(scheme, carriers(scheme, stored, torch.bfloat16), torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_weight_on_meta_has_its_shape_and_decodes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT asks for it about ten times while it wraps a layer."""
    scheme, _, _ = quantised_matrix(kind)
    layer = QuantisedLinear(nn.Linear(COLUMNS, ROWS, bias=False, device="meta"), scheme, 2)
    monkeypatch.setattr(type(scheme), "values", None)
    assert layer.weight.is_meta
    assert layer.weight.shape == (ROWS, COLUMNS)
    assert layer.to(torch.bfloat16).weight.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bias"), [("channel", False), ("block", True), ("nested", False)])
def test_quantised_linear_has_the_bits_of_a_decoded_one(kind: str, bias: bool, dtype: torch.dtype) -> None:
    scheme, stored, decoded = quantised_matrix(kind)
    plain = nn.Linear(COLUMNS, ROWS, bias=bias).requires_grad_(False).to(dtype)
    layer = QuantisedLinear(plain, scheme, dtype.itemsize)
    assert {name: parameter.numel() for name, parameter in layer.named_parameters() if name != "bias"} == {
        name: part.numel() for name, part in zip(scheme.parts, carriers(scheme, stored, dtype), strict=True)
    }
    for name, carrier in zip(scheme.parts, carriers(scheme, stored, dtype), strict=True):
        shape = layer.get_parameter(name).shape
        layer._parameters[name] = nn.Parameter(carrier.view(shape), requires_grad=False)
    plain.weight = nn.Parameter(decoded.to(dtype), requires_grad=False)
    assert torch.equal(layer.weight, plain.weight)

    results = []
    for module in (layer, plain):
        taken = torch.linspace(-1, 1, 2 * 5 * COLUMNS).view(2, 5, COLUMNS).to(dtype).requires_grad_()
        given = module(taken)
        given.square().sum().backward()
        results.append((given.detach(), taken.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_quantised_linear_stands_for_the_parameters_of_its_weight_and_none_for_scales() -> None:
    for kind in KINDS:
        scheme, _, _ = quantised_matrix(kind)
        for item in (2, 4):
            layer = QuantisedLinear(nn.Linear(COLUMNS, ROWS, bias=False, device="meta"), scheme, item)
            counts = {name: p.numel() * getattr(p, STANDS_FOR) for name, p in layer.named_parameters()}
            assert counts == {name: ROWS * COLUMNS * (name == CODES) for name in scheme.parts}
            assert layer.get_parameter(CODES).shape[0] in (1, ROWS)
            assert not any(p.requires_grad for p in layer.parameters())
            assert layer.weight.shape == (ROWS, COLUMNS)
            assert layer.plain().weight.shape == (ROWS, COLUMNS)


def test_quantised_linear_is_decoded_as_compressed_tensors_does() -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    for kind in ("channel", "tensor"):
        scheme, stored, _ = quantised_matrix(kind)
        given = args(num_bits=8, type="float", symmetric=True, strategy=kind)
        expected = forward.dequantize(stored[CODES], stored["scale"], args=given)
        assert torch.equal(decode(scheme, carriers(scheme, stored, torch.uint8), expected.dtype), expected)


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_matrix_is_decoded_as_bitsandbytes_does(nested: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(3)
    codes, state = bitsandbytes.quantize_4bit(
        torch.randn(96, 512).bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=nested
    )
    expected = bitsandbytes.dequantize_4bit(codes, state)
    stored = {
        CODES: codes,
        **{name: part for name, part in state.as_dict(packed=True).items() if name in ENDS.values()},
    }
    if nested:
        stored["nested_offset"] = state.offset.reshape(1)
    scheme = Nf4((96, 512), state.blocksize, state.state2.blocksize if nested else None)
    assert torch.equal(decode(scheme, carriers(scheme, stored, torch.uint8), expected.dtype), expected)


def layer_of(kind: str, dtype: torch.dtype) -> QuantisedLinear:
    """A layer with a matrix of a kind."""
    scheme, stored, _ = quantised_matrix(kind)
    layer = QuantisedLinear(nn.Linear(COLUMNS, ROWS, bias=False, device="meta"), scheme, dtype.itemsize)
    for name, carrier in zip(scheme.parts, carriers(scheme, stored, dtype), strict=True):
        layer._parameters[name] = nn.Parameter(carrier.view(layer.get_parameter(name).shape), requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", ["channel", "nested"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_quantised_linear_that_is_compiled_saves_no_decoded_weight(kind: str, share: float) -> None:
    layers = nn.ModuleList([layer_of(kind, torch.float32), layer_of(kind, torch.float32)])
    backward = nn.Parameter(torch.linspace(-0.1, 0.1, ROWS * COLUMNS).view(ROWS, COLUMNS))

    def run(taken: Tensor) -> Tensor:
        for layer in layers:
            taken = functional.silu(layer(taken)) @ backward
        return taken

    # The first layer of a model is given what needs no gradient.
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=backend)
    for needs_grad in (False, True):
        taken = torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS).requires_grad_(needs_grad)
        with torch._functorch.config.patch(activation_memory_budget=share):
            found, expected = compiled(taken), run(taken)
        assert torch.equal(found, expected)
        node: Any = found.grad_fn
        assert [tensor.numel() for tensor in node.saved_tensors].count(ROWS * COLUMNS) == 1, "the trained matrix"
        wanted = [taken, backward] if needs_grad else [backward]
        grads = [torch.autograd.grad(result.square().sum(), wanted) for result in (found, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_elements_that_carry_codes_keep_their_bits_where_numbers_are_rounded() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    wide = (bits.int() << 16).view(torch.float32)
    plane = torch.empty(len(bits), dtype=torch.bfloat16)
    write_rounded(wide, plane)
    assert torch.equal(plane.view(torch.int16), bits)
    numbers = torch.tensor([1.00390625, 1.01171875, -1e-40, 3.4e38])
    write_rounded(numbers, plane[:4])
    assert torch.equal(plane[:4].view(torch.int16), numbers.bfloat16().view(torch.int16))
