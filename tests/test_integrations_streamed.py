"""megatier.stream: a plain loop takes the engine's own steps, bit by bit, and says what it cannot take."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import check_invariants
from test_durable import watched
from tiny_runs import (
    PLACES,
    ModelWeights,
    Outcome,
    exactness_config,
    one_thread,
    opened,
    outcome,
    plain_model,
    random_groups,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import megatier
from megatier import durable
from megatier.checkpoint import chunkfile
from megatier.config.schema import NumericsConfig, TiersConfig, TrainConfig
from megatier.engine.gradient import Gradients
from megatier.engine.step import StepResult
from megatier.engine.unit_model import Batch
from megatier.errors import (
    BlockNotFoundError,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    StreamedModelError,
    TransferError,
)
from megatier.integrations.streamed import Streamed
from megatier.session.session import Session

VOCAB = {"untied": 2112, "tied": 160, "moe": 160}
TIERS = TiersConfig(device="cpu", gpu=8 << 20, ram=8 << 20, update_threads=2, io_threads=2)
GUARDED = NumericsConfig()
PEAK = 1e-2


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def train_config(model: str, *, groups: int = 2, clip: float | None = 0.5, activations: Any = "keep") -> TrainConfig:
    return TrainConfig(
        steps=6, batch=6, groups=groups, clip=clip, weight_decay=0.1, learning_rate=PEAK, activations=activations
    )


def rate_of(step: int) -> float:
    """Warm-up over two steps, then a fall."""
    return PEAK * min(1.0, step / 2) / step


def counted(groups: Sequence[Any]) -> int | None:
    """What Hugging Face's losses take as `num_items_in_batch`."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in groups) if len(groups) > 1 else None


def on_device(streamed: Streamed, batch: Batch) -> Batch:
    """Where the model wants it."""
    return {name: tensor.to(streamed.device) for name, tensor in batch.items()}


