"""Generation by a streamed model in memory that training lends, and by transformers' continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
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
from megatier.errors import CapacityError, StreamedModelError, mib
from megatier.integrations.streamed import Streamed
from megatier.store import loan
from megatier.store.arena import Arena

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


def opened(mount: Path, place: str = "ram", dtype: Any = "fp32", device: Any = "cpu") -> Streamed:
    """A tiny model whose weights have room on the GPU if training lends its memory."""
    tiers = replace(TIERS, device=device, gpu_limit=4 << 20, nvme=(f"{mount}:16MiB",), **BUDGETS[place])
    model = plain_model(exactness_config("tied")).eval()
    return megatier.stream(model, tiers=tiers, compute_dtype=dtype, **OPTIONS)


def step(streamed: Streamed, number: int) -> float:
    tokens = torch.randint(160, (4, 16), generator=torch.Generator().manual_seed(number)).to(streamed.device)
    loss: torch.Tensor = streamed.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    streamed.optimizer.step()
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
    assert beside.endswith(f"so a token moves none: {mib(away)} beside the memory of training.")
    assert "in memory that training lends. Its state there, " in lent


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


def on_ranks(mount: Path) -> tuple[str, list[list[int]], list[list[int]], float]:
    """What a rank is told about lending; texts with weights of all ranks, also of prompts of its own; a later loss."""
    with opened(mount, "gpu") as streamed:
        streamed.lends_memory = True
        with pytest.raises(StreamedModelError) as refusal:
            batch(streamed.model)
        streamed.lends_memory = False
        streamed._resident._limit_bytes = 64 << 20
        step(streamed, 1)
        streamed.export(mount / "model")
        own = batch(streamed.model, PROMPTS[streamed.rank :])
        with streamed.held_weights():
            texts = one_by_one(streamed.model)
        return str(refusal.value), own, texts, step(streamed, 2)


@pytest.mark.slow
def test_each_rank_holds_all_weights_and_lending_is_refused_by_name(tmp_path: Path) -> None:
    (told, own, texts, loss), others = POOL.run(on_ranks, 2, tmp_path)
    assert told.startswith("lent_memory() over 2 ranks: they reach into each other's GPU memory")
    assert texts == one_by_one(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval())
    assert own == texts
    assert others == (told, texts[1:], texts, loss)
