"""Measures kernels of attention with their options, alone and in a compiled decoder layer, forward and backward.

Flex attention has one compilation for each set of its options, which are taken in pairs: one for the forward, one for
the backward. The fastest of both then run in a whole layer, beside flex attention as it is, `sdpa`, and cuDNN if its
frontend is installed. Each kernel has a process of its own. All compile at the same time, and are measured one after
the other when the last has compiled. Each runs twice with the same inputs, whose gradients are compared bit by bit;
`bits` is a number made of all bits of output and gradients, so equal ones come from equal bits.

python bench/bench_attention_kernels.py [--head-size 128] [--lengths 1024 8192 32768] [--tokens 16384]
    [--heads 32 8] [--pairs 0 1 2] [--kernels sdpa cudnn] [--no-layers]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from bench_attention import layer_of
from record import facts, folder_of, write_row
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatier.compute import compilation
from megatier.compute.compilation import Compilation
from megatier.models.masks import CAUSAL_KERNEL_OPTIONS

LAYERS = {128: "8b", 64: "1b"}
"""The shape of a whole layer, by its head size."""
COMPILING_MAX = 70.0
"""Seconds after which whatever still compiles is given up."""
FREE = CAUSAL_KERNEL_OPTIONS
"""What holds for every causal mask."""
PLAIN = dict.fromkeys(FREE, False)
"""In a layer, whose mask says by itself what holds: nothing is taken for granted."""


def forward_options(rows: int, columns: int, stages: int, warps: int, **more: bool) -> dict[str, Any]:
    """Options of the forward: a tile's queries and keys, loads ahead, and warps."""
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "num_stages": stages, "num_warps": warps}
    return {f"fwd_{name}": value for name, value in (sizes | more).items()}


def backward_options(rows: int, columns: int, stages: int, warps: int, **more: bool) -> dict[str, Any]:
    """Options of the backward: for keys' gradients a tile's queries and keys, and the other way for queries'."""
    sizes = {"BLOCK_M1": rows, "BLOCK_N1": columns, "BLOCK_M2": columns, "BLOCK_N2": rows}
    sizes |= {"num_stages": stages, "num_warps": warps}
    return {f"bwd_{name}": value for name, value in (sizes | more).items()}


PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    (FREE, {}),
    (forward_options(128, 128, 2, 8), backward_options(64, 128, 2, 8)),
    (forward_options(128, 64, 2, 8), backward_options(64, 64, 3, 4)),
    (forward_options(128, 64, 3, 4), backward_options(64, 64, 2, 8)),
    (forward_options(128, 128, 3, 8), backward_options(128, 128, 1, 8)),
    (forward_options(128, 64, 4, 8), backward_options(32, 128, 3, 8)),
    (forward_options(128, 64, 3, 8, USE_TMA=True), backward_options(64, 128, 3, 8, USE_TMA=True)),
    (forward_options(128, 128, 2, 8, USE_TMA=True), backward_options(64, 128, 2, 8, USE_TMA=True)),
    (forward_options(128, 128, 3, 4), backward_options(64, 128, 3, 4)),
    ({"fwd_PRESCALE_QK": True}, {"bwd_PRESCALE_QK": True}),
    (FREE | forward_options(128, 64, 3, 8, USE_TMA=True), FREE),
    (FREE | forward_options(128, 128, 2, 8, USE_TMA=True), FREE),
)
"""Options of flex attention. Tiles have to divide the blocks of the mask, which have 128 tokens."""

Run = Callable[[], tuple[float, float, bool, int]]
"""Gives the seconds of forward and backward, whether two runs had the same bits, and the number of these bits."""


