"""Memory stays flat, whatever the loop does between two steps, and without a collection of cycles.

A window of steps is looked at closely: every byte that an operator makes in it is counted while it lives. What a step
left behind would be there at the end of the window, once for each step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from crossed import some
from living import Living
from small_commands import command
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

import megatier
from megatier import Streamed, TieredAdamW, TieredStore
from megatier.cli import main
from megatier.engine.step import Engine
from megatier.integrations.transformers_trainer import MegatierTrainer
from megatier.models.decoder import decoder_layers

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TIERS: dict[str, Any] = {"device": "cpu", "gpu": "1MiB", "ram": "4MiB", "update_threads": 1, "io_threads": 1}
WARM = 4
"""Steps before the window."""
WINDOW = 4
"""Steps of a window, in which lengths of text come round once."""
Loop = Callable[[Streamed, int], object]


class WantsMemoryError(torch.OutOfMemoryError):
    """Stands for a device whose memory has run out."""


def small(family: str = "llama", **options: Any) -> PreTrainedModel:
    return plain_model(tiny_config(family, **{**SMALL, **options}))


def batch(step: int, tokens: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 160, (2, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def end(streamed: Streamed) -> None:
    streamed.optimizer.step()
    streamed.optimizer.zero_grad()


def plain(streamed: Streamed, step: int) -> None:
    for _ in range(streamed.accumulation_steps):
        streamed.model(**batch(step)).loss.backward()
    end(streamed)


def of_mixed_lengths(streamed: Streamed, step: int) -> None:
    streamed.model(**batch(step, 4 + 3 * (step % WINDOW))).loss.backward()
    end(streamed)


def several_forwards(streamed: Streamed, step: int) -> None:
    with torch.no_grad():
        reference = streamed.model(**batch(step)).loss
    (streamed.model(**batch(step)).loss + streamed.model(**batch(step + 1)).loss - reference).backward()
    end(streamed)


def evaluating(streamed: Streamed, step: int) -> None:
    plain(streamed, step)
    with torch.no_grad():
        streamed.model(**batch(step, 4 + 3 * (step % WINDOW)))


def generating(streamed: Streamed, step: int) -> None:
    plain(streamed, step)
    streamed.model.eval()
    generate: Any = streamed.model.generate
    generate(input_ids=batch(step)["input_ids"], max_new_tokens=2, do_sample=False)
    streamed.model.train()


def dropping(streamed: Streamed, step: int) -> None:
    streamed.model(**batch(step))
    streamed.abandon()


def failing_between(streamed: Streamed, step: int) -> None:
    with contextlib.suppress(KeyError):
        loss = streamed.model(**batch(step)).loss
        raise KeyError(loss)
    streamed.optimizer.zero_grad()
    streamed.abandon()


def last_layer(streamed: Streamed) -> nn.Module:
    return decoder_layers(streamed.model)[-1]


@contextlib.contextmanager
def failing(streamed: Streamed) -> Iterator[None]:
    """Memory runs out after the last layer."""

    def fail(*_: object) -> None:
        if streamed.device.type == "cuda":
            torch.empty(1 << 50, device=streamed.device)
        raise WantsMemoryError

    handle = last_layer(streamed).register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def short_of_memory_in_the_forward(streamed: Streamed, step: int) -> None:
    try:
        with failing(streamed):
            streamed.model(**batch(step, 16))
    except torch.OutOfMemoryError:
        streamed.optimizer.zero_grad()
    plain(streamed, step)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise WantsMemoryError


def short_of_memory_in_the_backward(streamed: Streamed, step: int) -> None:
    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Failing.apply(args[0]), *args[1:]  # type: ignore[no-untyped-call]

    handle = last_layer(streamed).register_forward_pre_hook(before)
    with contextlib.suppress(torch.OutOfMemoryError):
        streamed.model(**batch(step, 16)).loss.backward()
    handle.remove()
    streamed.optimizer.zero_grad()
    plain(streamed, step)


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "plain": (plain, {}),
    "plain, with logits": (plain, {"fused_loss": False}),
    "recompute": (plain, {"activations": "recompute"}),
    "accumulating": (plain, {"accumulation_steps": 2}),
    "frozen": (plain, {"frozen": "!model.layers.1.*"}),
    "muon": (plain, {"optimizer": "muon"}),
    "of mixed lengths": (of_mixed_lengths, {}),
    "several forwards": (several_forwards, {}),
    "evaluating": (evaluating, {}),
    "generating": (generating, {"fused_loss": False}),
    "dropping": (dropping, {}),
    "failing between": (failing_between, {"fused_loss": False}),
    "short in the forward": (short_of_memory_in_the_forward, {}),
    "short in the backward": (short_of_memory_in_the_backward, {}),
}


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no cycle is collected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def growth(step: Callable[[int], object]) -> int:
    """Bytes that a window of steps leaves behind, apart from what the window before it left."""
    for number in range(WARM):
        step(number)
    with uncollected(), Living() as living:
        for number in range(WINDOW):
            step(number)
        before: int = living.now
        for number in range(WINDOW):
            step(number)
        found: int = living.now - before
    return found


@pytest.mark.parametrize("name", some(LOOPS, by=2))
def test_loop_over_a_streamed_model_leaves_no_byte_behind(name: str) -> None:
    loop, options = LOOPS[name]
    with megatier.stream(small(), tiers=TIERS, compute_dtype="fp32", **options) as streamed:
        streamed.model.train()
        assert growth(lambda number: loop(streamed, number)) == 0


def test_loop_over_adapters_leaves_no_byte_behind() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    with megatier.stream(small(), tiers=TIERS, compute_dtype="fp32", peft_config=lora) as streamed:
        streamed.model.train()
        assert growth(lambda number: plain(streamed, number)) == 0


@pytest.mark.parametrize("family", [pytest.param("gemma3n_text", marks=pytest.mark.slow), "qwen3_moe"])
def test_loop_over_tensors_in_containers_and_experts_leaves_no_byte_behind(family: str) -> None:
    tiers = {**TIERS, "gpu": "8MiB", "ram": "32MiB"}
    with megatier.stream(plain_model(tiny_config(family)), tiers=tiers, compute_dtype="fp32") as streamed:
        streamed.model.train()
        assert growth(lambda number: plain(streamed, number)) == 0


def test_steps_of_tiered_adamw_leave_no_byte_and_no_move_behind(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    with TieredAdamW(model.parameters(), ram="1MiB", nvme=[f"{tmp_path}:8MiB"]) as optimizer:

        def step(number: int) -> None:
            model(torch.full((1, 512), float(number))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        assert growth(step) == 0
        assert optimizer._placed is not None
        assert optimizer._placed.store.tiers.take_log() == []


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 2 * (WARM + 2 * WINDOW)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in batch(index).items()}


class Marks(TrainerCallback):
    """Counts what lives at the end of each step of a Trainer, from the end of the warm-up on."""

    def __init__(self) -> None:
        self.living = Living()
        self.marks: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.marks.append(self.living.now)


def test_steps_of_a_trainer_leave_no_byte_behind(tmp_path: Path) -> None:
    marks = Marks()
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none"}
    options |= {"use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True, "logging_steps": 4}
    arguments = TrainingArguments(str(tmp_path), max_steps=WARM + 2 * WINDOW, **options)
    with megatier.stream(small(), tiers=TIERS, compute_dtype="fp32") as streamed:
        trainer = MegatierTrainer(streamed, arguments, train_dataset=Rows(), callbacks=[marks])
        with uncollected(), marks.living:
            trainer.train()

    # Before the last step, at whose end no batch is ahead.
    assert marks.marks[-2] == marks.marks[-2 - WINDOW]


def test_steps_of_a_run_leave_no_byte_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    train_step = Engine.train_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        marks.append(living.now)
        return train_step(*args, **kwargs)

    monkeypatch.setattr(Engine, "train_step", noting)
    settings = {"train.steps": WARM + 2 * WINDOW, "train.evaluate_every": 4, "train.groups": 2}
    with uncollected(), Living() as living:
        assert main(command(tmp_path, settings)) == 0
    assert marks[-1] == marks[-1 - WINDOW]


def test_150_steps_of_all_loops_by_turns_keep_neither_objects_nor_memory() -> None:
    """Python's own objects too, and whatever C holds."""
    turns = [loop for loop, options in LOOPS.values() if not options.get("accumulation_steps")]
    process = psutil.Process()
    with megatier.stream(small(), tiers=TIERS, compute_dtype="fp32", fused_loss=False) as streamed:
        streamed.model.train()
        sizes = []
        for number in range(150):
            turns[number % len(turns)](streamed, number)
            if number in (49, 149):
                gc.collect()
                sizes.append((len(gc.get_objects()), process.memory_info().rss))
        (objects, rss), (objects_then, rss_then) = sizes
    assert objects_then - objects < 100
    assert rss_then - rss < 8 << 20


