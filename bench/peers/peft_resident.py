"""Measures PEFT over a model that lies on the GPU as a whole, on megatier's shapes: the peer of its rows with adapters.

The base is in bf16 and frozen. LoRA adapters lie beside all linear layers but the head, in fp32 under autocast, as the
Trainer with bf16 has them, or in bf16 (--adapters bf16). Their gradients are clipped exactly at 1.0, and torch's fused
AdamW updates them. Layers are recomputed by gradient checkpointing, unless --no-checkpointing says that memory has room
for what they save. Figures are printed and written as one JSON row.

python bench/peers/peft_resident.py --shape 8b --batch 16 --seq 1024
python bench/peers/peft_resident.py --shape 8b --batch 16 --seq 1024 --compile --no-checkpointing --adapters bf16
python bench/peers/peft_resident.py --shape tiny --batch 2 --seq 64 --device cpu     a smoke run without a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.measure import BETAS, CLIP, EPSILON, RATE, WEIGHT_DECAY, Step, measure, parser_of, prepare
from peers.shapes import SHAPES, LanguageModel, adapted_config, build


def adapted(options: argparse.Namespace) -> LanguageModel:
    """Build the model with adapters, which alone are trained."""
    from peft import inject_adapter_in_model

    model = build(SHAPES[options.shape], options.seq, torch.bfloat16, options.device)
    model.requires_grad_(False)
    # PEFT makes adapters in the dtype of the base, and `get_peft_model` brings them to fp32 afterwards.
    inject_adapter_in_model(adapted_config(options.rank), model.core)
    dtype = torch.float32 if options.adapters == "fp32" else torch.bfloat16
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)

    core = model.core
    if not options.checkpointing:
        newer = hasattr(core, "activation_checkpointing_disable")  # the same under another name; the older one warns
        (core.activation_checkpointing_disable if newer else core.gradient_checkpointing_disable)()
    for layer in core.layers if options.compile else ():
        layer.compile()
    return model


def build_step(options: argparse.Namespace) -> Step:
    """Build the model, and a step that trains its adapters."""
    model = adapted(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True)

    def step(groups: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=options.device)
        for ids in groups:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.adapters == "fp32"):
                loss = model(ids.to(options.device)) / len(groups)
            loss.backward()
            total += loss.detach()

        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default 16)")
    parser.add_argument("--adapters", choices=("fp32", "bf16"), default="fp32", help="dtype (default fp32)")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    prepare(options)
    words = ["peft", options.adapters]
    words += ["compiled"] if options.compile else []
    words += [] if options.checkpointing else ["kept"]
    measure("_".join(words), options, partial(build_step, options))


if __name__ == "__main__":
    main()
