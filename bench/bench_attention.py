"""Measures one compiled decoder layer, forward and backward as a node runs it, with each kernel of attention.

For each length it prints the seconds of the layer, the FLOPs a second of the whole layer, and those of attention alone:
its FLOPs over what the layer takes beyond the same layer with its attention left out. Repeated FLOPs are not counted.
Every kernel runs twice, and the gradients of both runs are compared bit by bit. With `--tile-tokens` the MLP runs in
tiles of tokens.

python bench/bench_attention.py [--shape 8b] [--lengths 1024 8192 32768 131072] [--tokens 16384] [--saved-share 0.8]
    [--kernels without sdpa flex_attention] [--kept] [--tile-tokens 16384]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.shapes import SHAPES, model_config
from record import facts, write_row
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from megatier.compute.compilation import Compilation
from megatier.compute.token_tiles import Decision, TiledModule, running
from megatier.models.masks import BlockMasks

KERNELS = ("without", "sdpa", "flex_attention")
"""`without` gives the values in the place of attention's output: the layer's products and norms alone."""


def without(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # noqa: ANN401
    """Stand in for attention, with gradients for all three."""
    repeated = (key + value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (query + repeated).transpose(1, 2).contiguous(), None


def layer_of(
    shape: str, tokens: int, kernel: str, compilation: Compilation
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a compiled layer, and the arguments that Hugging Face gives it besides the hidden states."""
    config: Any = model_config(SHAPES[shape], tokens)
    config._attn_implementation = kernel
    with torch.device("cuda"):
        layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16).train()
        rotary = LlamaRotaryEmbedding(config)
        positions = torch.arange(tokens)[None]
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16)

    mask = None
    if kernel == "flex_attention":
        makers: Any = masking_utils
        makers.create_block_mask = BlockMasks().create
        mask = masking_utils.create_causal_mask(config, hidden, None, None)
    arguments = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotary(hidden, positions)}
    return compilation(layer.forward, "a layer"), {"layer": layer, "arguments": arguments}


def in_tiles(layer: torch.nn.Module, tokens: int | None, compilation: Compilation) -> dict[str, TiledModule]:
    """Let the MLP of a layer run in tiles of so many tokens; returns it by its name."""
    if tokens is None:
        return {}
    mlp = layer.get_submodule("mlp")
    tiled = TiledModule(mlp, "mlp", tokens, compilation, contextlib.nullcontext, lambda *_: None)
    tiled.decide(Decision(None, ()))
    return {"mlp": tiled}


def seconds_of(
    run: Callable[..., Any], layer: torch.nn.Module, arguments: dict[str, Any], rows: int, tokens: int, steps: int
) -> tuple[float, float, bool]:
    """Return the seconds of forward and of backward, and whether two runs gave the same gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    width = int(layer.self_attn.q_proj.in_features)  # type: ignore[union-attr, arg-type]
    x = torch.randn(rows, tokens, width, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
    slope = torch.randn(rows, tokens, width, device="cuda", dtype=torch.bfloat16, generator=generator)
    leaves = [x, *layer.parameters()]

    times: list[tuple[float, float]] = []
    grads: list[tuple[Tensor, ...]] = []
    for step in range(steps + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        output = run(x, **arguments)
        output = output if torch.is_tensor(output) else output[0]
        events[1].record()
        found = torch.autograd.grad(output, leaves, slope)
        events[2].record()
        torch.cuda.synchronize()
        if step < 2:
            grads.append(found)
        else:
            times.append((events[0].elapsed_time(events[1]) / 1e3, events[1].elapsed_time(events[2]) / 1e3))

    same = all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    return median(t for t, _ in times), median(t for _, t in times), same


def measure(options: argparse.Namespace, tokens: int, rows: int) -> list[dict[str, Any]]:
    """Measure every kernel at one length."""
    shape = options.shape
    compilation = Compilation(options.saved_share, options.kept)
    sizes = SHAPES[shape]
    attention = 2 * rows * tokens**2 * sizes.hidden
    products = 2 * rows * tokens * (sizes.matmul_parameters - sizes.hidden * sizes.vocab) // sizes.layers
    found: list[dict[str, Any]] = []
    for kernel in options.kernels:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run, of_layer = layer_of(shape, tokens, kernel, compilation)
        with running(in_tiles(of_layer["layer"], options.tile_tokens, compilation)):
            forward, backward, same = seconds_of(run, **of_layer, rows=rows, tokens=tokens, steps=options.steps)
        row: dict[str, Any] = {"kernel": kernel, "tokens": tokens, "rows": rows, "forward_s": forward}
        row |= {"backward_s": backward, "same_bits_twice": same}
        row |= {"peak_allocated_bytes": torch.cuda.max_memory_allocated()}
        if found and found[0]["kernel"] == KERNELS[0]:
            beyond = forward + backward - found[0]["forward_s"] - found[0]["backward_s"]
            row["layer_tflops"] = (3 * products + 3.5 * attention) / (forward + backward) / 1e12
            row["attention_tflops"] = 3.5 * attention / beyond / 1e12
        found.append(row)
        print(json.dumps(row), flush=True)
        del run, of_layer
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a group, in as many rows as that makes")
    parser.add_argument("--saved-share", type=float, default=0.8)
    parser.add_argument("--kept", action="store_true", help="save attention besides a saved share of 0")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--tile-tokens", type=int, help="the most tokens of a tile of the MLP")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a file for the result")
    options = parser.parse_args()

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN would take time that no run spends: `make_repeatable` turns it off as well.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    ALL_ATTENTION_FUNCTIONS.register("without", without)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    found = []
    for tokens in options.lengths:
        found += measure(options, tokens, max(1, options.tokens // tokens))
        if options.output:
            write_row(facts() | {"settings": settings, "rows": found}, options.output)


if __name__ == "__main__":
    main()