def test_texts_of_new_lengths_within_a_step_do_not_make_the_run_remember_more() -> None:
    counts = []
    with megatier.stream(small(), tiers=TIERS, compute_dtype="fp32", accumulation_steps=2) as streamed:
        orders = streamed._session.player._orders
        for number in range(20):
            streamed.model(**batch(number)).loss.backward()
            with torch.no_grad():
                for _ in range(1 + number):
                    streamed.model(**batch(number, 4))
            streamed.model(**batch(number + 1)).loss.backward()
            end(streamed)
            counts.append(sum(len(courses) for courses in orders._courses.values()))
    assert counts[-1] == counts[10]


@pytest.mark.gpu
@pytest.mark.parametrize(("compiles", "steps"), [(False, 2000), (True, 400)])
def test_steps_on_a_gpu_take_no_more_memory_with_time(compiles: bool, steps: int) -> None:
    """Of four lengths, some dropped, some short of memory, with evaluations and texts in between."""
    model = small(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=512)
    tiers = {"device": "cuda", "gpu": "16MiB", "ram": "256MiB"}
    sizes: list[int] = []
    with megatier.stream(model, tiers=tiers, fused_loss=compiles, compile=compiles) as streamed, uncollected():
        streamed.model.train()
        generate: Any = streamed.model.generate

        def given(step: int, tokens: int) -> dict[str, Tensor]:
            return {name: value.to(streamed.device) for name, value in batch(step, tokens).items()}

        for step in range(steps):
            tokens = 64 * (1 + step % 4)
            if step % 16 == 9:
                with failing(streamed), contextlib.suppress(torch.OutOfMemoryError):
                    streamed.model(**given(step, tokens))
            if step % 16 == 5:
                streamed.model(**given(step, tokens))
                streamed.abandon()
            streamed.model(**given(step, tokens)).loss.backward()
            end(streamed)
            if step % 50 == 7 and not compiles:
                streamed.model.eval()
                generate(given(step, 16)["input_ids"], max_new_tokens=4, do_sample=False)
                streamed.model.train()
            if step % (steps // 10) == steps // 10 - 1:
                with torch.no_grad():
                    streamed.model(**given(0, 64))
                torch.cuda.synchronize()
                torch.empty(1, device=streamed.device)  # torch gives memory back that other streams used
                sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[2:]) - sizes[1] < 1 << 20, sizes


