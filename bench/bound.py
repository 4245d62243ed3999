"""Measures the compute-only bound of a shape: weights resident, no optimizer, no gradients out, best kernels.

It runs forward and backward of Hugging Face's own model with compiled layers, kept activations and megatier's loss
kernel. No step of megatier can be faster; the ratio of the two is its share of the bound. With --rank the base is
frozen, so its weights have no gradients, and PEFT's adapters beside its linear layers have some.

python bench/bound.py --shape 8b --batch 16 [--sequence 1024] [--rank 16] [--no-deterministic]
python bench/bound.py --shape tiny --batch 2 --sequence 64 --rank 4 --device cpu     a smoke run without a GPU
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import time
from statistics import median
from typing import Any

import torch
from peers.shapes import SHAPES, adapted_config, model_config, trained_shape
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatier.compute.compilation import Compilation
from megatier.compute.fp8 import set_fp8
from megatier.engine.cross_entropy import add_product, cross_entropy_and_grad


class _Loss(torch.autograd.Function):
    """Mean cross-entropy of a head, chunk by chunk. The gradients are made in the forward, while logits are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, kernel: Any) -> Tensor:  # noqa: ANN401
        hidden_grad = torch.empty_like(hidden)
        # A head under adapters is frozen.
        is_trained = ctx.needs_input_grad[1]
        head_grad = torch.zeros(weight.shape if is_trained else 0, dtype=torch.float32, device=weight.device)
        loss = torch.zeros((), device=hidden.device)
        scale = loss.new_full((), 1 / hidden.shape[0])

        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            part, slope = kernel(hidden[rows] @ weight.t(), targets[rows], None, scale)
            loss += part
            torch.mm(slope, weight, out=hidden_grad[rows])
            if is_trained:
                add_product(head_grad, slope.t(), hidden[rows])

        ctx.grads = hidden_grad, head_grad.to(weight.dtype) if is_trained else None
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *ctx.grads, None, None, None


def measure(
    shape: str,
    batch: int,
    tokens: int,
    *,
    attention: str,
    chunk: int,
    steps: int,
    compiles: bool = True,
    saved_share: float = 1.0,
    rank: int = 0,
    products: str = "bf16",
    device: str = "cuda",
) -> dict[str, Any]:
    """Measure the seconds of forward and backward on one group of batch x tokens random tokens.

    With a rank only PEFT's adapters have gradients, in bf16 as well.
    """
    config = model_config(SHAPES[shape], tokens)
    compilation = Compilation(saved_share)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).train()
        if rank:
            importlib.import_module("peft").inject_adapter_in_model(adapted_config(rank), model)
            model.to(torch.bfloat16)
        ids = torch.randint(0, config.vocab_size, (batch, tokens))

    for name, linear in model.model.layers.named_modules() if products == "fp8" else ():
        if type(linear) is torch.nn.Linear and ".lora_" not in name:
            set_fp8(linear)
    for layer in model.model.layers if compiles else ():
        layer.forward = compilation(layer.forward, "a layer")
    kernel = compilation(cross_entropy_and_grad, "the loss") if compiles else cross_entropy_and_grad
    seconds = []
    # The first two are not counted: they compile and choose kernels.
    for _ in range(steps + 2):
        _wait(device)
        began = time.perf_counter()
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            hidden, model.lm_head.weight, ids.flatten(), chunk, kernel
        )
        _wait(device)
        forward = time.perf_counter() - began
        loss.backward()
        model.zero_grad(set_to_none=True)
        _wait(device)
        seconds.append((time.perf_counter() - began, forward))

    whole = median(s for s, _ in seconds[2:])

    return {
        "shape": trained_shape(shape, rank),
        "batch": batch,
        "sequence_length": tokens,
        "loss_chunk": chunk,
        "compiles": compiles,
        "saved_share": saved_share,
        "attention": attention,
        "products": products,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "first_s": seconds[0][0],
        "seconds": [s for s, _ in seconds[2:]],
        "forward_s": median(f for _, f in seconds[2:]),
        "median_s": whole,
        "tokens_per_s": batch * tokens / whole,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def _wait(device: str) -> None:
    """Wait until the GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def bound_of(finished: subprocess.CompletedProcess[str]) -> dict[str, Any] | None:
    """Read what a run of this script printed; None if the shape does not fit."""
    lines = finished.stdout.strip().splitlines()
    if finished.returncode or not lines:
        print(finished.stderr[-2000:], flush=True)
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--attention", choices=("sdpa", "flex_attention"), default="sdpa")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--saved-share", type=float, default=1.0)
    parser.add_argument("--rank", type=int, default=0, help="train adapters of this rank over a frozen base")
    parser.add_argument("--products", choices=("bf16", "fp8"), default="bf16", help="of layers' linear ones")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a smoke run (default cuda)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()

    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory with NaN would take time that no run spends: `make_repeatable` turns it off as well.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    result = measure(
        options.shape,
        options.batch,
        options.sequence,
        attention=options.attention,
        chunk=options.chunk,
        steps=options.steps,
        compiles=options.compile,
        saved_share=options.saved_share,
        rank=options.rank,
        products=options.products,
        device=options.device,
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
