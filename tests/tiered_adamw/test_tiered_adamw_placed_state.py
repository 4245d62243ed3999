"""The state of TieredAdamW: the same bits wherever it lies, whole or refused after an interrupt."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from crossed import crossed, some
from interrupts import interrupted
from small_optimizers import (
    ALL,
    SOME,
    STEPS,
    TINY,
    Make,
    dtypes,
    give_gradients,
    optimizers,
    parameters_of,
    same,
    take_steps,
)
from torch import nn

from megatier.errors import NonFiniteError, OptimizerError
from megatier.optim.masters import join_master
from megatier.tier import Tier
from megatier.tiered_adamw import chunk_store
from megatier.tiered_adamw.chunks import CHUNK_ELEMENTS_MIN


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with optimizers(tmp_path) as make:
        yield make


@pytest.fixture(params=[Tier.RAM, Tier.GPU], ids=["on_cpu", "through_gpu_slots"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks are updated; an arena in RAM stands for the GPU."""
    monkeypatch.setattr(chunk_store, "_update_tier", lambda device: request.param)


@dtypes
@pytest.mark.usefixtures("tier")
def test_placement_changes_no_bit(make: Make, dtype: torch.dtype) -> None:
    found, in_ram = [], []
    for ram in (TINY, SOME, ALL):
        parameters = parameters_of(dtype)
        optimizer = make(parameters, lr=1e-2, ram=ram)
        take_steps(optimizer, parameters, range(STEPS))
        assert optimizer._placed is not None
        homes = [chunk.home for chunk in optimizer._placed.store.chunks]
        in_ram.append(homes.count(Tier.RAM) / len(homes))
        found.append((parameters, optimizer.state_dict()))
    assert in_ram[0] < 0.1 < in_ram[1] < 0.9 < in_ram[2] == 1
    assert same(found[0], found[2])
    assert same(found[1], found[2])


@dtypes
@pytest.mark.usefixtures("tier")
def test_moments_in_bf16_have_the_same_bits_wherever_they_lie_and_after_a_load(make: Make, dtype: torch.dtype) -> None:
    found = []
    for ram, seed in ((ALL, 0), (TINY, 0), (TINY, 1)):
        parameters = parameters_of(dtype)
        optimizer = make(parameters, lr=1e-2, ram=ram, moments="bf16", seed=seed)
        take_steps(optimizer, parameters, range(2))
        state = optimizer.state_dict()
        optimizer = make(parameters, lr=1e-2, ram=ALL, moments="bf16", seed=seed)
        optimizer.load_state_dict(state)
        take_steps(optimizer, parameters, range(2, STEPS))
        found.append((parameters, optimizer.state_dict()))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])

    widths = {kind: plane.dtype.itemsize for kind, plane in found[0][1]["state"][0].items() if kind != "step"}
    assert widths == {"exp_avg": 2, "exp_avg_sq": 2} | ({"remainder": 2} if dtype is torch.bfloat16 else {})
    wide = parameters_of(dtype)
    take_steps(make(wide, lr=1e-2, ram=ALL), wide, range(STEPS))
    pairs = zip(found[0][0], wide, strict=True)
    changes = [float((ours - theirs).detach().float().abs().max()) for ours, theirs in pairs if ours.numel()]
    assert 0 < max(changes) < 1e-2