def loop(streamed: Streamed, train: TrainConfig, vocab: int, first: int = 1, last: int = 5) -> list[StepResult]:
    """A plain loop with a scheduler, evaluating in between."""
    results = []
    for group in streamed.optimizer.param_groups:
        group.update(lr=PEAK, initial_lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(streamed.optimizer, lambda n: rate_of(n + first) / PEAK)
    for step in range(first, last + 1):
        groups = [on_device(streamed, batch) for batch in random_groups(train, vocab, step)]
        losses = []
        for batch in groups:
            loss = streamed.model(**batch, num_items_in_batch=counted(groups)).loss
            loss.backward()
            losses.append(loss.item())
        norm = streamed.grad_norm()
        streamed.optimizer.step()
        schedule.step()  # the updates have not run yet; they keep the rate of their step
        streamed.optimizer.zero_grad()
        assert streamed.last is not None
        assert streamed.last.grad_norm == norm
        results.append(replace(streamed.last, loss=math.fsum(losses)))
        if step == 3:
            streamed.model.eval()
            with torch.no_grad():
                assert streamed.model(**on_device(streamed, random_groups(train, vocab, 99)[0])).loss.isfinite()
            streamed.model.train()
    return results


def reference(session: Session, train: TrainConfig, vocab: int) -> list[StepResult]:
    """The same steps by the engine."""
    engine = session.engine
    return [engine.train_step(n, rate_of(n), random_groups(train, vocab, n)) for n in range(1, 6)]


@contextlib.contextmanager
def streamed_on(
    place: str, mount: Path, train: TrainConfig, *, model: str = "tied", fused_loss: bool = True, **options: Any
) -> Iterator[tuple[Session, Streamed]]:
    """The session too, for what only a test asks; options are those of `opened`."""
    config = exactness_config(model)
    with opened(config, mount, PLACES[place], train, numerics=GUARDED, fused_loss=fused_loss, **options) as session:
        streamed = Streamed(session, train, has_logits=not fused_loss)
        streamed.model.train()
        yield session, streamed


# ---------------------------------------------------------------------- the same bits


@pytest.fixture(scope="module")
def of_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """What the engine's own steps come to, by the number of groups."""

    @functools.cache
    def run(groups: int) -> Outcome:
        train, folder = train_config("tied", groups=groups), tmp_path_factory.mktemp("engine")
        config = exactness_config("tied")
        with opened(config, folder, PLACES["gpu"], train, numerics=GUARDED, fused_loss=True) as session:
            torch.manual_seed(5)
            return outcome(session, reference(session, train, 160))

    return run


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_loop_any_place_takes_the_steps_of_the_engine_bit_by_bit(
    place: str, groups: int, tmp_path: Path, of_engine: Callable[[int], Outcome]
) -> None:
    if place == "nvme_grads" and groups > 1:
        pytest.skip("gradients of several groups do not go to NVMe")
    train = train_config("tied", groups=groups)
    with streamed_on(place, tmp_path, train) as (session, streamed):
        torch.manual_seed(5)
        results = loop(streamed, train, 160)
        assert any(result.clip_coefficient < 1 for result in results)
        assert outcome(session, results) == of_engine(groups)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place", ["gpu", "ram", "ram_streamed", "gpu_ram_nvme", "nvme_twice"])
def test_loop_on_a_gpu_takes_the_steps_of_the_engine_bit_by_bit(place: str, groups: int, tmp_path: Path) -> None:
    train = train_config("tied", groups=groups)
    options: dict[str, Any] = {"device": "cuda", "compile": False, "fused_loss": True}
    with opened(exactness_config("tied"), tmp_path, PLACES["gpu_ram"], train, numerics=GUARDED, **options) as session:
        torch.manual_seed(5)
        expected = outcome(session, reference(session, train, 160))
    with streamed_on(place, tmp_path, train, **options) as (session, streamed):
        torch.manual_seed(5)
        assert outcome(session, loop(streamed, train, 160)) == expected


@pytest.mark.parametrize("model", ["untied", "moe"])
@pytest.mark.parametrize("fused_loss", [True, False])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_loop_any_model_and_policy_takes_the_steps_of_the_engine(
    model: str, fused_loss: bool, activations: str, tmp_path: Path
) -> None:
    groups = 1 if model == "moe" else 2  # a router's loss is whole in each backward of a loop
    train, config = train_config(model, groups=groups, activations=activations), exactness_config(model)
    with opened(config, tmp_path, PLACES["ram"], train, numerics=GUARDED, fused_loss=fused_loss) as session:
        torch.manual_seed(5)
        expected = outcome(session, reference(session, train, VOCAB[model]))
    with streamed_on("ram", tmp_path, train, model=model, fused_loss=fused_loss) as (session, streamed):
        torch.manual_seed(5)
        assert outcome(session, loop(streamed, train, VOCAB[model])) == expected


def test_loop_on_a_cpu_without_bf16_instructions_takes_the_steps_of_the_engine(tmp_path: Path) -> None:
    train = train_config("tied")
    with patch("megatier.session.machine.cpu_has_bf16", return_value=False):
        with opened(exactness_config("tied"), tmp_path, PLACES["ram"], train, numerics=GUARDED) as session:
            torch.manual_seed(5)
            expected = outcome(session, reference(session, train, 160))
        with streamed_on("ram", tmp_path, train, fused_loss=False) as (session, streamed):
            torch.manual_seed(5)
            assert outcome(session, loop(streamed, train, 160)) == expected


def test_loop_settings_changed_after_the_backward_are_those_of_the_step(tmp_path: Path) -> None:
    """Also where a unit was updated speculatively, by other settings: that update is void."""
    train = train_config("tied", groups=1, clip=None)
    outcomes = []
    for changes_late in (False, True):
        with streamed_on("nvme_twice", tmp_path, train) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                if not changes_late:
                    set_all(streamed, lr=PEAK / step, weight_decay=0.2)
                [batch] = random_groups(train, 160, step)
                streamed.model(**batch).loss.backward()
                if changes_late:
                    set_all(streamed, lr=PEAK / step, weight_decay=0.2)
                streamed.optimizer.step()
                set_all(streamed, lr=77.0, weight_decay=0.0)
                assert streamed.last is not None
                results.append(replace(streamed.last, loss=0.0))
            assert session.speculation.outcomes["void" if changes_late else "confirmed"] >= 1
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def set_all(streamed: Streamed, *, lr: float, weight_decay: float) -> None:
    for group in streamed.optimizer.param_groups:
        group["lr"] = lr
    streamed.optimizer.param_groups[0]["weight_decay"] = weight_decay


def test_loop_agrees_with_plain_training_in_fp32() -> None:
    """torch's AdamW has another order of operations; the first step's losses are equal to the last bit."""
    plain = plain_model(exactness_config("plain"))
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    train = TrainConfig(batch=4, groups=2)
    options: dict[str, Any] = {"weight_decay": 0.1, "clip": 0.5, "compute_dtype": "fp32", "fused_loss": False}
    with megatier.stream(plain, tiers=TIERS, accumulation_steps=2, **options) as streamed:
        for step in range(1, 11):
            pairs = []
            for batch in random_groups(train, 160, step):
                losses = [model(**batch).loss / 2 for model in (plain, streamed.model)]
                for loss in losses:
                    loss.backward()
                pairs.append(tuple(loss.item() for loss in losses))
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
            assert streamed.grad_norm() == pytest.approx(norm, rel=1e-6)
            assert all(a == pytest.approx(b, rel=1e-6) for a, b in pairs)
            assert step > 1 or all(a == b for a, b in pairs)
            optimizer.step()
            optimizer.zero_grad()
            streamed.optimizer.step()
        found = streamed.state_dict()
    assert all(torch.allclose(found[name], p, rtol=0, atol=1e-6) for name, p in plain.named_parameters())


@pytest.mark.parametrize("model", ["tied", "untied"])
@patch("megatier.session.machine.cpu_has_bf16", return_value=True)
def test_lent_head_gives_the_gradients_of_the_head_itself(_: object, model: str, tmp_path: Path) -> None:
    train = train_config(model, groups=1)
    outcomes = []
    for is_lent in (False, True):
        with streamed_on("ram_nvme", tmp_path, train, model=model, fused_loss=False) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                [batch] = random_groups(train, VOCAB[model], step)
                loss = loss_past_the_head(streamed, batch) if is_lent else streamed.model(**batch).loss
                loss.backward()
                streamed.optimizer.step()
                assert streamed.last is not None
                results.append(replace(streamed.last, loss=loss.item()))
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def test_lent_head_in_evaluations_among_others_gives_the_same_loss(tmp_path: Path) -> None:
    train = train_config("untied", groups=1)
    with streamed_on("ram_nvme", tmp_path, train, model="untied", fused_loss=False) as (_, streamed), torch.no_grad():
        streamed.model.eval()
        [batch] = random_groups(train, 2112, 1)
        losses = {
            loss.item()
            for _ in range(2)
            for loss in (loss_past_the_head(streamed, batch), streamed.model(**batch).loss)
        }
        assert len(losses) == 1


@pytest.mark.parametrize("fused_loss", [True, False])
@pytest.mark.parametrize("place", ["gpu", "ram_nvme"])
def test_evaluations_in_inference_mode_leave_no_trace_in_the_steps(
    place: str, fused_loss: bool, tmp_path: Path
) -> None:
    """Lightning validates in it; what is made there could be in no backward."""
    train = train_config("tied", groups=1)
    outcomes = []
    for evaluates in (False, True):
        with streamed_on(place, tmp_path, train, fused_loss=fused_loss) as (session, streamed):
            torch.manual_seed(5)
            results = []
            for step in (1, 2, 3):
                if evaluates:
                    streamed.model.eval()
                    with torch.inference_mode():
                        assert streamed.model(**random_groups(train, 160, 99)[0]).loss.isfinite()
                    streamed.model.train()
                results += loop(streamed, train, 160, first=step, last=step)
            outcomes.append(outcome(session, results))
    assert outcomes[0] == outcomes[1]


def loss_past_the_head(streamed: Streamed, batch: Any) -> Tensor:
    """A forward that multiplies by the head's weight itself."""
    model: Any = streamed.model
    with streamed.one_forward("lent"), streamed.lent_head():
        hidden = model.base_model(input_ids=batch["input_ids"]).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
        loss: Tensor = model.loss_function(logits, batch["labels"], vocab_size=logits.shape[-1])
        return loss


# ---------------------------------------------------------------------- weights and state


def test_read_and_state_dict_wait_for_the_updates_that_are_due(tmp_path: Path) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram_nvme", tmp_path, train) as (_, streamed):
        before = streamed.state_dict()
        loop(streamed, train, 160, last=1)
        after = streamed.state_dict()
        assert all(torch.equal(streamed.read(name), value) for name, value in after.items())
        assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
        with pytest.raises(BlockNotFoundError, match="lm_head"):
            streamed.read("lm_head.weight")


def test_weights_in_the_model_are_refused_and_the_error_says_where_they_are(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed):
        with pytest.raises(StreamedModelError, match=r"Streamed\.state_dict\(\)"):
            streamed.model.state_dict()
        with pytest.raises(StreamedModelError, match=r"Streamed\.state_dict\(\)"):
            streamed.model.save_pretrained(tmp_path / "saved")
        parameter = next(streamed.model.parameters())
        for read in (parameter.cpu, parameter.tolist, parameter.numpy, streamed.model.cpu):
            with pytest.raises(StreamedModelError, match=r"Streamed\.read"):
                read()


@pytest.mark.parametrize("target", ["ram", "nvme"])
def test_save_and_restore_on_other_tiers_goes_on_bit_by_bit(target: str, tmp_path: Path) -> None:
    train = train_config("untied")
    with streamed_on("gpu_ram", tmp_path, train, model="untied") as (session, streamed):
        torch.manual_seed(5)
        loop(streamed, train, 2112, last=3)
        streamed.save(tmp_path / "saved")
        torch.manual_seed(6)
        expected = outcome(session, loop(streamed, train, 2112, first=4))
    with streamed_on(target, tmp_path, train, model="untied") as (session, streamed):
        streamed.restore(tmp_path / "saved")
        assert streamed.steps == 3
        assert streamed.optimizer.param_groups[0]["lr"] == rate_of(4)
        torch.manual_seed(6)
        assert outcome(session, loop(streamed, train, 2112, first=4)) == expected


@pytest.mark.parametrize("switches", [True, False])
def test_save_in_the_place_of_one_of_its_step_leaves_one_that_restores_wherever_it_is_killed(
    switches: bool, tmp_path: Path
) -> None:
    train, folder, seen = train_config("tied"), tmp_path / "saved", list[Path]()

    def see(name: str, args: tuple[Any, ...]) -> None:
        """What a kill before this call would leave."""
        seen.append(shutil.copytree(folder, tmp_path / f"{len(seen)} {name}"))

    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=1)
        streamed.save(folder)
        old = weights_of(streamed)
        loop(streamed, train, 160, first=2, last=2)
        new, streamed.steps = weights_of(streamed), 1
        with pytest.MonkeyPatch.context() as patch:
            if not switches:
                patch.setattr(durable, "switch", lambda first, second: False)
            watched(patch, see)
            streamed.save(folder)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        found = []
        for snapshot in seen:
            streamed.restore(snapshot)
            assert weights_of(streamed) in (old, new)
            found.append(weights_of(streamed) == new)
    assert found == sorted(found)
    assert {False, True} == set(found)


