from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatier.engine.gradient import Gradients
from megatier.layout import Layout
from megatier.tiered_adamw.parameters import schema_of

LAYOUT = Layout.of([("a", (3, 5)), ("b", (130,)), ("c", (2,))])
"""Padding lies behind a and b, and behind the last tensor."""


class Tray:
    """A buffer that starts out poisoned (`collector` sizes it), and notes of what was shipped and measured."""

    def __init__(self, *, sums: bool = False) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.sums, self.taken = sums, 0
        self.shipped: list[Tensor] = []
        self.groups: list[int] = []
        self.measured: list[Tensor] = []

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        self.taken += 1
        if not self.sums:
            self.buffer.fill_(0xFF)
        return self.buffer

    def submit_grad(self, unit: str, *, group: int) -> None:
        self.shipped.append(self.buffer.clone())
        self.groups.append(group)

    def sums_in_buffer(self, unit: str) -> bool:
        return self.sums

    def measure(self, unit: str, grad: Tensor) -> None:
        self.measured.append(grad[: LAYOUT.num_elements].clone())


def collector(tray: Tray, dtype: torch.dtype = torch.float32, *, groups: int = 1) -> Gradients:
    width = 4 if groups > 1 else dtype.itemsize
    tray.buffer = torch.full((LAYOUT.num_elements * width,), 0xFF, dtype=torch.uint8)
    gradients = Gradients({"unit": replace(LAYOUT, schema=schema_of(dtype))}, tray, tray, groups=groups)
    gradients.begin_group(0)
    return gradients


def parts(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator).to(dtype) for t in LAYOUT.tensors}


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """fp32 in the layout, padding 0."""
    result = torch.zeros(LAYOUT.num_elements)
    for tensor in LAYOUT.tensors:
        if tensor.name in tensors:
            result[tensor.start : tensor.stop] = tensors[tensor.name].reshape(-1).float()
    return result


