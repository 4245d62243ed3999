"""Measures Newton-Schulz on a GPU: torch's beside ours for each matrix of an 8B Llama, and tilings of its products.

For each shape: milliseconds and TFLOP/s of torch's `Muon` and of `newton_schulz.orthogonal`, and of our whole update
with momentum and master; how far both are from the same iterations in fp64 (the Frobenius norm of the difference over
that of the matrix, and its spectral norm), for a matrix of random numbers and one whose singular values fall as 1 / i;
and whether two runs, and a matrix in several stacks, have the same bits. Then the sum over all layers. TFLOP/s count
whole products on both sides, so more than the hardware has means that half of them was not computed.

For each product: milliseconds with the library and with each tiling of `matmul_kernels` (rows, columns and inner
elements of a tile, loads ahead, warps).

python bench/bench_muon.py [--shapes 4096x4096 ...] [--tilings 128,128,64,3,4 ...] [--no-products] [--output FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import facts, folder_of, write_row
from torch import Tensor
from torch.optim import _muon

from megatier.layout import Layout
from megatier.optim import matmul_kernels
from megatier.optim.adamw import Scalars
from megatier.optim.matmul_kernels import Tiling
from megatier.optim.muon import matrices_of, update_matrix
from megatier.optim.newton_schulz import COEFFICIENTS, EPS, NUM_ITERATIONS, SCALE, orthogonal
from megatier.state import MUON

LAYERS = 32
SHAPES = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}
"""Rows and columns of the matrices of a layer, and how many it has of each."""
PRODUCTS = ((4096, 14336), (4096, 4096), (1024, 4096))
"""Shorter and longer sides for which products are measured."""
TILINGS = ("128,128,64,3,4", "128,128,64,3,8", "128,128,64,4,8", "128,256,64,3,8")


def milliseconds(run: Callable[[], object], times: int = 5, at_once: int = 8) -> float:
    """Return the median time of a run on the GPU, of several at once, since the host takes its time to launch one."""
    found = []
    for number in range(times + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(at_once):
            run()
        end.record()
        end.synchronize()
        if number > 1:
            found.append(start.elapsed_time(end) / at_once)
    return float(median(found))


def by_torch(matrix: Tensor) -> Tensor:
    """Return what torch's Muon makes of a matrix."""
    found: Tensor = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, NUM_ITERATIONS, EPS)
    return found


def by_us(matrix: Tensor) -> Tensor:
    """Return what we make of matrices whose sides are multiples of those of tiles."""
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return orthogonal((matrix * (SCALE / norm)).half()) / SCALE


def update_of(rows: int, columns: int) -> Callable[[], None]:
    """Return our whole update of a matrix in bf16 with its remainder, as a run makes it."""
    made = Layout.of([("matrix", (rows, columns))])
    schema = MUON["bf16"]
    layout = Layout(made.tensors, made.num_elements, made.num_trained, schema)
    [matrix] = matrices_of(layout)
    planes = {
        kind: torch.zeros(layout.num_elements * schema.width(kind), dtype=torch.uint8, device="cuda")
        for kind in schema.kinds
    }
    grad = torch.randn(layout.num_elements, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
    scalars = Scalars(decay=0.999, step=1, learning_rate=1e-4, momentum=0.95, of_kernels=(0.0,) * 7 + (0.5,))
    return functools.partial(update_matrix, matrix, planes, grad, scalars, 0)


def in_fp64(matrix: Tensor) -> Tensor:
    """Return the same iterations in fp64."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = (matrix.mT if rows > columns else matrix).double()
    x = x / torch.linalg.vector_norm(x)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    orthogonal_rows: Tensor = x.mT if rows > columns else x
    return orthogonal_rows


def errors(found: Tensor, wanted: Tensor) -> list[float]:
    """Return how far a matrix is from another one: by the relative Frobenius norm, and by the spectral norm."""
    difference = found.double() - wanted
    vector = torch.ones(difference.shape[1], dtype=torch.float64, device=difference.device)
    length = vector.norm()
    for _ in range(30):
        vector = difference.mT @ (difference @ (vector / length))
        length = vector.norm()
    return [float(difference.norm() / wanted.norm()), float(length.sqrt())]


def matrices(rows: int, columns: int) -> dict[str, Tensor]:
    """Return matrices of one shape, with even and with steep singular values."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    random = functools.partial(torch.randn, device="cuda", generator=generator)
    short = min(rows, columns)
    sizes = 1 / torch.arange(1, short + 1, device="cuda")
    return {"even": random(rows, columns), "steep": (random(rows, short) * sizes) @ random(short, columns)}


def shape_row(rows: int, columns: int) -> dict[str, Any]:
    """Measure Newton-Schulz of one shape."""
    given = matrices(rows, columns)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"torch": by_torch, "ours": by_us}
    row: dict[str, Any] = {"shape": [rows, columns], "a_layer": SHAPES.get((rows, columns), 0)}
    for kind, matrix in given.items():
        wanted = in_fp64(matrix)
        row |= {f"{way}_{kind}_errors": errors(run(matrix), wanted) for way, run in ways.items()}

    even, steep = given.values()
    short, long = sorted((rows, columns))
    whole = NUM_ITERATIONS * (4 * short * short * long + 2 * short**3)
    for way, run in ways.items():
        taken = milliseconds(functools.partial(run, even))
        row |= {f"{way}_ms": taken, f"{way}_tflops": whole / taken / 1e9}

    row["update_ms"] = milliseconds(update_of(rows, columns))

    # Given as they are multiplied, since torch may take the norms of a stack in another order.
    first, second = ((matrix * (SCALE / matrix.norm())).half() for matrix in (even, steep))
    row["same_bits_twice"] = torch.equal(orthogonal(second), orthogonal(second))
    found = orthogonal(torch.stack([first, second]))[1]
    row["same_bits_in_stacks"] = torch.equal(found, orthogonal(torch.stack([second, first, first]))[0])
    row["same_bits_alone"] = torch.equal(found, orthogonal(second[None])[0])
    return row


