"""Small models whose linear layers are quantised, as checkpoints hold them, and the same models decoded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from small_commands import MODEL
from tiny_runs import plain_model
from torch import Tensor
from transformers import LlamaConfig

NF4_TABLE = torch.tensor(
    [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]
)
"""Sixteen numbers of about a normal distribution; a checkpoint brings its own."""
BLOCK = (24, 20)
"""Rows and columns that share a scale in blocks; neither divides the matrices."""
Quantised = tuple[dict[str, Tensor], Tensor]
"""What is stored of a matrix, by the ends of names, and the matrix that it stands for in fp32."""


def by_channel(weight: Tensor) -> Quantised:
    """FP8 with a scale in bf16 for each row."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale.float()


def by_tensor(weight: Tensor) -> Quantised:
    """FP8 with one scale in fp32."""
    scale = weight.abs().max().reshape(1) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale


def by_block(weight: Tensor) -> Quantised:
    """FP8 with a scale in fp32 for each block."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    decoded = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scale[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
            decoded[place] = codes[place].float() * scale[i, j]
    return {"": codes, "_scale_inv": scale}, decoded


def nf4(weight: Tensor, *, nested: bool = False) -> Quantised:
    """NF4 in blocks of 64, whose scales are quantised too if they are nested, in blocks of 16."""
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(dim=1)
    settings: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored: dict[str, Tensor] = {".quant_map": NF4_TABLE, ".absmax": absmax}
    if nested:
        offset = float(absmax.mean())
        centred = absmax - offset
        scale = torch.stack([part.abs().max() for part in centred.split(16)])
        table = torch.linspace(-1, 1, 256)
        spread = scale.repeat_interleave(16)[: len(absmax)]
        places = (centred / spread)[:, None].sub(table).abs().argmin(dim=1)
        absmax = table[places] * spread + offset
        settings |= {"nested_blocksize": 16, "nested_offset": offset, "nested_dtype": "float32"}
        stored[".absmax"] = places.to(torch.uint8)
        stored |= {".nested_absmax": scale, ".nested_quant_map": table}

    places = (blocks / absmax[:, None])[..., None].sub(NF4_TABLE).abs().argmin(dim=-1).to(torch.uint8).reshape(-1, 2)
    stored[""] = (places[:, 0] << 4 | places[:, 1])[:, None]
    raw = bytearray(json.dumps(settings).encode())
    stored[".quant_state.bitsandbytes__nf4"] = torch.frombuffer(raw, dtype=torch.uint8).clone()
    return stored, (NF4_TABLE[places.int()].reshape(-1, 64) * absmax[:, None]).reshape(weight.shape)


def nested_nf4(weight: Tensor) -> Quantised:
    """NF4 whose scales are quantised too."""
    return nf4(weight, nested=True)


def float_quantised(**weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


KINDS: dict[str, tuple[Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "channel": (by_channel, float_quantised(strategy="channel")),
    "tensor": (by_tensor, float_quantised(strategy="tensor")),
    "block": (by_block, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nested": (nested_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}
"""Ways to quantise a matrix, and what config.json says of them."""


def quantised_folders(folder: Path, kind: str, **settings: Any) -> tuple[Path, Path]:
    """Write a small model whose layers are quantised, and the same one decoded, in fp32; returns both folders."""
    quantise, noted = KINDS[kind]
    model = plain_model(LlamaConfig(**{**MODEL, **settings})).bfloat16().float()
    stored: dict[str, Tensor] = {}
    state = model.state_dict()
    for name, value in state.items():
        if ".layers." in name and value.dim() == 2:
            parts, decoded = quantise(value)
            assert math.isfinite(float(decoded.sum()))
            stored |= {f"{name}{end}": part.contiguous().clone() for end, part in parts.items()}
            value.copy_(decoded)
        else:
            stored[name] = value.bfloat16()

    plain, quantised = folder / "plain", folder / "quantised"
    model.save_pretrained(plain)
    quantised.mkdir(parents=True)
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": noted}))
    return quantised, plain
