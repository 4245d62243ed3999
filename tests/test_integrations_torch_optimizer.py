"""TieredAdamW: the same bits wherever its state lies, torch's numbers, torch's manners, and typed refusals."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted
from torch import Tensor, nn

import megatier
from megatier.errors import CapacityError, ConfigError, NonFiniteError, OptimizerError, PlanError, TransferError
from megatier.integrations import placed_state, torch_optimizer
from megatier.integrations.chunks import CHUNK_ELEMENTS_MIN
from megatier.integrations.torch_optimizer import TieredAdamW
from megatier.numerics.optimizer import join_master
from megatier.tier import Tier

Make = Callable[..., TieredAdamW]
TINY, SOME, ALL = "100KiB", "250KiB", "64MiB"
"""RAM for little more than slots, for a part of the state, for all of it."""
SHAPES = ((130, 257), (257,), (), (0, 4), (33, 70, 3))
STEPS = 4
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
placements = pytest.mark.parametrize("ram", [TINY, SOME, ALL])


@pytest.fixture(params=[Tier.RAM, Tier.GPU], ids=["on_cpu", "through_gpu_slots"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks are updated; an arena in RAM stands for the GPU."""
    monkeypatch.setattr(placed_state, "_update_tier", lambda device: request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterable[Make]:
    """Makes optimizers, closes them, and sees that nothing of them is left."""
    made = []

    def optimizer(parameters: Any, **settings: Any) -> TieredAdamW:
        settings.setdefault("nvme", [f"{tmp_path}:8MiB"])
        made.append(TieredAdamW(parameters, **settings))
        return made[-1]

    yield optimizer
    for each in made:
        each.close()
    assert not list(tmp_path.glob("megatier-*"))


def parameters_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: Iterable[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def same(first: Any, second: Any) -> bool:
    """The same structure and the same bits."""
    if isinstance(first, Tensor):
        return first.dtype is second.dtype and torch.equal(first.detach(), second.detach())
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def close(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------------- numbers


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


@placements
def test_numbers_in_fp32_are_torchs_to_a_tolerance(make: Make, ram: str) -> None:
    ours, theirs = parameters_of(), parameters_of()
    optimizer = make(ours, lr=1e-2, weight_decay=0.1, ram=ram)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    take_steps(optimizer, ours, range(20))
    take_steps(reference, theirs, range(20))
    assert close(ours, theirs)
    state, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for index, entry in expected.items():
        assert state[index].keys() == entry.keys()
        assert close(state[index].values(), entry.values())


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


# ---------------------------------------------------------------------- torch's manners


def test_groups_schedulers_and_decay_are_those_of_torch(make: Make) -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        rest: dict[str, Any] = {"params": parameters[1:], "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}
        return [{"params": parameters[:1], "weight_decay": 0.3}, rest]

    ours, theirs = parameters_of(), parameters_of()
    optimizer, reference = make(groups(ours), ram=TINY), torch.optim.AdamW(groups(theirs))
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(each, [1e-2, 3e-2], total_steps=10, base_momentum=0.7)
        for each in (optimizer, reference)
    ]
    for step in range(8):
        take_steps(optimizer, ours, [step])
        take_steps(reference, theirs, [step])
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert close(ours, theirs)


def test_group_is_added_before_the_first_step_alone(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters[:2], ram=TINY)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.0, "weight_decay": 0.0})
    before = parameters[4].detach().clone()
    take_steps(optimizer, parameters, range(1))
    assert torch.equal(parameters[4], before)
    with pytest.raises(OptimizerError, match="add groups before it"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_closure_gives_the_loss(make: Make) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], ram=TINY)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    assert optimizer.step(closure) < 3.0


