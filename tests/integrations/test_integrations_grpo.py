"""TRL's GRPOTrainer over a streamed model, whose completions stream as well, against itself over a plain one."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import POOL
from small_optimizers import close_optimizer
from streamed_loops import TIERS, same
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import Tensor
from trainer_runs import logged
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, set_seed

import megatier
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import ConfigError
from megatier.tier import Tier

pytest.importorskip("trl")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import datasets
import trl
from accelerate import state

from megatier.integrations.trl_trainer import StreamedTrl

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
PLAIN: Any = trl.GRPOTrainer
STREAMED: Any = type("StreamedGrpo", (StreamedTrl, PLAIN), {})


def reward(completions: list[str], **_: object) -> list[float]:
    """How many different characters a completion has."""
    return [float(len(set(text))) for text in completions]


def trainer(kind: Any, model: Any, folder: Path, device: str = "cpu", steps: int = 10, **options: Any) -> Trainer:
    """A trainer for some steps of two backwards, each over four completions of one prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    args = trl.GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        bf16=False,
        **options,
    )
    rows = datasets.Dataset.from_list([{"prompt": f"say {number}"} for number in range(24)])
    made: Trainer = kind(model, reward, args=args, train_dataset=rows, processing_class=tokenizer)
    return made


def figures(made: Trainer) -> list[list[float]]:
    """Losses, norms and rewards of the steps of a run with seeded completions."""
    set_seed(3)
    made.train()
    return [logged(made, name) for name in ("loss", "grad_norm", "reward")]


class ExactNorms(TrainerCallback):
    """Adds up the squares of a plain model's gradients in fp64; torch, and so the trainer's log, does so in fp32."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [parameter.grad for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        self.norms.append(math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads)))


def saved(folder: Path) -> str:
    """The folder of a tiny model."""
    plain_model(tiny_config("llama", vocab_size=320)).save_pretrained(folder / "model")
    return str(folder / "model")


def plain(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("has_adapters", "beta"), [(False, 0.0), (False, 2.0), (True, 0.0)])
def test_grpo_over_a_streamed_model_has_the_losses_and_rewards_of_the_plain_one(
    has_adapters: bool, beta: float, device: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path)
    caplog.set_level(logging.INFO, logger="megatier")

    def model() -> Any:
        if not has_adapters:
            return plain(path)
        peft = pytest.importorskip("peft")
        set_seed(1)
        return peft.get_peft_model(plain(path), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    # With a reference a CPU holds no weights; else free memory takes all that are not at home on the GPU.
    streams = beta and device == "cpu"
    limit = 16 << 20 if device == "cpu" and not streams else None
    tiers = replace(TIERS, device=device, gpu=768 << 10, gpu_limit=limit)
    settings: dict[str, Any] = {"tiers": tiers, "compute_dtype": "fp32", "compile": False}
    settings |= {"fused_loss": False, "accumulation_steps": 2}
    reference = trainer(PLAIN, model(), tmp_path, device, beta=beta)
    # The order of operations in AdamW is megatier's.
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
    reference.optimizer_cls_and_kwargs = (megatier.TieredAdamW, adamw)
    expected = figures(reference)
    close_optimizer(reference)
    with megatier.stream(model() if has_adapters else path, **settings) as streamed:
        found = figures(trainer(STREAMED, streamed, tmp_path, device, beta=beta))
    (message,) = [message for message in caplog.messages if message.startswith("generation")]
    assert message.startswith("generation streams" if streams else "generation: all weights are resident")
    losses, norms, rewards = found
    assert [losses, rewards] == [expected[0], expected[2]]
    assert norms == pytest.approx(expected[1], rel=1e-5), "torch adds up squares in fp32"


LOOP: dict[str, Any] = {"compute_dtype": "fp32", "compile": False, "fused_loss": False, "accumulation_steps": 2}
BATCHES: dict[str, Any] = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
}
SMALL_GPU = 640 << 10
BUDGETS: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": 8 << 20},
    "ram": {"gpu": SMALL_GPU},
    "nvme": {"gpu": SMALL_GPU, "ram": 2 << 20},
}


def run_over(place: str, path: str, folder: Path, *, lends: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Figures of a run with state in that tier, and the weights after it."""
    # Without a loan a CPU has no room for weights, so they stream for each token.
    limit = 4 << 20 if lends else None
    tiers = replace(TIERS, nvme=(f"{folder}:32MiB",), gpu_limit=limit, **BUDGETS[place])
    with megatier.stream(path, tiers=tiers, **LOOP) as streamed:
        assert Tier(place) in streamed._session.placement.homes.values()
        streamed.lends_memory = lends
        return figures(trainer(STREAMED, streamed, folder)), streamed.state_dict()