def weights_of(streamed: Streamed) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize("what", ["bytes", "sync_tree", "switch"])
def test_save_that_a_full_drive_refuses_leaves_the_one_of_its_step(what: str, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    train = train_config("tied")
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=1)
        streamed.save(tmp_path / "saved")
        old = weights_of(streamed)
        loop(streamed, train, 160, first=2, last=2)
        streamed.steps = 1
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferError, match="Free space"):
            if what == "bytes":
                patch.setattr(chunkfile, "_create", lambda _: os.open("/dev/full", os.O_WRONLY))
            else:
                patch.setattr(durable, what, refuse)
            streamed.save(tmp_path / "saved")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000001"]
        streamed.restore(tmp_path / "saved")
        assert weights_of(streamed) == old


def test_restore_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with (
        streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed),
        pytest.raises(CheckpointError, match="holds no checkpoint"),
    ):
        streamed.restore(tmp_path)


def test_export_and_stream_of_the_folder_give_the_same_weights(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("untied"))
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32") as streamed:
        loop(streamed, train_config("untied", groups=1), 2112, last=1)
        streamed.export(tmp_path / "model")
        expected = streamed.state_dict()
    with megatier.stream(tmp_path / "model", tiers=TIERS) as streamed:
        assert same(streamed.state_dict(), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert same(dict(loaded.named_parameters()), expected)


def test_stream_of_experts_in_parts_reads_and_writes_whole_parameters(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("moe"))
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32", expert_parts=3) as streamed:
        assert same(streamed.state_dict(), dict(plain.named_parameters()))
        loop(streamed, train_config("moe", groups=1), 160, last=1)
        expected = streamed.state_dict()
        assert not same(expected, dict(plain.named_parameters()))
        assert all(torch.equal(streamed.read(name), value) for name, value in expected.items())
        streamed.export(tmp_path / "model", dtype="fp32")
        streamed.save(tmp_path / "saved")
    with megatier.stream(tmp_path / "model", tiers=TIERS, compute_dtype="fp32", expert_parts=2) as streamed:
        assert same(streamed.state_dict(), expected)
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32") as streamed:
        streamed.restore(tmp_path / "saved")
        assert same(streamed.state_dict(), expected)


def same(found: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_write_trace_has_the_last_steps(tmp_path: Path) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160)
        streamed.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {3, 4, 5}


# ---------------------------------------------------------------------- what a loop may not do


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[tuple[Streamed, Any]]:
    """A streamed model of two backwards a step, and a batch."""
    train = train_config("tied")
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        yield streamed, random_groups(train, 160, 1)[0]


def test_step_without_a_backward_is_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    with pytest.raises(StreamedModelError, match="0 of 2 backwards"):
        streamed.optimizer.step()
    streamed.model(**batch)
    with pytest.raises(StreamedModelError, match="0 of 2 backwards"):
        streamed.optimizer.step()


def test_step_after_fewer_backwards_than_declared_is_refused_and_may_be_dropped(
    two_groups: tuple[Streamed, Any],
) -> None:
    streamed, batch = two_groups
    before = streamed.state_dict()
    streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="1 of 2 backwards"):
        streamed.optimizer.step()
    streamed.optimizer.zero_grad()
    assert same(streamed.state_dict(), before)
    assert streamed.steps == 0
    loop(streamed, train_config("tied"), 160, last=2)
    assert streamed.steps == 2