def send(gradients: Gradients, *uses: list[dict[str, Tensor]]) -> None:
    """One group: per use, its slices."""
    for slices in uses:
        gradients.expect_use("unit", len(slices))
    for slices in uses:
        for piece in slices:
            gradients.add("unit", [(tensor.name, piece.get(tensor.name)) for tensor in LAYOUT.tensors])
        gradients.end_use("unit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_one_use_is_written_as_it_came_and_padding_is_zero(dtype: torch.dtype) -> None:
    tray = Tray()
    piece = parts(0, dtype)
    send(collector(tray, dtype), [piece])
    assert torch.equal(tray.measured[0], flat(piece).to(dtype))
    assert torch.equal(tray.shipped[0].view(dtype)[: LAYOUT.num_elements], flat(piece).to(dtype))
    assert tray.groups == [0]


@pytest.mark.parametrize("missing", ["a", "b", "c"])
@pytest.mark.parametrize("slices", [1, 2])
def test_gradients_parameter_without_gradient_counts_as_zero_in_its_own_place(missing: str, slices: int) -> None:
    tray = Tray()
    pieces = [{k: v for k, v in parts(i).items() if k != missing} for i in range(slices)]
    send(collector(tray), pieces)
    assert torch.equal(tray.measured[0], sum((flat(piece) for piece in pieces), torch.zeros(LAYOUT.num_elements)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_gradients_missing_in_one_slice_only_is_that_of_the_others(at: int) -> None:
    tray = Tray()
    pieces = [{"a": parts(i)["a"]} if i == at else parts(i) for i in range(3)]
    send(collector(tray), pieces)
    assert torch.equal(tray.measured[0], flat(pieces[0]) + flat(pieces[1]) + flat(pieces[2]))


@pytest.mark.parametrize("first", [["a"], ["b", "c"]])
def test_gradients_parameters_that_a_use_does_not_name_are_left_to_the_others(first: list[str]) -> None:
    """A layer in parts is used several times, by another module each."""
    tray = Tray()
    gradients = collector(tray)
    piece = parts(0)
    uses = [{k: v for k, v in piece.items() if (k in first) is which} for which in (True, False)]
    for _ in uses:
        gradients.expect_use("unit", 1)
    for use in uses:
        gradients.add("unit", list(use.items()))
        gradients.end_use("unit")
    assert torch.equal(tray.measured[0], flat(piece))


def test_gradients_slices_are_summed_in_fp32_and_rounded_once() -> None:
    tray = Tray()
    pieces = [parts(i, torch.bfloat16) for i in range(8)]
    send(collector(tray, torch.bfloat16), pieces)
    exact = flat(pieces[0])
    for piece in pieces[1:]:
        exact += flat(piece)
    assert torch.equal(tray.measured[0], exact.bfloat16())
    rounded = pieces[0]["b"].clone()
    for piece in pieces[1:]:
        rounded += piece["b"]
    assert not torch.equal(rounded, exact.bfloat16()[LAYOUT.tensors[1].start : LAYOUT.tensors[1].stop])


def test_gradients_two_uses_of_a_tied_unit_are_one_gradient_summed_in_order() -> None:
    tray = Tray()
    head, embedding = parts(0, torch.bfloat16), parts(1, torch.bfloat16)
    send(collector(tray, torch.bfloat16), [head], [embedding])
    assert tray.taken == len(tray.shipped) == 1
    assert torch.equal(tray.measured[0], (flat(head) + flat(embedding)).bfloat16())


def test_gradients_fp32_part_of_a_bf16_unit_is_not_rounded_before_the_sum() -> None:
    """The fused loss hands the head's gradient over in fp32; a tied embedding adds its own."""
    tray = Tray()
    head, embedding = parts(0), parts(1, torch.bfloat16)
    send(collector(tray, torch.bfloat16), [head], [embedding])
    assert torch.equal(tray.measured[0], (flat(head) + flat(embedding)).bfloat16())


def test_gradients_unit_is_shipped_only_after_its_last_use() -> None:
    tray = Tray()
    gradients = collector(tray)
    gradients.expect_use("unit", 1)
    gradients.expect_use("unit", 1)
    gradients.add("unit", list(parts(0).items()))
    gradients.end_use("unit")
    assert tray.shipped == []
    gradients.add("unit", list(parts(1).items()))
    gradients.end_use("unit")
    assert len(tray.shipped) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_several_groups_elsewhere_are_shipped_in_fp32_unmeasured(dtype: torch.dtype) -> None:
    tray = Tray()
    gradients = collector(tray, dtype, groups=2)
    pieces = [parts(i, dtype) for i in range(2)]
    for group, piece in enumerate(pieces):
        gradients.begin_group(group)
        send(gradients, [piece])
    assert tray.groups == [0, 1]
    for shipped, piece in zip(tray.shipped, pieces, strict=True):
        assert torch.equal(shipped.view(torch.float32)[: LAYOUT.num_elements], flat(piece))
    assert tray.measured == []  # whoever adds them up measures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_several_groups_at_home_are_summed_there_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    tray = Tray(sums=True)
    gradients = collector(tray, dtype, groups=3)
    pieces = [[parts(10 * group + i, dtype) for i in range(2)] for group in range(3)]
    for group, slices in enumerate(pieces):
        gradients.begin_group(group)
        send(gradients, slices)
    totals = [flat(first) + flat(second) for first, second in pieces]
    expected = (totals[0] + totals[1] + totals[2]).to(dtype)
    assert len(tray.measured) == 1
    assert torch.equal(tray.measured[0], expected)
    assert torch.equal(tray.buffer.view(dtype)[: LAYOUT.num_elements], expected)


def test_gradients_new_group_forgets_what_an_abandoned_one_left() -> None:
    tray = Tray()
    gradients = collector(tray)
    gradients.expect_use("unit", 2)
    gradients.add("unit", list(parts(0).items()))
    gradients.begin_group(0)
    send(gradients, [parts(1), parts(2)])
    assert torch.equal(tray.measured[0], flat(parts(1)) + flat(parts(2)))


def test_gradients_use_without_a_backward_is_forgotten_when_the_backward_is_over() -> None:
    tray = Tray()
    gradients = collector(tray)
    gradients.expect_use("unit", 1)
    before = gradients.is_open
    gradients.end_group()
    assert (before, gradients.is_open) == (True, False)
    assert tray.shipped == tray.measured == []


def test_gradients_of_the_other_use_go_out_when_one_has_no_backward() -> None:
    tray = Tray()
    gradients = collector(tray)
    gradients.expect_use("unit", 1)
    gradients.expect_use("unit", 1)
    gradients.add("unit", list(parts(0).items()))
    gradients.end_use("unit")
    assert tray.shipped == []
    gradients.end_group()
    assert torch.equal(tray.measured[0], flat(parts(0)))
    assert len(tray.shipped) == 1


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradients_of_groups_that_left_the_unit_out_are_zero(used: int, sums: bool) -> None:
    tray = Tray(sums=sums)
    gradients = collector(tray, groups=3)
    for group in range(3):
        gradients.begin_group(group)
        if group == used:
            send(gradients, [parts(0)])
        gradients.end_group()
    assert tray.groups == [0, 1, 2]
    shipped = [buffer.view(torch.float32)[: LAYOUT.num_elements] for buffer in tray.shipped]
    if sums:
        assert torch.equal(shipped[-1], flat(parts(0)))
        assert torch.equal(tray.measured[0], flat(parts(0)))
    else:
        assert torch.equal(sum(shipped, torch.zeros(LAYOUT.num_elements)), flat(parts(0)))
        assert [bool(buffer.any()) for buffer in shipped] == [group == used for group in range(3)]


def test_gradients_unit_that_all_groups_left_out_has_none_and_the_next_step_begins_anew() -> None:
    tray = Tray()
    gradients = collector(tray, groups=2)
    for used in (False, True):
        for group in range(2):
            gradients.begin_group(group)
            if used:
                send(gradients, [parts(group)])
            gradients.end_group()
        assert tray.groups == [0, 1] * used


def test_gradients_group_ends_with_the_backward_that_it_watches() -> None:
    gradients = collector(Tray())
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            gradients.expect_use("unit", 1)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            gradients.watch_backward(gradients.forward)
            seen.append(gradients.is_open)
            return grad

    Watched.apply(Watched.apply(torch.ones((), requires_grad=True))).backward()  # type: ignore[no-untyped-call]
    assert seen == [True, True]
    assert not gradients.is_open


def test_parameter_without_a_gradient_in_a_later_step_is_warned_of_once() -> None:
    gradients = collector(Tray(sums=True), groups=2)

    def step(first: str, second: str) -> None:
        for group, names in enumerate((first, second)):
            gradients.begin_group(group)
            gradients.expect_use("unit", 1)
            gradients.add("unit", [(name, parts(1)[name]) for name in names])
            gradients.end_use("unit")

    # One group of a step is enough, and so is a parameter that never had one.
    step("a", "ac")
    step("ac", "a")
    with pytest.warns(UserWarning, match="c had no gradient in a step that used other parameters of its unit"):
        step("a", "ab")
    step("a", "a")
