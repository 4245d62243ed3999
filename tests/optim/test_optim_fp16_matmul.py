"""Products of fp16 matrices on the CPU are those of fp32, rounded once, however many share a call."""

from __future__ import annotations

import pytest
import torch

from megatier.optim.fp16_matmul import matmul, symmetric_matmul


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "three"])
def test_symmetric_product_is_rounded_once_and_symmetric_in_every_bit(stack: tuple[int, ...], columns: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*stack, 24, 40).half()
    given = x.mT.contiguous() if columns else x
    gram = symmetric_matmul(given, given, 0.5, columns=columns)
    assert torch.equal(gram, gram.mT)
    wanted = x.double() @ x.double().mT * 0.5
    torch.testing.assert_close(gram.double(), wanted, rtol=2**-11, atol=1e-5)

    other = symmetric_matmul(gram, gram, 0.01)
    found = symmetric_matmul(gram, gram, 0.25, added=[(-2.0, gram), (0.5, other)], diagonal=3.0)
    exact = gram.double()
    wanted = 0.25 * exact @ exact - 2 * exact + 0.5 * other.double() + 3 * torch.eye(24).double()
    torch.testing.assert_close(found.double(), wanted, rtol=2**-11, atol=1e-3)


def test_products_of_a_stack_have_the_bits_of_each_pair_alone() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 7, 30).half(), torch.randn(3, 30, 11).half()
    found = matmul(left, right, 2.0)
    gram = symmetric_matmul(left, left, 2.0)
    for index in range(3):
        assert torch.equal(found[index], matmul(left[index], right[index], 2.0))
        assert torch.equal(gram[index], symmetric_matmul(left[index], left[index], 2.0))
    torch.testing.assert_close(found.double(), left.double() @ right.double() * 2, rtol=2**-11, atol=1e-5)
