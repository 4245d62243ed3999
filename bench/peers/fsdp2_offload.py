"""Measures PyTorch's own FSDP2 with CPU offload on megatier's shapes, in one process with one GPU.

fp32 masters, gradients and AdamW's moments lie in pinned RAM (16 bytes a parameter). It computes in bf16, recomputes by
gradient checkpointing, clips exactly at 1.0, updates with torch's fused AdamW on the CPU, and fetches the next layer
ahead. Figures are printed and written as one JSON row.

python bench/peers/fsdp2_offload.py --shape 3b --batch 16 --seq 1024
python bench/peers/fsdp2_offload.py --shape tiny --batch 2 --seq 64 --device cpu     a smoke run without a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.measure import BETAS, CLIP, EPSILON, RATE, WEIGHT_DECAY, Step, measure, parser_of, prepare
from peers.shapes import SHAPES, LanguageModel, materialize


def sharded(options: argparse.Namespace) -> LanguageModel:
    """Build the model with fp32 shards in RAM: one each for every layer, the head and the embedding."""
    shape = SHAPES[options.shape]
    on_gpu = options.device == "cuda"
    with torch.device("meta"):
        model = LanguageModel(shape, options.seq).to(torch.float32)
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(options.device, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu),
    )
    layers = [shard(layer) for layer in model.core.layers]
    for module in (model.head, model.core.embed_tokens, model):
        shard(module)
    # By itself FSDP2 fetches ahead only as far as Python runs ahead of the GPU.
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 2])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - 1) : index])

    return materialize(model, shape, options.seq, "cpu", options.device)


def build(options: argparse.Namespace) -> Step:
    """Build the model, and a step that trains it."""
    model = sharded(options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(groups: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=options.device)
        for index, ids in enumerate(groups):
            model.set_is_last_backward(index == len(groups) - 1)  # type: ignore[operator]  # fully_shard added it
            loss = model(ids.to(options.device)) / len(groups)
            loss.backward()
            total += loss.detach()

        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    """Measure, print, write."""
    options = parser_of(__doc__ or "").parse_args()
    prepare(options)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    # Gradients lie in RAM, so their norm needs gloo, whatever the weights need.
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]  # any free port
    dist.init_process_group(backend, store=store, rank=0, world_size=1)

    try:
        measure("fsdp2_offload", options, partial(build, options))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
