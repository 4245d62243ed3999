"""Generation by a streamed model in memory that training lends, and by transformers' continuous batching."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.generation
from rank_pool import POOL
from streamed_loops import TIERS, away_bytes, same
from tiny_runs import exactness_config, plain_model
from transformers import AutoModelForCausalLM, GenerationConfig

import megatier
from megatier.byte_counts import format_bytes
from megatier.errors import CapacityError, PeerError, StreamedModelError, TransferError
from megatier.integrations.streamed import Streamed
from megatier.session.ram_weights import RamWeights
from megatier.store import loan
from megatier.store.arena import Arena
from megatier.tier import round_up

batching: Any = pytest.importorskip("transformers.generation.continuous_batching")
if not hasattr(transformers.generation, "ContinuousBatchingConfig"):
    pytest.skip("this version of transformers has no such config", allow_module_level=True)
OPTIONS: dict[str, Any] = {"fused_loss": False, "compile": False, "lr": 1e-2}
GREEDY = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=159, pad_token_id=0)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 11]
BUDGETS: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": 8 << 20},
    "ram": {"gpu": 200 << 10},
    "nvme": {"gpu": 200 << 10, "ram": 400 << 10},
}
OF_RANKS: dict[str, dict[str, Any]] = {
    tier: {"gpu": 32 << 20, "ram": 32 << 20, "gpu_limit": 64 << 20, "state": (tier,)} for tier in BUDGETS
}
"""The slots of ranks take more."""


def opened(
    mount: Path,
    place: str = "ram",
    dtype: Any = "fp32",
    device: Any = "cpu",
    groups: int = 1,
    frozen: str | tuple[str, ...] = (),
    **more: Any,
) -> Streamed:
    """A tiny model whose weights have room on the GPU if training lends its memory."""
    # On a GPU the driver alone takes more than such a limit.
    limits = {"gpu_limit": None if device == "cuda" else 4 << 20, **BUDGETS[place]} | more
    tiers = replace(TIERS, device=device, nvme=(f"{mount}:16MiB",), **limits)
    model = plain_model(exactness_config("tied")).eval()
    options = {**OPTIONS, "compute_dtype": dtype, "accumulation_steps": groups, "frozen": frozen}
    return megatier.stream(model, tiers=tiers, **options)


def step(streamed: Streamed, number: int) -> float:
    loss = backward(streamed, number)
    streamed.optimizer.step()
    return loss


def backward(streamed: Streamed, number: int) -> float:
    tokens = torch.randint(160, (4, 16), generator=torch.Generator().manual_seed(number)).to(streamed.device)
    loss: torch.Tensor = streamed.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def batch(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """Texts by continuous batching, with a small cache."""
    made: Any = transformers.generation
    config = made.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=32)
    texts = model.generate_batch(prompts, generation_config=GREEDY, continuous_batching_config=config, **options)
    return [text.generated_tokens for text in texts.values()]


def one_by_one(model: Any) -> list[list[int]]:
    texts = [model.generate(torch.tensor([ids], device=model.device), generation_config=GREEDY) for ids in PROMPTS]
    return [text[0, len(ids) :].tolist() for ids, text in zip(PROMPTS, texts, strict=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("place", "dtype"), [("gpu", "fp32"), ("nvme", "bf16"), ("ram", "fp32")])
def test_greedy_texts_are_those_of_the_exported_model_by_either_way(
    place: str, dtype: str, device: str, tmp_path: Path
) -> None:
    with opened(tmp_path, place, dtype, device) as streamed:
        for number in range(3):
            step(streamed, number)
        streamed.export(tmp_path / "model")
        found = []
        for lends in (False, True):
            streamed.lends_memory = lends
            found.append((batch(streamed.model), one_by_one(streamed.model)))
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain.to(device).eval()
    assert plain.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert found == [(batch(plain), one_by_one(plain))] * 2


def test_texts_of_a_batch_load_the_weights_once_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megatier")
    with opened(tmp_path) as streamed:
        step(streamed, 1)
        away = away_bytes(streamed._session)
        for _ in range(2):
            before = streamed._session.player.demanded
            batch(streamed.model)
            assert streamed._session.player.demanded - before == {"ram_to_gpu": away}
    with opened(tmp_path, "gpu") as streamed:
        streamed.lends_memory = True
        batch(streamed.model)
        batch(streamed.model)
    beside, lent = [message for message in caplog.messages if message.startswith("generation: all weights are held")]
    assert (
        f"so a token moves none: {format_bytes(away)} beside the memory of training. For keys and values, and" in beside
    )
    assert "in memory that training lends. Its state there, " in lent


def check_room(streamed: Streamed) -> None:
    """What was told before is what there is."""
    room = streamed.lent_room()
    with streamed.lent_memory(), streamed.held_weights():
        held, loaned = streamed._resident, streamed._session.store.loan
        assert (room.weight_bytes, room.left_bytes) == (held.num_bytes, held.left_bytes)
        assert room.state_bytes == sum(round_up(num_bytes) for _, _, num_bytes in loaned._places.values())
        with pytest.raises(StreamedModelError, match="Leave the block for everything else"):
            streamed.lent_room()


@pytest.mark.parametrize("place", list(BUDGETS))
def test_room_in_lent_memory_is_told_before_it_is_lent_and_refused_by_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, place) as streamed:
        check_room(streamed)
        step(streamed, 1)
        check_room(streamed)
        weights = streamed.lent_room().weight_bytes
        monkeypatch.setattr(streamed._resident, "_limit_bytes", weights - 1000)
        needed = f"needs {format_bytes(weights)}, .*Use model.generate alone"
        with pytest.raises(CapacityError, match=f"all weights on the GPU at once: {needed}"):
            streamed.lent_room()
        monkeypatch.setattr(loan, "ram_available_bytes", lambda: -1)
        with opened(tmp_path, "gpu") as other, pytest.raises(CapacityError, match="state in RAM while its memory"):
            other.lent_room()


@pytest.mark.parametrize("place", list(BUDGETS))
def test_weights_for_an_engine_are_the_same_in_memory_that_is_lent(place: str, tmp_path: Path) -> None:
    with opened(tmp_path, place) as streamed:
        step(streamed, 1)
        with streamed.lent_memory():
            found = dict(streamed.weights())
            pairs = iter(streamed.weights())
            next(pairs)
            with streamed.held_weights(), pytest.raises(StreamedModelError, match="Leave the block for everything"):
                dict(streamed.weights())
            with pytest.raises(StreamedModelError, match="was used, or closed, while its weights were given out"):
                next(pairs)
            pairs = iter(streamed.weights())
            next(pairs)
        with pytest.raises(StreamedModelError, match="was used, or closed, while its weights were given out"):
            next(pairs)
        assert same(found, dict(streamed.weights()))


def fail_at(streamed: Streamed, token: int, error: BaseException) -> Callable[[], None]:
    """Let a forward of the model fail, and return what lets it run again."""
    calls = []

    def failing(*_: object) -> None:
        calls.append(1)
        if len(calls) == token:
            raise error

    hook = streamed.model.lm_head.register_forward_hook(failing)
    removed: Callable[[], None] = hook.remove
    return removed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_batch_is_raised_and_training_goes_on(tmp_path: Path) -> None:
    """Transformers itself logs the error, and returns the texts as far as they are."""
    with opened(tmp_path) as streamed:
        expected = [step(streamed, 1), batch(streamed.model), step(streamed, 2)]
    with opened(tmp_path) as streamed:
        streamed.lends_memory = True
        found: list[Any] = [step(streamed, 1)]
        mend = fail_at(streamed, 3, torch.OutOfMemoryError("CUDA out of memory."))
        with pytest.raises((torch.OutOfMemoryError, StreamedModelError), match="out of memory"):
            batch(streamed.model)
        mend()
        assert [*found, batch(streamed.model), step(streamed, 2)] == expected


def test_ctrl_c_in_a_batch_ends_its_thread_before_the_weights_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as streamed:
        expected = [step(streamed, 1), batch(streamed.model), step(streamed, 2)]
    with opened(tmp_path) as streamed:
        streamed.lends_memory = True
        found: list[Any] = [step(streamed, 1)]
        managers = []

        def interrupted(manager: Any, **_: object) -> None:
            managers.append(manager)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(batching.ContinuousBatchingManager, "get_result", interrupted)
            batch(streamed.model)
        assert [manager.is_running() for manager in managers] == [False]
        assert [*found, batch(streamed.model), step(streamed, 2)] == expected


def test_a_manager_that_stays_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as streamed, pytest.raises(StreamedModelError, match="persistent_manager: its graphs would"):
        batch(streamed.model, persistent_manager=True)


def test_weights_without_room_refuse_a_batch_by_name(tmp_path: Path) -> None:
    with opened(tmp_path) as streamed:
        streamed._resident._limit_bytes = None  # there is no more than the arena
        with pytest.raises(CapacityError, match=r"Lend the memory of training too \(Streamed\.lends_memory\)"):
            batch(streamed.model)
        one_by_one(streamed.model)


@pytest.mark.parametrize("fault", ["error", "interrupt", "no memory"])
def test_whatever_ends_lending_leaves_all_state_and_a_checkpoint_as_ever(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"error": ValueError("the engine died"), "interrupt": KeyboardInterrupt()}
    found = []
    for lends in (False, True):
        with opened(tmp_path, "gpu") as streamed:
            losses = [step(streamed, 1), step(streamed, 2)]
            if lends and fault in errors:
                with pytest.raises(type(errors[fault])), streamed.lent_memory():
                    raise errors[fault]
            elif lends:

                def refused(_: Arena) -> None:
                    raise CapacityError("gpu", 1, 0, "Whoever generated has to give its memory back first.")

                with monkeypatch.context() as patch:
                    patch.setattr(Arena, "take_back", refused)
                    with pytest.raises(CapacityError, match="Whoever generated"), streamed.lent_memory():
                        pass
                    with pytest.raises(CapacityError, match="Whoever generated"):
                        step(streamed, 3)
                assert streamed._session.store.loan.is_lent, "the next call takes it back"
            streamed.save(tmp_path / f"{fault}-{lends}")
            losses.append(step(streamed, 3))
            streamed.restore(tmp_path / f"{fault}-{lends}")
            losses.append(step(streamed, 3))
            found.append((losses, streamed.state_dict()))
    (losses, weights), (others, has) = found
    assert losses == others
    assert losses[2] == losses[3]
    assert same(has, weights)


def test_state_without_room_in_ram_is_refused_before_memory_is_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, "gpu") as streamed:
        streamed.lends_memory = True
        monkeypatch.setattr(loan, "ram_available_bytes", lambda: 1000)
        with pytest.raises(CapacityError, match="state in RAM while its memory is lent"):
            one_by_one(streamed.model)
        streamed.lends_memory = False
        one_by_one(streamed.model)


def test_closing_while_memory_is_lent_frees_everything(tmp_path: Path) -> None:
    with opened(tmp_path, "gpu") as streamed, streamed.lent_memory(), streamed.held_weights():
        streamed.close()
    assert not list(tmp_path.iterdir())


def shared_run(mount: Path, place: str, device: str, lends: bool) -> dict[str, Any]:
    """Steps of two micro-batches over all ranks with texts between them, and what an engine would get."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {"losses": [], "texts": []}
    with opened(mount, "gpu", device=device, groups=2 // ranks, frozen="*.mlp.*", **OF_RANKS[place]) as streamed:
        streamed.lends_memory = lends
        check_room(streamed)
        for number in (1, 2):
            for group in range(streamed.rank, 2, ranks):
                found["losses"].append(backward(streamed, 10 * number + group))
            streamed.optimizer.step()
            found["texts"] += [batch(streamed.model), one_by_one(streamed.model)]
        with streamed.lent_memory() if lends else contextlib.nullcontext():
            assert streamed._session.store.loan.is_lent == lends
            found["checksums"] = streamed.weights().checksums()
            pairs = iter(streamed.weights())
            next(pairs)
        found["losses"] = sorted(chain.from_iterable(streamed.all_of(found["losses"])))
        found["weights"] = {name: weight.numpy().tobytes() for name, weight in streamed.state_dict().items()}
    return found


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("place", list(BUDGETS))
def test_ranks_that_lend_their_memory_have_the_texts_weights_and_losses_of_one_process(
    place: str, device: str, tmp_path: Path
) -> None:
    """Weights at home in each tier, of which each rank has a shard, with trained and frozen elements in one unit."""
    (alone,) = POOL.run(shared_run, 1, tmp_path, place, device, False)
    assert alone["texts"][0] == alone["texts"][1]
    assert POOL.run(shared_run, 2, tmp_path, place, device, True) == [alone, alone]


def own_texts(mount: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of prompts of a rank's own, and of all."""
    with opened(mount, "gpu") as streamed:
        streamed.lends_memory = True
        return batch(streamed.model, PROMPTS[streamed.rank :]), one_by_one(streamed.model)


def test_each_rank_makes_texts_of_its_own_in_memory_that_is_lent(tmp_path: Path) -> None:
    (own, texts), (others, same_texts) = POOL.run(own_texts, 2, tmp_path)
    assert own == texts == same_texts
    assert others == texts[1:]


def fault_on_one(mount: Path, fault: str) -> tuple[str, bool, float]:
    """What a rank is told, whether its memory is lent still, and a loss after that, if there is one."""
    told, is_lent, loss = "", True, 0.0
    try:
        with (
            opened(mount, "gpu", **OF_RANKS["nvme" if fault == "unreadable" else "gpu"]) as streamed,
            pytest.MonkeyPatch.context() as patch,
        ):
            step(streamed, 1)
            if streamed.rank == 1 and fault == "no RAM":
                patch.setattr(loan, "ram_available_bytes", lambda: 1000)
            try:
                with streamed.lent_memory():
                    if streamed.rank == 1 and fault == "unreadable":
                        patch.setattr(RamWeights, "_copy_run", unreadable)
                    with streamed.held_weights():
                        if streamed.rank == 1 and fault == "engine":
                            raise ValueError("the engine died")
                        one_by_one(streamed.model)
            except CapacityError as error:
                told = str(error)
            finally:
                is_lent = streamed._session.store.loan.is_lent
            loss = step(streamed, 2)
    except (ValueError, PeerError, TransferError) as error:
        told = f"{type(error).__name__}: {error}"
    return told, is_lent, loss


def unreadable(*_: object) -> None:
    raise TransferError("Reading", "nvme", "a block file", 0, errno.EIO)


def test_a_rank_without_room_for_its_state_keeps_all_from_lending_and_training_goes_on(tmp_path: Path) -> None:
    (told, is_lent, loss), other = POOL.run(fault_on_one, 2, tmp_path, "no RAM")
    assert "state in RAM while its memory is lent" in told
    assert not is_lent
    assert loss > 0
    assert other == (told, is_lent, loss)


@pytest.mark.parametrize(
    ("fault", "error"), [("engine", "the engine died"), ("unreadable", "Reading failed on tier nvme")]
)
def test_a_rank_that_fails_while_memory_is_lent_ends_all_with_that_error_and_the_memory_is_back(
    fault: str, error: str, tmp_path: Path
) -> None:
    (first, is_lent, _), (second, was_lent, _) = POOL.run(fault_on_one, 2, tmp_path, fault)
    assert not (is_lent or was_lent)
    assert first.startswith("PeerError: ")
    assert error in first
    assert error in second
    assert not second.startswith("PeerError")