def bits_of(tensors: tuple[Tensor, ...]) -> int:
    """A number made of all bits of some tensors of 2 bytes an element."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int16).flatten().long()
        total = total * 1_000_003 + int((words * (torch.arange(len(words), device=words.device) % 65_521 + 1)).sum())
    return total % (1 << 61)


def timed(forward: Callable[[], Tensor], leaves: list[Tensor], slope: Tensor, steps: int) -> Run:
    """Run forward and backward twice, which compiles them; returns what measures them."""

    def both() -> tuple[Tensor, ...]:
        output = forward()
        return output.detach(), *torch.autograd.grad(output, leaves, slope)

    # Two of them are held to be compared, and the numbers of the bits are the same.
    first, second = both(), both()
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    number = bits_of(first)
    del first, second
    torch.cuda.empty_cache()

    def run() -> tuple[float, float, bool, int]:
        times: list[tuple[float, float]] = []
        for step in range(steps + 1):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            output = forward()
            events[1].record()
            torch.autograd.grad(output, leaves, slope)
            events[2].record()
            torch.cuda.synchronize()
            if step:
                times.append((events[0].elapsed_time(events[1]) / 1e3, events[1].elapsed_time(events[2]) / 1e3))
        return median(t for t, _ in times), median(t for _, t in times), same, number

    return run


def alone(kernel: str, options: dict[str, Any], tokens: int, rows: int, task: dict[str, Any]) -> Run:
    """Prepare attention by itself."""
    head_size = task["head_size"]
    queries, keys = task["heads"]
    generator = torch.Generator("cuda").manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    query, key, value, slope = (
        torch.randn(rows, tokens, heads, head_size, **kind).transpose(1, 2)  # type: ignore[call-overload]
        for heads in (queries, keys, keys, queries)
    )
    leaves = [query, key, value]
    for leaf in leaves:
        leaf.requires_grad_()

    if kernel == "flex_attention":
        made = torch.compile(create_block_mask)
        mask = made(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device="cuda")
        compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
        run = functools.partial(compiled, block_mask=mask, enable_gqa=True, kernel_options=options or None)
    elif kernel == "sdpa":
        run = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    else:
        run = functools.partial(_cudnn, scaling=head_size**-0.5)
    return timed(lambda: run(query, key, value), leaves, slope, task["steps"])


def in_layer(kernel: str, options: dict[str, Any], tokens: int, rows: int, task: dict[str, Any]) -> Run:
    """Prepare a whole layer, compiled as a run compiles it. Its bits are those of what it gives back."""
    if kernel == "cudnn":
        ALL_ATTENTION_FUNCTIONS.register("cudnn", _cudnn_of_layer)
        from peers.cudnn_attention import attention

        # What a run does for flex attention: the compiler saves its output, whose worth it does not know.
        patched: Any = compilation
        patched.FLEX = attention._opoverload
    run, of_layer = layer_of(LAYERS[task["head_size"]], tokens, kernel, Compilation(0.8))
    layer, arguments = of_layer["layer"], of_layer["arguments"]
    if options:
        arguments["kernel_options"] = options

    generator = torch.Generator("cuda").manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    width = int(layer.self_attn.q_proj.in_features)
    x, slope = (torch.randn(rows, tokens, width, **kind) for _ in range(2))  # type: ignore[call-overload]
    x.requires_grad_()

    def forward() -> Tensor:
        output = run(x, **arguments)
        found: Tensor = output if torch.is_tensor(output) else output[0]
        return found

    return timed(forward, [x, *layer.parameters()], slope, task["steps"])


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    from peers.cudnn_attention import attention

    output: Tensor = attention(query, key, value, scaling)[0]
    return output


def _cudnn_of_layer(
    module: object, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: object
) -> tuple[Tensor, None]:
    return _cudnn(query, key, value, scaling).transpose(1, 2).contiguous(), None


class Worker:
    """A process that compiles a kernel, and measures it when it is told to."""

    def __init__(self, **task: Any) -> None:  # noqa: ANN401 - whatever `work` takes
        """Start it."""
        self.task = task
        command = [sys.executable, __file__, "--work", json.dumps(task)]
        # Compilers of their own would be sixteen for each of these processes.
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ready(self, until: float) -> None:
        """Wait until it has compiled, or is given up."""
        while self._process.poll() is None and not self._line_waits() and time.monotonic() < until:
            time.sleep(0.1)
        if self._process.poll() is None and not self._line_waits():
            self._process.kill()

    def measured(self) -> list[dict[str, Any]]:
        """Let it measure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is not None:
            return [self.task | {"error": f"ended with {self._process.returncode}, or was given up"}]
        self._line_of("ready")
        self._process.stdin.write("measure\n")
        self._process.stdin.flush()
        answer = self._line_of("[")
        found: list[dict[str, Any]] = json.loads(answer) if answer else [self.task | {"error": "ended"}]
        self._process.stdin.close()
        self._process.wait()
        return found

    def _line_of(self, start: str) -> str:
        """The next line that starts so, past what libraries print; empty if the process ends before."""
        assert self._process.stdout is not None
        return next((line for line in self._process.stdout if line.startswith(start)), "")

    def _line_waits(self) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])