def test_dropped_groups_leave_no_trace_in_the_steps_that_follow(tmp_path: Path) -> None:
    train = train_config("tied")
    outcomes = []
    for drops in (False, True):
        with streamed_on("ram_nvme", tmp_path, train) as (session, streamed):
            if drops:
                streamed.model(**random_groups(train, 160, 50)[0]).loss.backward()
                streamed.optimizer.zero_grad()
            torch.manual_seed(5)
            results = loop(streamed, train, 160, last=2)
            if drops:
                streamed.model(**random_groups(train, 160, 51)[0]).loss.backward()
                streamed.model(**random_groups(train, 160, 52)[0])
                streamed.abandon()
            torch.manual_seed(6)
            outcomes.append(outcome(session, [*results, *loop(streamed, train, 160, first=3)]))
    assert outcomes[0] == outcomes[1]


def test_zero_grad_between_forward_and_backward_drops_nothing(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    loss = streamed.model(**batch).loss
    streamed.optimizer.zero_grad()
    loss.backward()
    streamed.model(**batch).loss.backward()
    streamed.optimizer.step()
    assert streamed.steps == 1


def test_more_backwards_than_declared_are_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    for _ in range(2):
        streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="accumulation_steps is 2"):
        streamed.model(**batch)
    streamed.optimizer.step()