def test_bf16_parameters_have_an_exact_fp32_master(make: Make) -> None:
    rounded, masters = parameters_of(torch.bfloat16), parameters_of()
    for master, parameter in zip(masters, rounded, strict=True):
        master.data.copy_(parameter.detach())
    ours, whole = make(rounded, ram=TINY), make(masters, ram=TINY)
    for step in range(STEPS):
        give_gradients(rounded, step)
        for master, parameter in zip(masters, rounded, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        ours.step()
        whole.step()
    for index, entry in ours.state_dict()["state"].items():
        joined = torch.empty(rounded[index].numel())
        join_master(rounded[index].detach().reshape(-1), entry["remainder"].reshape(-1), joined)
        assert torch.equal(joined, masters[index].detach().reshape(-1))


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("num_due", range(1, 8))
def test_few_chunks_that_are_due_have_the_bits_of_ram(make: Make, num_due: int) -> None:
    found = []
    for ram in (TINY, ALL):
        weights = [nn.Parameter(torch.full((CHUNK_ELEMENTS_MIN,), float(number))) for number in range(8)]
        optimizer = make(weights, ram=ram)
        take_steps(optimizer, weights[:num_due], range(STEPS))
        found.append((weights, optimizer.state_dict()))
    assert same(*found)


def test_parameter_in_another_memory_order_is_updated_alike(make: Make) -> None:
    plain = nn.Parameter(torch.randn(8, 6, 5, 5))
    last = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    one, two = make([plain], ram=ALL), make([last], ram=TINY)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        plain.grad = torch.randn(plain.shape, generator=draw)
        last.grad = plain.grad.clone()
        one.step()
        two.step()
    assert torch.equal(plain, last)
    moment = two.state_dict()["state"][0]["exp_avg"]
    assert moment.stride() == last.stride()
    assert torch.equal(moment, one.state_dict()["state"][0]["exp_avg"])
    one.load_state_dict(two.state_dict())
    assert same(one.state_dict()["state"][0]["exp_avg"].contiguous(), moment.contiguous())


def test_parameter_without_gradient_stays_and_its_step_does_not_count(make: Make) -> None:
    parameters = parameters_of()
    before = parameters[1].detach().clone()
    optimizer = make(parameters, ram=TINY)
    for step in range(3):
        give_gradients(parameters, step)
        if step != 1:
            parameters[1].grad = None
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert (int(state[0]["step"]), int(state[1]["step"])) == (3, 1)
    assert not torch.equal(parameters[1], before)


def test_frozen_parameters_take_no_room(make: Make) -> None:
    frozen = nn.Parameter(torch.zeros(10_000_000), requires_grad=False)
    parameters = [frozen, *parameters_of()]
    optimizer = make(parameters, ram=ALL)
    take_steps(optimizer, parameters[1:], range(1))
    assert sorted(optimizer.state_dict()["state"]) == list(range(1, len(parameters)))


@dtypes
@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(("before", "after"), some([(TINY, ALL), (ALL, TINY), (SOME, SOME)], by=2))
def test_saved_state_goes_on_bit_by_bit_on_other_tiers(
    make: Make, tmp_path: Path, dtype: torch.dtype, before: str, after: str
) -> None:
    expected = parameters_of(dtype)
    whole = make(expected, ram=SOME)
    take_steps(whole, expected, range(2 * STEPS))

    parameters = parameters_of(dtype)
    first = make(parameters, ram=before)
    take_steps(first, parameters, range(STEPS))
    first.save_state(tmp_path / "state.pt")
    first.close()

    second = make(parameters, lr=123.0, ram=after)
    take_steps(second, parameters_of(dtype), range(1))  # what is there is replaced
    second.load_state_dict(torch.load(tmp_path / "state.pt", mmap=True))
    take_steps(second, parameters, range(STEPS, 2 * STEPS))
    assert same(parameters, expected)
    assert same(second.state_dict(), whole.state_dict())


INTERRUPTED = ("tiered_adamw/torch_optimizer", "tiered_adamw/placed_state", "tiered_adamw/chunk_store", "store")


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(("ram", "work"), crossed([TINY, ALL], ["step", "state_dict", "load"], by=2))
def test_interrupt_anywhere_leaves_whole_state_or_says_so_until_it_is_loaded(make: Make, work: str, ram: str) -> None:
    parameters, expected = parameters_of(torch.bfloat16), parameters_of(torch.bfloat16)
    optimizer, other = make(parameters, ram=ram), make(expected, ram=ALL)
    after = {}
    for step in range(3):
        take_steps(other, expected, [step])
        after[step] = copy.deepcopy(expected), other.state_dict()

    def load() -> None:
        optimizer.load_state_dict(after[0][1])
        with torch.no_grad():
            for parameter, saved in zip(parameters, after[0][0], strict=True):
                parameter.copy_(saved)

    works = {"step": lambda: take_steps(optimizer, parameters, [1]), "state_dict": optimizer.state_dict, "load": load}
    load()
    with interrupted(INTERRUPTED) as lines:
        works[work]()
    for at in range(0, lines.count, max(1, lines.count // 20)):
        load()
        with contextlib.suppress(KeyboardInterrupt), interrupted(INTERRUPTED, at):
            works[work]()
        try:
            found = optimizer.state_dict()
        except OptimizerError as error:
            assert "interrupted, half way" in str(error)
        else:
            assert any(same(found["state"], state["state"]) for _, state in after.values()), at
        load()
        take_steps(optimizer, parameters, [1, 2])
        assert same(parameters, after[2][0])
        assert same(optimizer.state_dict(), after[2][1])


def test_gradient_that_is_not_finite_changes_nothing(make: Make) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = make([("first", parameters[0]), ("second", parameters[1])], ram=TINY)
    take_steps(optimizer, parameters[:2], range(1))
    before = [parameter.detach().clone() for parameter in parameters], optimizer.state_dict()
    for bad in (torch.nan, torch.inf):
        give_gradients(parameters[:2], 1)
        assert parameters[1].grad is not None
        parameters[1].grad[3] = bad
        with pytest.raises(NonFiniteError, match="gradient of second is not finite"):
            optimizer.step()
    assert same((parameters, optimizer.state_dict()), before)
    take_steps(optimizer, parameters[:2], range(1))


def test_sparse_gradient_is_refused(make: Make) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = make(embedding.parameters(), ram=TINY)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="sparse=False"):
        optimizer.step()


def thaw(parameters: list[nn.Parameter]) -> None:
    parameters[-1].requires_grad = True


def convert(parameters: list[nn.Parameter]) -> None:
    parameters[0].data = parameters[0].data.bfloat16()


def reshape(parameters: list[nn.Parameter]) -> None:
    parameters[0].data = torch.zeros(2)


@pytest.mark.parametrize("change", [thaw, convert, reshape])
def test_parameter_that_changed_after_the_first_step_is_refused(
    make: Make, change: Callable[[list[nn.Parameter]], None]
) -> None:
    parameters = parameters_of()
    parameters[-1].requires_grad = False
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters[:-1], range(1))
    change(parameters)
    give_gradients(parameters, 1)
    with pytest.raises(OptimizerError, match="was changed after its state was placed"):
        optimizer.step()


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_gpu_has_the_bits_of_the_cpu(make: Make, dtype: torch.dtype, moments: str) -> None:
    found = []
    for device, ram in (("cpu", ALL), ("cuda", ALL), ("cuda", SOME), ("cuda", TINY)):
        parameters = [nn.Parameter(parameter.detach().to(device)) for parameter in parameters_of(dtype)]
        optimizer = make(parameters, lr=1e-2, ram=ram, moments=moments)
        for step in range(STEPS):
            give_gradients(copies := parameters_of(dtype), step)
            for parameter, copied in zip(parameters, copies, strict=True):
                assert copied.grad is not None
                parameter.grad = copied.grad.to(device)
            optimizer.step()
        found.append(([parameter.detach().cpu() for parameter in parameters], optimizer.state_dict()))
    assert all(same(each, found[0]) for each in found)
