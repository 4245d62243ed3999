"""What a user may have set for the whole process: other defaults of torch, and other switches, change no bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossed import crossed
from small_commands import command
from small_optimizers import SOME, give_gradients, optimizers, parameters_of, same
from tiny_models import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megatier
from megatier.cli import main
from megatier.defaults import usual_defaults
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier

Setting = Callable[[], AbstractContextManager[Any]]
TIERS = {"device": "cpu", "gpu": "4MiB", "ram": "16MiB", "update_threads": 1, "io_threads": 1}


@contextlib.contextmanager
def dtype_of(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, which must still be there at the end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def device_of(name: str) -> Iterator[None]:
    """Another default device, which must still be there at the end."""
    torch.set_default_device(name)
    try:
        yield
        assert torch.get_default_device().type == name
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Everything that may raise does."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*deterministic algorithms was")  # as a restore should say
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)


DEFAULTS: dict[str, Setting] = {
    "bf16": lambda: dtype_of(torch.bfloat16),
    "fp16": lambda: dtype_of(torch.float16),
    "fp64": lambda: dtype_of(torch.float64),
    "meta": lambda: device_of("meta"),
    "strict": strict,
}
AT_OPENING: dict[str, Setting] = {
    **DEFAULTS,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
"""A step needs gradients, but a model may be opened without."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=2), dtype=torch.float32)
    assert isinstance(made, PreTrainedModel)
    return made


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def ids(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 160, (2, 12), generator=draw, dtype=torch.int64, device="cpu")


def streamed_bits(
    source: Any, opening: Setting, between: Setting, steps: Setting, tmp_path: Path, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of two steps, each part under its setting."""
    batches = [ids(0), ids(1)]
    losses = []
    with ExitStack() as opened:
        with opening():
            streamed = opened.enter_context(megatier.stream(source, tiers=TIERS, lr=1e-2, clip=0.5, **options))
        with between():
            name, parameter = next(iter(streamed.model.named_parameters()))
            before = streamed.read(name)
            assert before.dtype is torch.float32
            assert before.shape == parameter.shape
        with steps():
            streamed.model.train()
            for batch in batches:
                loss = streamed.model(input_ids=batch, labels=batch).loss
                loss.backward()
                streamed.optimizer.step()
                streamed.optimizer.zero_grad()
                losses.append(loss.detach())
            streamed.save(tmp_path / "saved")
        with between():
            found = streamed.state_dict()
        with opening():
            streamed.restore(tmp_path / "saved")
        assert same(found, streamed.state_dict())
    return losses, found


CASES = ("ram-fp32", "folder-bf16", "lora")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, model: PreTrainedModel, folder: Path) -> tuple[Any, dict[str, Any]]:
    place, _, compute = request.param.partition("-")
    options: dict[str, Any] = {"compute_dtype": compute or "bf16"}
    if place == "lora":
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return (model if place == "ram" else folder), options


@pytest.fixture(scope="module")
def ordinary(case: tuple[Any, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    usual = contextlib.nullcontext
    return streamed_bits(case[0], usual, usual, usual, tmp_path_factory.mktemp("usual"), **case[1])


@pytest.mark.filterwarnings("ignore:.*deterministic algorithms was")  # a restore says so, as it should
@pytest.mark.parametrize(("case", "name"), crossed(CASES, AT_OPENING, by=3), indirect=["case"])
def test_streamed_model_opened_under_other_defaults_has_the_bits_of_the_ordinary_run(
    name: str, case: tuple[Any, dict[str, Any]], ordinary: Any, tmp_path: Path
) -> None:
    usual = contextlib.nullcontext
    assert same(streamed_bits(case[0], AT_OPENING[name], usual, usual, tmp_path, **case[1]), ordinary)


@pytest.mark.filterwarnings("ignore:.*deterministic algorithms was")  # a restore says so, as it should
@pytest.mark.parametrize(("case", "name"), crossed(CASES, DEFAULTS, by=3), indirect=["case"])
def test_streamed_model_trained_under_other_defaults_has_the_bits_of_the_ordinary_run(
    name: str, case: tuple[Any, dict[str, Any]], ordinary: Any, tmp_path: Path
) -> None:
    setting, usual = DEFAULTS[name], contextlib.nullcontext
    assert same(streamed_bits(case[0], usual, setting, setting, tmp_path, **case[1]), ordinary)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiered_optimizer_under_other_defaults_has_the_bits_of_the_ordinary_run(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    def bits(opening: Setting, steps: Setting) -> Any:
        parameters = parameters_of(dtype)
        with optimizers(tmp_path) as make:
            with opening():
                optimizer = make(parameters, lr=1e-2, ram=SOME)
            for step in range(2):
                give_gradients(parameters, step)
                with steps():
                    optimizer.step()
            with steps():
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
            return parameters, optimizer.state_dict()

    setting, usual = DEFAULTS[name], contextlib.nullcontext
    expected = bits(usual, usual)
    assert same(bits(setting, usual), expected)
    assert same(bits(usual, setting), expected)


@pytest.mark.parametrize("name", AT_OPENING)
def test_store_under_other_defaults_keeps_its_bytes(name: str, tmp_path: Path) -> None:
    with AT_OPENING[name](), TieredStore.open(ram="4MiB", nvme=[f"{tmp_path}:8MiB"], device="cpu") as store:
        store.register(BlockSpec("a", 8192, home=Tier.NVME))
        with store.lease("a", Tier.RAM) as block:
            block.bytes.fill_(7)
            store.mark_dirty("a", Tier.RAM)
            store.write_back("a", Tier.RAM)
        store.evict("a", Tier.RAM)
        with store.lease("a", Tier.RAM) as block:
            assert block.bytes.dtype is torch.uint8
            assert bool((block.bytes == 7).all())


@pytest.mark.parametrize("name", ["bf16", "meta", "strict"])
def test_train_run_under_other_defaults_writes_the_bits_of_the_ordinary_run(name: str, tmp_path: Path) -> None:
    for place, setting in (("usual", contextlib.nullcontext), (name, DEFAULTS[name])):
        (tmp_path / place).mkdir()
        with setting():
            assert main(command(tmp_path / place, {"train.steps": 2})) == 0
    files = sorted(path.name for path in (tmp_path / name / "run" / "model").iterdir())
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights
    for each in weights:
        found, expected = ((tmp_path / place / "run" / "model" / each).read_bytes() for place in (name, "usual"))
        assert found == expected


def test_usual_defaults_hold_inside_alone() -> None:
    with dtype_of(torch.float64), torch.device("meta"), torch.inference_mode():
        with usual_defaults():
            made = torch.zeros(1)
            assert (made.dtype, made.device.type, made.is_inference()) == (torch.float32, "cpu", False)
        made = torch.zeros(1)
        assert (made.dtype, made.device.type, made.is_inference()) == (torch.float64, "meta", True)
