"""Further trainers of TRL over a streamed model: the losses of the plain one, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from test_integrations_grpo import plain, reward, saved
from trainer_runs import logged
from transformers import set_seed

import megatier
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import ConfigError

pytest.importorskip("trl")

import datasets
import trl
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from megatier.integrations.trl_trainer import StreamedTrl

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
ROWS: dict[str, dict[str, Any]] = {
    "prompts": {"prompt": "say {}"},
    "pairs": {"prompt": "say {}", "chosen": " {}", "rejected": " {}!"},
    "chats": {"messages": [{"role": "user", "content": "say {}"}, {"role": "assistant", "content": "{} {}"}]},
}
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def teacher(path: str) -> Any:
    """A model that differs from the one in the folder."""
    model = plain(path)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


CASES: dict[str, tuple[Any, Any, dict[str, Any], str, Callable[[str], dict[str, Any]]]] = {
    "rloo": (
        trl.RLOOTrainer,
        trl.RLOOConfig,
        {"num_generations": 4, "max_completion_length": 5, "gradient_checkpointing": False},
        "prompts",
        lambda _: {"reward_funcs": reward},
    ),
    "online dpo": (
        OnlineDPOTrainer,
        OnlineDPOConfig,
        {"max_new_tokens": 5, "max_length": 40},
        "prompts",
        lambda path: {"reward_funcs": reward, "ref_model": plain(path)},
    ),
    "gkd": (
        GKDTrainer,
        GKDConfig,
        {"max_new_tokens": 5, "lmbda": 0.5},
        "chats",
        lambda path: {"teacher_model": teacher(path)},
    ),
    "orpo": (ORPOTrainer, ORPOConfig, {"max_length": 40}, "pairs", lambda _: {}),
    "cpo": (CPOTrainer, CPOConfig, {"max_length": 40}, "pairs", lambda _: {}),
}


def filled(value: Any, number: int) -> Any:
    """A row with its number in all texts."""
    if isinstance(value, dict):
        return {key: filled(part, number) for key, part in value.items()}
    if isinstance(value, list):
        return [filled(part, number) for part in value]
    return value.replace("{}", str(number))


def trainer(case: str, folder: Path, path: str, model: Any, mixin: tuple[type, ...] = ()) -> Any:
    """A trainer for three steps of two backwards each."""
    kind, config, options, rows, more = CASES[case]
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = CHAT
    args = config(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **options,
    )
    data = datasets.Dataset.from_list([filled(ROWS[rows], number) for number in range(24)])
    set_seed(2)
    own = type("Streamed", (*mixin, kind), {}) if mixin else kind
    return own(model, args=args, processing_class=tokenizer, train_dataset=data, **more(path))


def figures(made: Any) -> tuple[list[float], list[float]]:
    """Losses and norms of a run with seeded completions."""
    set_seed(3)
    made.train()
    return logged(made, "loss"), logged(made, "grad_norm")


@pytest.mark.parametrize(
    "case",
    ["orpo", "cpo", *(pytest.param(case, marks=pytest.mark.slow) for case in ("rloo", "gkd", "online dpo"))],
)
def test_trainer_over_a_streamed_model_has_the_losses_of_the_plain_one(case: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    reference = trainer(case, tmp_path, path, plain(path))
    # The order of operations in AdamW is megatier's.
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
    reference.optimizer_cls_and_kwargs = (megatier.TieredAdamW, adamw)
    losses, norms = figures(reference)
    close_optimizer(reference)
    options: dict[str, Any] = {"tiers": TIERS, "compute_dtype": "fp32", "compile": False, "fused_loss": False}
    with megatier.stream(path, accumulation_steps=2, **options) as streamed:
        found = figures(trainer(case, tmp_path, path, streamed, (StreamedTrl,)))
    assert len(set(losses)) == 3
    assert found[0] == losses
    assert found[1] == pytest.approx(norms, rel=1e-5), "torch adds up squares in fp32"


@pytest.mark.parametrize(
    ("kind", "config", "options", "said"),
    [
        (trl.DistillationTrainer, trl.DistillationConfig, {}, "DistillationTrainer over a streamed model: it computes"),
        (AsyncGRPOTrainer, AsyncGRPOConfig, {}, "AsyncGRPOTrainer over a streamed model: it sends the model's own"),
        (OnlineDPOTrainer, OnlineDPOConfig, {}, "OnlineDPOTrainer would copy the model for its reference"),
        (
            OnlineDPOTrainer,
            OnlineDPOConfig,
            {"use_vllm": True},
            "use_vllm: vLLM gets the weights of a streamed model under StreamedTrl with GRPOTrainer and RLOOTrainer",
        ),
    ],
)
def test_trainer_that_a_streamed_model_does_not_serve_is_refused_before_it_is_opened(
    kind: Any, config: Any, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    args = config(output_dir=str(tmp_path / "run"), report_to=[], bf16=False, **options)
    more = {"ref_model": plain(saved(tmp_path))} if options else {}
    streamed: Any = type("Streamed", (StreamedTrl, kind), {})
    with pytest.raises(ConfigError, match=said):
        streamed(str(tmp_path / "nothing"), args=args, tiers=TIERS, **more)
