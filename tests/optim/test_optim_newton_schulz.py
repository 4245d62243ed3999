"""The iterations on the Gram matrix are nearer to exact ones than those of torch's Muon, for any singular values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from megatier.optim import newton_schulz
from megatier.optim.newton_schulz import COEFFICIENTS, EPS, NUM_ITERATIONS, SCALE, flops, orthogonal

SHAPES = [(96, 336), (336, 96), (128, 128), (16, 256), (1, 7), (5, 6)]
SPECTRA = ["even", "as 1 / i", "as 1 / i^2", "over 8 decades", "few", "one"]


def normalised(matrix: Tensor) -> Tensor:
    """fp16 of norm `SCALE`, as the update has it."""
    norm = torch.linalg.vector_norm(matrix).clamp(min=EPS)
    scaled: Tensor = matrix * (SCALE / norm)
    return scaled.half()


def in_fp64(matrix: Tensor) -> Tensor:
    """The iterations as they are written, in fp64."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / torch.linalg.vector_norm(matrix.double())
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x
    return found


def matrix_of(shape: tuple[int, int], spectrum: str) -> Tensor:
    """A random matrix with singular values of a kind."""
    short = min(shape)
    numbers = torch.arange(1, short + 1.0)
    values = {
        "as 1 / i": 1 / numbers,
        "as 1 / i^2": 1 / numbers**2,
        "over 8 decades": torch.logspace(0, -8, short),
        "few": torch.where(numbers <= 8, 1.0, 1e-4),
        "one": torch.where(numbers <= 1, 1.0, 0.0),
    }
    random = torch.randn(shape)
    if spectrum == "even":
        return random
    left, _, right = torch.linalg.svd(random, full_matrices=False)
    matrix: Tensor = (left * values[spectrum]) @ right
    return matrix


@pytest.fixture(params=[0, newton_schulz.SMALL_SIDE], ids=["on the Gram matrix", "plain"])
def _iterations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both iterations, for matrices of any size."""
    monkeypatch.setattr(newton_schulz, "SMALL_SIDE", request.param)


both_iterations = pytest.mark.usefixtures("_iterations")


@both_iterations
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iterations_are_nearer_to_exact_ones_than_those_of_torch(shape: tuple[int, int], spectrum: str) -> None:
    torch.manual_seed(0)
    matrix = matrix_of(shape, spectrum)
    wanted = in_fp64(matrix)
    theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, NUM_ITERATIONS, EPS)
    ours = orthogonal(normalised(matrix)).double() / SCALE
    for norm in (torch.linalg.matrix_norm, partial(torch.linalg.matrix_norm, ord=2)):
        assert norm(ours - wanted) < norm(theirs.double() - wanted)
    assert torch.linalg.matrix_norm(ours - wanted, 2) < 0.06


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)], ids=str)
def test_matrix_of_a_stack_has_the_same_bits_in_any_other_stack(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stack = torch.stack([normalised(torch.randn(shape)) for _ in range(4)])
    found = orthogonal(stack)
    assert all(torch.equal(one, orthogonal(given[None])[0]) for one, given in zip(found, stack, strict=True))
    assert torch.equal(orthogonal(stack[1:3]), found[1:3])


@both_iterations
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)], ids=str)
def test_rows_and_columns_of_zeros_stay_zeros(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.zeros(shape)
    matrix[:20, :17] = torch.randn(20, 17)
    found = orthogonal(normalised(matrix))
    assert not found[20:].any()
    assert not found[:, 17:].any()
    values = torch.linalg.svdvals(found[:20, :17].double() / SCALE)
    assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonal(torch.zeros(shape).half()).any()


@both_iterations
def test_one_large_element_overflows_nothing() -> None:
    matrix = torch.full((64, 80), 1e-9)
    matrix[3, 5] = 1e4
    found = orthogonal(normalised(matrix))
    assert found.isfinite().all()
    assert 0.6 < found[3, 5] / SCALE < 1.3


def test_flops_are_those_of_the_products_and_half_of_symmetric_ones() -> None:
    # Square: a Gram matrix, its square, and the product with the matrix, five times.
    assert flops((2048, 2048)) == 5 * (1 + 1 + 2) * 2048**3

    # Else twice: a Gram matrix, and a product with the matrix; between them 5 and 9 symmetric products.
    wide = 2 * (1 + 2) * 2048 * 2048 * 3000 + (5 + 9) * 2048**3
    assert flops((2048, 3000)) == flops((3000, 2048)) == wide
    assert flops((4, 20, 300)) == 4 * (2 * (1 + 2) * 20 * 20 * 300 + (5 + 9) * 20**3)

    # Small ones alone: whole products, in each iteration.
    assert flops((20, 300)) == 5 * (2 * 2 * 20 * 20 * 300 + 2 * 20**3)
