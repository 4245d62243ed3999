"""Compares products in bf16 and in FP8: a compiled decoder layer's speed, and what gradients lose.

`speed` runs one layer forward and backward as a node does, and prints seconds, what the forward saved, the peak of
memory, and whether two runs gave the same bits. `gradients` trains nothing: it takes the gradients of a model, and
prints for each kind of linear layer the least cosine to the gradient of the same numbers in fp32. First each decoder
layer stands by itself, with the inputs and the gradient that it has in bf16; then the roundings of all layers add up.

python bench/bench_fp8.py speed [--shape 8b] [--rows 16] [--tokens 1024] [--saved-share 0.8] [--attention sdpa]
python bench/bench_fp8.py speed --shape 3b --experts 128 --inside 768         a layer with experts of this width
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from peers.shapes import SHAPES, model_config
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from megatier.compute import fp8
from megatier.compute.compilation import Compilation
from megatier.compute.fp8_stacks import set_fp8_experts, supports_fp8

PRODUCTS = ("bf16", "fp8")
"""What is compared."""
VOCAB = 8192
"""The vocabulary of a model whose gradients are taken."""


def config_of(options: argparse.Namespace) -> PretrainedConfig:
    """Return the config of a model, with experts in the place of its MLP if there are any."""
    config = model_config(SHAPES[options.shape], options.tokens)
    if not options.experts:
        return config
    sizes = {
        "moe_intermediate_size": options.inside,
        "num_experts": options.experts,
        "num_experts_per_tok": options.chosen,
    }
    kept = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    return AutoConfig.for_model("qwen3_moe", **kept, **sizes)


def use(products: str, model: nn.Module) -> None:
    """Let all linear layers of a model but its head, and its experts, take products in FP8, or in its own dtype."""
    is_fp8 = products == "fp8"
    for name, layer in model.named_modules():
        if type(layer) in (nn.Linear, fp8.Fp8Linear) and name != "lm_head":
            fp8.set_fp8(layer, is_fp8=is_fp8)
        elif supports_fp8(layer):
            set_fp8_experts(layer, is_fp8=is_fp8)


def speed(options: argparse.Namespace) -> None:
    """Measure a layer in bf16 and in FP8."""
    config = config_of(options)
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
    slope = torch.randn_like(hidden)
    leaves = [hidden, *layer.parameters()]
    row: dict[str, Any] = {}
    twice: list[list[Tensor]] = []
    began = time.perf_counter()
    for _ in range(2):
        output, memory = forward(run, hidden, arguments)
        grads = torch.autograd.grad(output, leaves, slope)
        row |= memory | {"peak_mb": peak_mb(hidden.device)}
        row.setdefault("first_s", time.perf_counter() - began)
        twice.append([grad.clone() for grad in grads])
    same = all(torch.equal(one, other) for one, other in zip(*twice, strict=True))
    twice.clear()

    # The GPU never waits for the host between two runs, as it does not in a step.
    finish(hidden.device)
    began = time.perf_counter()
    for _ in range(steps):
        output = first_of(run(hidden, **arguments))
        torch.autograd.grad(output, leaves, slope)
    finish(hidden.device)
    return {"seconds": (time.perf_counter() - began) / steps, "same_bits_twice": same} | row


def forward(run: Callable[..., Any], hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Return the output of a forward, and what it leaves in GPU memory but for that, which is the next layer's."""
    if not hidden.is_cuda:
        return first_of(run(hidden, **arguments)), {}
    finish(hidden.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = first_of(run(hidden, **arguments))
    return output, {"saved_mb": (torch.cuda.memory_allocated() - before - output.nbytes) / 1e6}


def peak_mb(device: torch.device) -> float:
    """Return the most that tensors took since the peak was reset."""
    return torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def first_of(output: Any) -> Tensor:  # noqa: ANN401
    """Return the hidden states that a layer gives, alone or in a tuple."""
    hidden: Tensor = output if torch.is_tensor(output) else output[0]
    return hidden


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
    """Print the cosines of gradients to those in fp32: of each layer by itself, and of the whole model."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = config_of(options)
    config.num_hidden_layers, config.vocab_size = min(options.layers, config.num_hidden_layers), VOCAB
    torch.manual_seed(0)
    with torch.device(options.device):
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to(options.device).train()
    ids = (
        text_ids(options)
        if options.model
        else torch.randint(0, model.config.vocab_size, (options.rows, options.tokens))
    )
    ids = ids.to(options.device)

    calls: list[Call] = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            call = Call(layer)
            calls.append(call)
            hooks.callback(layer.register_forward_hook(call.note, with_kwargs=True).remove)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    by_itself: dict[str, list[dict[str, Tensor]]] = {}
    whole: dict[str, dict[str, Tensor]] = {}
    for products in (*PRODUCTS, "fp32"):
        use(products, model)
        model = model.float() if products == "fp32" else model
        by_itself[products] = [call.grads() for call in calls]
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        whole[products] = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}

    for products in PRODUCTS:
        layers = zip(by_itself[products], by_itself["fp32"], strict=True)
        found = [least(grads, exact) for grads, exact in layers]
        kinds = {kind: min(layer[kind] for layer in found) for kind in found[0]}
        print(json.dumps({"products": products, "of": "each layer"} | kinds), flush=True)
        print(json.dumps({"products": products, "of": "the model"} | least(whole[products], whole["fp32"])), flush=True)


class Call:
    """What a layer was called with, and the gradient that came back to it."""

    def __init__(self, layer: nn.Module) -> None:
        """Remember the layer."""
        self._layer = layer
        self._hidden = self._grad = torch.empty(0)
        self._arguments: dict[str, Any] = {}

    def note(self, _: nn.Module, args: tuple[Tensor, ...], arguments: dict[str, Any], output: Any) -> None:  # noqa: ANN401
        """Keep what the layer was given, and later the gradient of what it gave."""
        self._hidden, self._arguments = args[0].detach(), arguments
        first_of(output).register_hook(self._note_grad)

    def _note_grad(self, grad: Tensor) -> None:
        self._grad = grad.detach()

    def grads(self) -> dict[str, Tensor]:
        """Run the layer again, in the dtype that it has by now, and return the gradients of its weights."""
        dtype = next(self._layer.parameters()).dtype

        def cast(value: Any) -> Any:  # noqa: ANN401
            return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

        output = first_of(self._layer(cast(self._hidden), **tree_map(cast, self._arguments)))
        named = dict(self._layer.named_parameters())
        found = torch.autograd.grad(output, list(named.values()), cast(self._grad))
        return {name: grad.cpu() for name, grad in zip(named, found, strict=True)}


def text_ids(options: argparse.Namespace) -> Tensor:
    """Return rows of real text as bytes: Python's own library, whose first bytes a training of it saw as well."""
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py")))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(text[: 8 * options.rows * options.tokens].decode(errors="ignore"))["input_ids"]
    return torch.tensor(ids[: options.rows * options.tokens]).view(options.rows, options.tokens)


def least(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the least cosine of each kind of matrix, over all layers."""
    row: dict[str, float] = {}
    for name, grad in grads.items():
        if grad.dim() > 1:
            kind = name.split(".")[-2 if grad.dim() == 2 else -1]
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
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--chosen", type=int, default=8, help="experts of each token")
    parser.add_argument("--inside", type=int, default=768, help="the width inside of an expert")
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