def work(task: dict[str, Any]) -> None:
    """Do what a worker does: compile for each length, wait for a line, measure, and print what was found."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    prepare = in_layer if task["in_layer"] else alone
    runs: list[tuple[dict[str, Any], Run | str]] = []
    for tokens in task["lengths"]:
        rows = max(1, task["tokens"] // tokens)
        row = {"kernel": task["kernel"], "in_layer": task["in_layer"], "tokens": tokens, "rows": rows}
        # A pair of options is tried whole, then each half: the other may be what does not fit.
        for position, options in enumerate(task["options"]):
            began = time.monotonic()
            try:
                run: Run | str = prepare(task["kernel"], options, tokens, rows, task)
            except Exception as error:  # noqa: BLE001 - compilers raise whatever they like
                run = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error) else ''}"
            runs.append((row | {"options": options, "compile_s": time.monotonic() - began}, run))
            if position == 0 and not isinstance(run, str):
                break

    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for row, run in runs:
        if isinstance(run, str):
            found.append(row | {"error": run})
            continue
        forward, backward, same, bits = run()
        found.append(row | {"forward_s": forward, "backward_s": backward, "same_bits_twice": same, "bits": bits})
    print(json.dumps(found), flush=True)


def gathered(workers: list[Worker], flops: Callable[[int, int], float]) -> Iterator[dict[str, Any]]:
    """Let workers measure one after the other; yields what they found, with FLOPs a second of attention alone."""
    until = time.monotonic() + COMPILING_MAX
    for worker in workers:
        worker.ready(until)
    for worker in workers:
        for row in worker.measured():
            if "forward_s" in row and not row["in_layer"]:
                each = flops(row["rows"], row["tokens"])
                row |= {"forward_tflops": each / row["forward_s"] / 1e12}
                row |= {"backward_tflops": 2.5 * each / row["backward_s"] / 1e12}
            print(json.dumps(row), flush=True)
            yield row


def best_options(rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The options of the fastest forward and those of the fastest backward of flex attention, at one length."""
    known = [row for row in rows if row.get("tokens") == tokens and row["kernel"] == "flex_attention"]
    known = [row for row in known if "forward_s" in row]
    if not known:
        return {}
    forward = min(known, key=lambda row: float(row["forward_s"]))["options"]
    backward = min(known, key=lambda row: float(row["backward_s"]))["options"]
    free = {name: value for options in (forward, backward) for name, value in options.items() if name in FREE}
    chosen = {name: value for name, value in forward.items() if name.startswith("fwd_")}
    return free | chosen | {name: value for name, value in backward.items() if name.startswith("bwd_")}


def main() -> None:
    """Measure all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-size", type=int, choices=LAYERS, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a group, in as many rows as that makes")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries and of keys, without a layer")
    parser.add_argument("--pairs", type=int, nargs="+", default=list(range(len(PAIRS))), help="which options to try")
    parser.add_argument("--kernels", nargs="*", help="besides flex attention; default: sdpa, and cudnn if it is there")
    parser.add_argument("--no-layers", action="store_true", help="measure attention alone")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, help="default: bench/results/<machine>/attention_<head size>.json")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return

    began = time.monotonic()
    common = {name: getattr(options, name) for name in ("head_size", "heads", "tokens", "steps")}
    start = functools.partial(Worker, **common)
    there = ["sdpa", *(["cudnn"] if importlib.util.find_spec("cudnn") else [])]
    kernels = there if options.kernels is None else options.kernels
    flops = lambda rows, tokens: 2 * rows * options.heads[0] * tokens**2 * options.head_size  # noqa: E731

    halves = [[a | b, *([b, a] if a and b else [])] for a, b in (PAIRS[index] for index in options.pairs)]
    tasks = [("flex_attention", choices) for choices in halves] + [(kernel, [{}]) for kernel in kernels]
    workers = [start(kernel=k, options=o, in_layer=False, lengths=options.lengths) for k, o in tasks]
    rows = list(gathered(workers, flops))

    best = {tokens: best_options(rows, tokens) for tokens in options.lengths}
    print(json.dumps({"best": best, "seconds": time.monotonic() - began}), flush=True)
    layers = [
        start(kernel=kernel, options=[chosen], in_layer=True, lengths=[tokens])
        for tokens in options.lengths
        for kernel in ("flex_attention", *kernels)
        for chosen in ([PLAIN, best[tokens]] if kernel == "flex_attention" else [{}])
        if not options.no_layers
    ]
    rows += gathered(layers, flops)

    settings = {key: value for key, value in vars(options).items() if key not in ("output", "work")}
    known = facts()
    path = options.output or folder_of(known["machine"]) / f"attention_{options.head_size}.json"
    write_row(known | {"settings": settings, "seconds": time.monotonic() - began, "rows": rows}, path)
    print(path)


if __name__ == "__main__":
    main()