def test_forward_while_another_waits_for_its_backward_is_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    streamed.model(**batch)
    with pytest.raises(StreamedModelError, match=r"no_grad\(\)"):
        streamed.model(**batch)


@pytest.mark.parametrize("call", ["read", "state_dict", "save", "export", "evaluate"])
def test_weights_in_the_middle_of_a_step_are_refused(
    call: str, two_groups: tuple[Streamed, Any], tmp_path: Path
) -> None:
    streamed, batch = two_groups
    calls: dict[str, Any] = {
        "read": lambda: streamed.read("model.norm.weight"),
        "state_dict": streamed.state_dict,
        "save": lambda: streamed.save(tmp_path / "saved"),
        "export": lambda: streamed.export(tmp_path / "model"),
        "evaluate": lambda: evaluate(streamed, batch),
    }
    streamed.model(**batch).loss.backward()
    with pytest.raises(StreamedModelError, match="in the middle of a step"):
        calls[call]()


def evaluate(streamed: Streamed, batch: Any) -> None:
    with torch.no_grad():
        streamed.model(**batch)


def test_forward_that_fails_abandons_its_step(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    streamed.model(**batch).loss.backward()
    with pytest.raises(IndexError):
        streamed.model(input_ids=batch["input_ids"] + 1000, labels=batch["labels"])
    loop(streamed, train_config("tied"), 160, last=2)


@pytest.mark.parametrize("place", ["ram", "gpu_ram_nvme"])
@pytest.mark.parametrize("step", [1, 3])
def test_backward_that_fails_may_be_dropped(
    place: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step that records, and in one that is played, beside updates."""
    train = train_config("tied")
    with streamed_on(place, tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=step - 1)
        loss = streamed.model(**random_groups(train, 160, step)[0]).loss
        with monkeypatch.context() as patch:
            patch.setattr(Gradients, "close", fail)
            with pytest.raises(ArithmeticError, match="planted"):
                loss.backward()
        with pytest.raises(StreamedModelError, match=r"abandon\(\)"):
            streamed.model(**random_groups(train, 160, step)[0])
        streamed.abandon()
        loop(streamed, train, 160, first=step, last=step + 1)
        assert streamed.steps == step + 1


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place", ["ram", "ram_nvme", "nvme_grads_some"])
def test_memory_that_ends_while_gradients_are_written_loses_no_slot(
    place: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another unit each time, more often than there are slots."""
    train = train_config("tied", groups=groups)
    outcomes = []
    for failures in (0, 4):
        with streamed_on(place, tmp_path, train) as (session, streamed):
            torch.manual_seed(5)
            results = loop(streamed, train, 160, last=2)
            for unit in range(failures):
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="planted"):
                    run_out_of_memory(patch, unit)
                    for batch in random_groups(train, 160, 9):
                        streamed.model(**batch).loss.backward()
                streamed.abandon()
                check_invariants(session.store)
            torch.manual_seed(6)
            outcomes.append(outcome(session, [*results, *loop(streamed, train, 160, first=3)]))
    assert outcomes[0] == outcomes[1]


def run_out_of_memory(patch: pytest.MonkeyPatch, unit: int) -> None:
    """As the so-manieth unit of a backward writes its gradient, between taking the slot and handing it over."""
    send, left = Gradients._send, iter(range(unit, -1, -1))

    def sent(self: Gradients, name: str, group: int) -> None:
        if not next(left):
            raise torch.OutOfMemoryError("planted")
        send(self, name, group)

    patch.setattr(Gradients, "_send", sent)


def fail(*_: object) -> None:
    raise ArithmeticError("planted")


def test_groups_that_differ_where_they_cannot_are_refused(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    streamed.optimizer.param_groups[1]["lr"] = 1.0
    with pytest.raises(StreamedModelError, match="share lr"):
        streamed.model(**batch)
    streamed.optimizer.param_groups[1].update(lr=PEAK, weight_decay=0.1)
    with pytest.raises(StreamedModelError, match="do not decay"):
        streamed.model(**batch)
    with pytest.raises(StreamedModelError, match="no group can be added"):
        streamed.optimizer.add_param_group({"params": []})


def test_fused_loss_without_labels_is_refused_and_gives_no_logits(two_groups: tuple[Streamed, Any]) -> None:
    streamed, batch = two_groups
    with pytest.raises(StreamedModelError, match="fused_loss=False"):
        streamed.model(input_ids=batch["input_ids"])
    with torch.no_grad():
        assert streamed.model(**batch).logits is None


def test_step_that_is_not_finite_is_left_out_and_too_many_end_the_run(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("tied"))
    plain.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 4] = float("inf")
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, source=ModelWeights(plain)) as (_, streamed):
        before = streamed.state_dict()
        [batch] = random_groups(train, 160, 1)
        for _ in range(GUARDED.max_skips):
            streamed.model(**batch).loss.backward()
            streamed.optimizer.step()
            assert streamed.last is not None
            assert streamed.last.skipped
        streamed.model(**batch).loss.backward()
        with pytest.raises(NonFiniteError, match="3 steps before it were left out"):
            streamed.optimizer.step()
        assert same(streamed.state_dict(), before)


def test_closed_model_is_refused(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("tied"))
    with megatier.stream(plain, tiers=TIERS) as streamed:
        pass
    streamed.close()
    with pytest.raises(StreamedModelError, match="closed"):
        streamed.read("model.norm.weight")


def test_stream_of_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        megatier.stream(str(tmp_path / "nothing"), tiers=TIERS)


def test_stream_leaves_the_model_it_was_given_as_it_was() -> None:
    plain: PreTrainedModel = plain_model(exactness_config("tied"))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with megatier.stream(plain, tiers=TIERS, lr=1.0) as streamed:
        loop(streamed, train_config("tied", groups=1), 160, last=1)
    assert same(dict(plain.named_parameters()), before)


def test_stream_without_a_backward_per_step_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="accumulation_steps is 0; it must be at least 1"):
        megatier.stream("nowhere", accumulation_steps=0)