# ---------------------------------------------------------------------- what nobody closed


def open_store(folder: Path) -> TieredStore:
    return TieredStore.open(ram="1MiB", nvme=[f"{folder}:1MiB"])


def open_optimizer(folder: Path) -> TieredAdamW:
    weight = nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = TieredAdamW([weight], ram="100KiB", nvme=[f"{folder}:1MiB"])
    optimizer.step()
    return optimizer


def open_model(folder: Path) -> Streamed:
    tiers = {**TIERS, "gpu": "512KiB", "nvme": f"{folder}:8MiB", "state": "nvme"}
    streamed = megatier.stream(small(), tiers=tiers, compute_dtype="fp32")
    plain(streamed, 0)
    plain(streamed, 1)
    streamed.model(**batch(2))
    return streamed


@pytest.mark.parametrize("make", [open_store, open_optimizer, open_model])
def test_object_that_nobody_closed_ends_its_threads_and_warns(make: Callable[[Path], Any], tmp_path: Path) -> None:
    names = {thread.name for thread in threading.enumerate()}
    made = make(tmp_path)
    seen = weakref.ref(made)
    assert {thread.name for thread in threading.enumerate()} > names
    with pytest.warns(ResourceWarning, match=rf"A {type(made).__name__} was dropped without close\(\)"):
        del made
        gc.collect()
    assert seen() is None
    assert {thread.name for thread in threading.enumerate()} == names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [open_store, open_optimizer, open_model])
def test_object_that_was_closed_goes_in_silence(make: Callable[[Path], Any], tmp_path: Path) -> None:
    made = make(tmp_path)
    made.close()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del made
        gc.collect()
    assert [str(warning.message) for warning in warned] == []


def test_object_that_a_forked_child_inherits_is_not_closed_there(tmp_path: Path) -> None:
    made = open_store(tmp_path)
    made.seal()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        made.__del__()
        os._exit(len(list(tmp_path.iterdir())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    made.close()