Runs = dict[str, tuple[int, Callable[[], object], Callable[[Tiling], object]]]
"""The inner side of a product, and how the library and our kernel compute it."""


def runs_of(x: Tensor) -> Runs:
    """Return the products of Newton-Schulz for a wide matrix [M, N] in fp16, and for its transpose."""
    tall = x.mT.contiguous()
    part = x[:, : len(x)]
    square = part + part.mT
    scale = 1 / SCALE
    symmetric = matmul_kernels.launch_symmetric_matmul
    polynomial = functools.partial(symmetric, square, square, scale, added=[(0.1, square)], diagonal=1.0)
    general = matmul_kernels.launch_matmul
    rows, long = x.shape
    return {
        "X X^T": (long, lambda: x @ x.mT, lambda tiling: symmetric(x, x, scale, tiling=tiling)),
        "X^T X": (
            long,
            lambda: tall.mT @ tall,
            lambda tiling: symmetric(tall, tall, scale, columns=True, tiling=tiling),
        ),
        "P": (
            rows,
            lambda: torch.addmm(square, square, square, beta=0.1, alpha=scale),
            lambda tiling: polynomial(tiling=tiling),
        ),
        "Q X": (long, lambda: square @ x, lambda tiling: general(square, x, scale, tiling)),
        "X Q": (long, lambda: tall @ square, lambda tiling: general(tall, square, scale, tiling)),
    }


def product_rows(rows: int, long: int, tilings: list[Tiling]) -> Iterator[dict[str, Any]]:
    """Measure each product with the library and each tiling that fits."""
    runs = runs_of(torch.randn(rows, long, device="cuda", dtype=torch.float16))
    for name, (inner, by_library, by_kernel) in runs.items():
        whole = 2 * rows * rows * inner
        # Only whole products have tiles that are not square.
        fit = [tiling for tiling in tilings if "Q" in name or tiling.rows == tiling.columns]
        timed: dict[str, Callable[[], object]] = {"library": by_library}
        timed |= {str(_numbers(tiling)): functools.partial(by_kernel, tiling) for tiling in fit}

        row: dict[str, Any] = {"product": name, "rows": rows, "long": long, "ms": {}, "tflops": {}}
        for way, run in timed.items():
            try:
                taken = milliseconds(run)
            except Exception as error:  # noqa: BLE001 - compilers raise whatever they like
                row["ms"][way] = f"{type(error).__name__}: {str(error)[:120]}"
                continue
            row["ms"][way] = round(taken, 4)
            row["tflops"][way] = round(whole / taken / 1e9)
        yield row


def _numbers(tiling: Tiling) -> list[int]:
    return [tiling.rows, tiling.columns, tiling.inner, tiling.stages, tiling.warps]


def main() -> None:
    """Measure all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{rows}x{columns}" for rows, columns in SHAPES])
    parser.add_argument("--tilings", nargs="*", default=TILINGS)
    parser.add_argument("--no-products", action="store_true", help="measure Newton-Schulz alone")
    parser.add_argument("--output", type=Path, help="default: bench/results/<machine>/muon.json")
    options = parser.parse_args()

    began = time.monotonic()
    rows = []
    for shape in options.shapes:
        rows.append(shape_row(*map(int, shape.split("x"))))
        print(json.dumps(rows[-1]), flush=True)

    names = ("torch", "ours", "update")
    totals = {what: LAYERS / 1e3 * sum(row["a_layer"] * row[f"{what}_ms"] for row in rows) for what in names}
    print(json.dumps({"seconds_of_all_layers": totals, "taken_s": time.monotonic() - began}), flush=True)

    products = []
    if not options.no_products:
        tilings = [Tiling(*map(int, numbers.split(","))) for numbers in options.tilings]
        for rows_of, long in PRODUCTS:
            for row in product_rows(rows_of, long, tilings):
                products.append(row)
                print(json.dumps(row), flush=True)

    known = facts()
    path = options.output or folder_of(known["machine"]) / "muon.json"
    found = {"rows": rows, "seconds_of_all_layers": totals, "products": products}
    write_row(known | {"seconds": time.monotonic() - began} | found, path)
    print(path)


if __name__ == "__main__":
    main()