def test_backward_through_a_changed_parameter_is_refused_by_autograd(make: Make) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], ram=TINY)
    loss = (weight**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_model_converted_after_the_optimizer_was_made_is_trained(make: Make) -> None:
    model = nn.Linear(40, 30)
    optimizer = make(model.parameters(), ram=TINY)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does; nothing is placed by it
    model.bfloat16()
    model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert "remainder" in optimizer.state_dict()["state"][0]


# ---------------------------------------------------------------------- saving and loading


@dtypes
@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(("before", "after"), [(TINY, ALL), (ALL, TINY), (SOME, SOME)])
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


INTERRUPTED = ("integrations/torch_optimizer", "integrations/placed_state", "integrations/chunk_store", "store")


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("ram", [TINY, ALL])
@pytest.mark.parametrize("work", ["step", "state_dict", "load"])
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


STREAMED = """
import re, resource, sys, torch
from megatier import TieredAdamW


def limit_memory(more):
    used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (more << 20), resource.RLIM_INFINITY))


path = sys.argv[1] + "/state.pt"
weight = torch.nn.Parameter(torch.zeros(10_000_000))
weight.grad = torch.ones(10_000_000)
with TieredAdamW([weight], ram="2MiB", nvme=[sys.argv[1] + ":128MiB"]) as optimizer:
    optimizer.step()
    limit_memory(30)
    optimizer.save_state(path)
    limit_memory(200)  # a mapping counts
    saved = torch.load(path, mmap=True)
    limit_memory(30)
    optimizer.load_state_dict(saved)
    optimizer.step()
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        print("can't allocate memory" in str(error))
"""


def test_saving_and_loading_need_far_less_memory_than_the_state(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STREAMED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@placements
def test_file_is_what_torch_would_save(make: Make, tmp_path: Path, ram: str) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = make([("weight", parameters[0]), ("bias", parameters[1])], ram=ram)
    take_steps(optimizer, parameters[:2], range(STEPS))
    optimizer.save_state(tmp_path / "ours.pt")
    optimizer.save_state(tmp_path / "ours.pt")  # replaced
    torch.save(optimizer.state_dict(), tmp_path / "theirs.pt")
    for mmap in (True, False):
        assert same(torch.load(tmp_path / "ours.pt", mmap=mmap), torch.load(tmp_path / "theirs.pt"))
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_empty_state_forgets_what_was_there(make: Make) -> None:
    parameters, expected = parameters_of(), parameters_of()
    optimizer, fresh = make(parameters, ram=TINY), make(expected, ram=TINY)
    empty = optimizer.state_dict()
    take_steps(optimizer, parameters, range(1))
    optimizer.load_state_dict(empty)
    for parameter, other in zip(parameters, expected, strict=True):
        parameter.data.copy_(other.detach())
    take_steps(optimizer, parameters, range(STEPS))
    take_steps(fresh, expected, range(STEPS))
    assert same(parameters, expected)


def test_state_passes_to_and_from_torchs_adamw(make: Make) -> None:
    ours, theirs = parameters_of(), parameters_of()
    optimizer, reference = make(ours, ram=TINY), torch.optim.AdamW(theirs)
    take_steps(optimizer, ours, range(STEPS))
    take_steps(reference, theirs, range(STEPS))
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(state)
    take_steps(optimizer, ours, range(STEPS, 2 * STEPS))
    take_steps(reference, theirs, range(STEPS, 2 * STEPS))
    assert close(ours, theirs)


def test_scheduler_still_steers_after_a_load(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in parameters]
    take_steps(optimizer, parameters, range(1))
    assert same(parameters, before)


def test_state_before_the_first_step_is_empty(make: Make, tmp_path: Path) -> None:
    optimizer = make(parameters_of(), ram=TINY)
    assert optimizer.state_dict()["state"] == {}
    optimizer.save_state(tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_state_larger_than_ram_is_refused_in_favour_of_the_file(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    monkeypatch.setattr(torch_optimizer, "ram_available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match="save_state"):
        optimizer.state_dict()
    optimizer.save_state(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda state: state["state"][0].update(exp_avg=torch.zeros(3)), OptimizerError, "the same model"),
        (lambda state: state["state"][0].pop("step"), OptimizerError, "the same model"),
        (lambda state: state["state"].update({99: {"step": 1}}), OptimizerError, "parameter 99"),
        (lambda state: state["param_groups"][0].update(amsgrad=True), OptimizerError, "amsgrad"),
        (lambda state: state["param_groups"].append({}), ValueError, "number of parameter groups"),
    ],
)
def test_state_of_something_else_is_refused_and_changes_nothing(
    make: Make, harm: Callable[[Any], None], error: type[Exception], words: str
) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    before = optimizer.state_dict()
    harmed = copy.deepcopy(before)
    harm(harmed)
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(harmed)
    assert same(optimizer.state_dict(), before)


def test_file_that_cannot_be_written_is_one_error_and_the_old_one_stays(make: Make, tmp_path: Path) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    with pytest.raises(TransferError, match="No such file"):
        optimizer.save_state(tmp_path / "missing" / "state.pt")


# ---------------------------------------------------------------------- refusals


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


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
        (torch.zeros(4, dtype=torch.float16), "float16"),
        (torch.zeros(4, 4)[:, :2], "gaps"),
        (torch.zeros(4, device="meta"), "lie on .*meta"),
    ],
)
def test_parameter_that_cannot_be_taken_is_refused_at_once(make: Make, parameter: Tensor, words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        make([nn.Parameter(parameter)], ram=TINY)
    optimizer = make(parameters_of(), ram=TINY)
    with pytest.raises(OptimizerError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1


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


@pytest.mark.parametrize(
    "settings",
    [{"lr": -1.0}, {"lr": torch.tensor(1e-3)}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}],
)
def test_setting_that_cannot_be_used_is_refused(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make(parameters_of(), ram=TINY, **settings)


def test_one_mount_may_be_a_string(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(100_000))
    with TieredAdamW([parameter], ram="512KiB", nvme=f"{tmp_path}:8MiB") as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert list(tmp_path.iterdir())


def test_budget_that_is_too_small_is_refused_before_a_step(make: Make, tmp_path: Path) -> None:
    large = [nn.Parameter(torch.zeros(1 << 20))]
    for ram, nvme, words in [
        (TINY, [], "Raise ram to at least 8.0 MiB, or name a drive"),
        ("8KiB", [f"{tmp_path}:16MiB"], "Raise ram to at least"),
        (TINY, [f"{tmp_path}:1MiB"], "Give nvme more space"),
    ]:
        with pytest.raises(PlanError, match=words):
            make(large, ram=ram, nvme=nvme)
    with pytest.raises(ConfigError, match="is not a directory"):
        make(large, ram=TINY, nvme=[str(tmp_path / "missing")])


# ---------------------------------------------------------------------- the end


def test_close_removes_files_and_threads_and_refuses_what_comes_after(make: Make, tmp_path: Path) -> None:
    parameters = parameters_of()
    names = {thread.name for thread in threading.enumerate()}
    with make(parameters, ram=TINY) as optimizer:
        take_steps(optimizer, parameters, range(1))
        assert list(tmp_path.glob("megatier-*/blocks"))
    assert not list(tmp_path.iterdir())
    assert {thread.name for thread in threading.enumerate()} == names
    optimizer.close()
    give_gradients(parameters, 1)
    with pytest.raises(OptimizerError, match="closed"):
        optimizer.step()
    with pytest.raises(OptimizerError, match="closed"):
        optimizer.save_state(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_optimizer_that_nobody_closed_removes_its_files_when_it_goes(tmp_path: Path) -> None:
    parameters = parameters_of()
    optimizer = TieredAdamW(parameters, ram=TINY, nvme=[f"{tmp_path}:8MiB"])
    take_steps(optimizer, parameters, range(1))
    del optimizer
    gc.collect()
    assert not list(tmp_path.iterdir())


FORGOTTEN = """
import os, sys, torch
from megatier import TieredAdamW
weight = torch.nn.Parameter(torch.zeros(100_000))
optimizer = TieredAdamW([weight], ram="100KiB", nvme=[f"{sys.argv[1]}:8MiB"])
weight.grad = torch.ones(100_000)
optimizer.step()
if os.fork() == 0:
    optimizer.close()  # a child leaves its parent's files alone
    os._exit(0)
os.wait()
optimizer.step()
print(len(os.listdir(sys.argv[1])))
"""


def test_process_that_ends_without_close_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORGOTTEN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("1", "", 0)
    assert not list(tmp_path.iterdir())


def test_name_in_the_package_is_loaded_when_it_is_used() -> None:
    assert megatier.TieredAdamW is TieredAdamW


# ---------------------------------------------------------------------- faults

FAULTY = """
import json, os, sys, torch
from megatier import TieredAdamW
from megatier.errors import OptimizerError, TransferError

drive, op, code = sys.argv[1:]
weight = torch.nn.Parameter(torch.zeros(200_000))
found = []
with TieredAdamW([weight], ram="100KiB", nvme=[f"{drive}:8MiB"]) as optimizer:
    def step():
        weight.grad = torch.full((200_000,), 0.5)
        optimizer.step()
    step()
    optimizer.save_state(os.path.join(drive, "state.pt"))
    kept = weight.detach().clone()
    os.environ.update(FAULT_OP=op, FAULT_KIND=code, FAULT_PATH="/blocks")
    for attempt in (step, step, lambda: optimizer.save_state(os.path.join(drive, "no.pt"))):
        try:
            attempt()
        except (TransferError, OptimizerError) as error:
            found.append([type(error).__name__, getattr(error, "errno", None), str(error)])
    os.environ["FAULT_OP"] = ""
    optimizer.load_state_dict(torch.load(os.path.join(drive, "state.pt"), mmap=True))
    weight.data.copy_(kept)
    step()
    print(json.dumps([found, weight.detach()[::50_000].tolist()]))
"""


@pytest.mark.parametrize(("op", "code"), [("write", errno.ENOSPC), ("read", errno.EIO), ("read write", errno.ENODEV)])
def test_drive_that_fails_in_a_step_tears_the_state_until_it_is_loaded(
    tmp_path: Path, faulty: dict[str, str], op: str, code: int
) -> None:
    command = [sys.executable, "-c", FAULTY, str(tmp_path), op, str(code)]
    done = subprocess.run(command, env=faulty, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, weights = json.loads(done.stdout)
    assert [name for name, _, _ in found] == ["TransferError", "OptimizerError", "OptimizerError"]
    assert found[0][1] == code
    assert "half way" in found[1][2]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]

    weight = nn.Parameter(torch.zeros(200_000))
    expected = TieredAdamW([weight], ram=ALL)
    for _ in range(2):
        weight.grad = torch.full((200_000,), 0.5)
        expected.step()
    assert weights == weight.detach()[::50_000].tolist()
    expected.close()


FULL = """
import resource, sys, torch
from megatier import TieredAdamW
from megatier.errors import TransferError
weight = torch.nn.Parameter(torch.zeros(200_000))
with TieredAdamW([weight], ram="64MiB") as optimizer:
    weight.grad = torch.ones(200_000)
    optimizer.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        optimizer.save_state(sys.argv[1] + "/state.pt")
    except TransferError as error:
        print(error)
"""


@pytest.mark.parametrize("limit", [100, 500_000])
def test_state_file_that_finds_no_room_is_one_error_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("writing optimizer state failed in ")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@dtypes
def test_gpu_has_the_bits_of_the_cpu(make: Make, dtype: torch.dtype) -> None:
    found = []
    for device, ram in (("cpu", ALL), ("cuda", ALL), ("cuda", SOME), ("cuda", TINY)):
        parameters = [nn.Parameter(parameter.detach().to(device)) for parameter in parameters_of(dtype)]
        optimizer = make(parameters, lr=1e-2, ram=ram)
        for step in range(STEPS):
            give_gradients(copies := parameters_of(dtype), step)
            for parameter, copied in zip(parameters, copies, strict=True):
                assert copied.grad is not None
                parameter.grad = copied.grad.to(device)
            optimizer.step()
        found.append(([parameter.detach().cpu() for parameter in parameters], optimizer.state_dict()))
    assert all(same(each, found[0]) for each in found)
