"""Compares products in bf16 and in FP8: a compiled decoder layer's speed, and what gradients lose.

`speed` runs one layer forward and backward as a node does, and prints seconds, what the forward saved, the peak of
memory, and whether two runs gave the same bits. `gradients` trains nothing: it takes the gradients of a model with few
layers, and prints for each kind of linear layer the least cosine to the gradient of the same numbers in fp32.

python bench/bench_fp8.py speed [--shape 8b] [--rows 16] [--tokens 1024] [--saved-share 0.8] [--attention sdpa]
python bench/bench_fp8.py gradients [--shape 8b] [--layers 4] [--rows 4] [--tokens 1024] [--model DIR]
python bench/bench_fp8.py gradients --shape tiny --rows 2 --tokens 64 --device cpu     a smoke run without a GPU

With --model the weights are those of a folder, such as the end of a run; else they are random.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch._inductor.config
from peers.shapes import SHAPES, llama_config
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM

from megatier.compute import fp8
from megatier.compute.compilation import Compilation

PRODUCTS = ("bf16", "fp8")
"""What is compared."""
VOCAB = 8192
"""The vocabulary of a model whose gradients are taken."""


def use(products: str, model: nn.Module) -> None:
    """Let all linear layers of a model but its head take products in FP8, or in its own dtype."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            fp8.adopt(layer, is_fp8=products == "fp8")


def speed(options: argparse.Namespace) -> None:
    """Measure a layer in bf16 and in FP8."""
    config = llama_config(SHAPES[options.shape], options.tokens)
    config.num_hidden_layers, config.vocab_size = 1, VOCAB
    is_gpu = options.device == "cuda"
    first: float | None = None
    for products in PRODUCTS:
        torch.compiler.reset()
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=options.attention
            ).train()
            hidden = torch.randn(options.rows, options.tokens, config.hidden_size, dtype=torch.bfloat16)
            positions = torch.arange(options.tokens)[None]
        layer = model.model.layers[0]
        use(products, model)
        arguments = {"position_ids": positions, "position_embeddings": model.model.rotary_emb(hidden, positions)}
        run = Compilation(options.saved_share)(layer.forward, "a layer") if is_gpu else layer.forward
        hidden.requires_grad_()
        row = {"products": products} | measured(run, hidden, arguments, layer, options.steps)
        if options.kernels:
            row["kernels_ms"] = kernels_of(run, hidden, arguments, layer, options.kernels)
        first = first or row["seconds"]
        print(json.dumps(row | {"times": first / row["seconds"]}), flush=True)


def measured(
    run: Callable[..., Any], hidden: Tensor, arguments: dict[str, Any], layer: nn.Module, steps: int
) -> dict[str, Any]:
    """Measure forward and backward of a layer."""
    is_gpu = hidden.is_cuda
    slope = torch.randn_like(hidden)
    leaves = [hidden, *layer.parameters()]
    times: list[tuple[float, float]] = []
    grads: list[list[Tensor]] = []
    saved = peak = 0
    for _ in range(steps + 2):
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_gpu else 0
        began = time.perf_counter()
        output = run(hidden, **arguments)
        output = output if torch.is_tensor(output) else output[0]
        if is_gpu:
            # What the forward leaves, but for its output, which is the next layer's input.
            saved = torch.cuda.memory_allocated() - before - output.nbytes
            torch.cuda.synchronize()
        middle = time.perf_counter()
        found = torch.autograd.grad(output, leaves, slope)
        if is_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        times.append((middle - began, time.perf_counter() - middle))
        grads = [*grads[-1:], [x.clone() for x in found]]
    same = all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    forward, backward = (median(each[side] for each in times[2:]) for side in (0, 1))
    row: dict[str, Any] = {"seconds": forward + backward, "forward_s": forward, "backward_s": backward}
    return row | {"saved_mb": saved / 1e6, "peak_mb": peak / 1e6, "same_bits_twice": same, "first_s": sum(times[0])}


def kernels_of(
    run: Callable[..., Any], hidden: Tensor, arguments: dict[str, Any], layer: nn.Module, count: int
) -> dict[str, float]:
    """Return the milliseconds of the kernels that take longest in one forward and backward."""
    with torch.profiler.profile() as profile:
        output = run(hidden, **arguments)
        output = output if torch.is_tensor(output) else output[0]
        torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))
        if hidden.is_cuda:
            torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in profile.events():
        # Without a GPU these are operators on the CPU, those inside of others too.
        if event.device_type.name == ("CUDA" if hidden.is_cuda else "CPU"):
            name = event.name[:90]
            total[name] = total.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(total.items(), key=lambda item: -item[1])[:count]
    return {name: round(milliseconds, 3) for name, milliseconds in longest}


def gradients(options: argparse.Namespace) -> None:
    """Print the cosines of gradients to those in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = llama_config(SHAPES[options.shape], options.tokens)
    config.num_hidden_layers, config.vocab_size = min(options.layers, config.num_hidden_layers), VOCAB
    torch.manual_seed(0)
    with torch.device(options.device):
        if options.model:
            wide = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        else:
            wide = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        wide = wide.to(options.device)
        ids = torch.randint(0, wide.config.vocab_size, (options.rows, options.tokens))

    def taken(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {
            name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    found = {}
    for products in PRODUCTS:
        use(products, wide)
        found[products] = taken(wide)
    use("fp32", wide)
    exact = taken(wide.float())
    for products, grads in found.items():
        print(json.dumps({"products": products} | least(grads, exact)), flush=True)


def least(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    """Return the least cosine of each kind of matrix, over all layers."""
    row: dict[str, Any] = {}
    for name, grad in grads.items():
        if grad.dim() == 2:
            kind = name.split(".")[-2]
            cosine = cosine_similarity(grad.double().flatten(), exact[name].double().flatten(), 0)
            row[kind] = min(row.get(kind, 1.0), round(float(cosine), 6))
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "gradients"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--saved-share", type=float, default=0.8)
    parser.add_argument("--attention", choices=("sdpa", "flex_attention"), default="sdpa")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="also print so many kernels that take longest")
    parser.add_argument("--realize-reads", type=int, help="Inductor's realize_reads_threshold (its default: 4)")
    parser.add_argument("--model", help="a folder of a model whose gradients are taken")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()

    if options.realize_reads is not None:
        torch._inductor.config.realize_reads_threshold = options.realize_reads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    print(torch.cuda.get_device_name() if options.device == "cuda" else "cpu", torch.__version__, flush=True)
    {"speed": speed, "gradients": gradients}[options.what](options)


if __name__ == "__main__":
    main()