def test_grpo_has_the_same_bits_over_placements_and_with_memory_lent_and_the_figures_of_the_plain_trainer(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path)
    reference = trainer(PLAIN, plain(path), tmp_path)
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
    reference.optimizer_cls_and_kwargs = (megatier.TieredAdamW, adamw)
    exact = ExactNorms()
    reference.add_callback(exact)
    expected, _, rewards = figures(reference)
    close_optimizer(reference)

    run, weights = run_over("gpu", path, tmp_path, lends=True)
    for place, lends in (("ram", False), ("nvme", False), ("nvme", True)):
        other, its_weights = run_over(place, path, tmp_path, lends=lends)
        assert other == run
        assert same(its_weights, weights)
    assert run[0] == pytest.approx(expected, abs=1e-6)
    assert run[1] == pytest.approx(exact.norms, rel=1e-6)
    assert run[2] == rewards
    assert len(set(rewards)) > 1


def test_grpo_makes_completions_by_continuous_batching_in_memory_that_is_lent(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tiers = replace(TIERS, gpu=SMALL_GPU, gpu_limit=4 << 20)
    with megatier.stream(path, tiers=tiers, **LOOP) as streamed:
        with pytest.raises(ConfigError, match="use_transformers_continuous_batching: completions are made every 3"):
            trainer(STREAMED, streamed, tmp_path, steps_per_generation=3, **BATCHES)
        streamed.lends_memory = True
        losses, norms, rewards = figures(trainer(STREAMED, streamed, tmp_path, steps=3, **BATCHES))
        assert streamed.steps == 3
    assert all(norm > 0 for norm in norms)
    assert len(losses) == len(rewards) == 3


def test_grpo_with_a_reference_of_a_model_that_is_not_its_folder_any_more_is_refused(tmp_path: Path) -> None:
    model = plain(saved(tmp_path))
    with (
        megatier.stream(model, tiers=TIERS, compute_dtype="fp32", fused_loss=False) as streamed,
        pytest.raises(ConfigError, match="beta: TRL would load the reference from the folder"),
    ):
        trainer(STREAMED, streamed, tmp_path, beta=0.1)


def grpo_on_ranks(path: str, folder: Path, batches: dict[str, Any], lends: bool) -> Any:
    """Figures and weights of some steps on this rank."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    tiers = replace(TIERS, gpu_limit=64 << 20)
    with megatier.stream(path, tiers=tiers, **LOOP) as streamed:
        streamed.lends_memory = lends
        made = trainer(STREAMED, streamed, folder, steps=3, num_iterations=2, **batches)
        found = figures(made)
        return found, {name: value.numpy() for name, value in streamed.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("batches", [{}, BATCHES])
def test_grpo_on_ranks_that_lend_their_memory_gives_all_of_them_the_same_figures_and_weights(
    batches: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(tmp_path)
    (found, weights), (others, has) = POOL.run(grpo_on_ranks, 2, path, tmp_path, batches, True)
    assert others == found
    assert [len(values) for values in found] == [3, 3, 2], "rewards are logged where texts are made"
    assert [name for name in weights if (has[name] != weights[name]).any()] == []
    if not batches:
        (streams, its_weights), _ = POOL.run(grpo_on_ranks, 2, path, tmp_path, batches, False)
        assert streams == found
        assert [name for name in weights if (its_weights[name] != weights[name]).any()] == []
