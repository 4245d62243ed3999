"""Arguments of the Trainer in random combinations: MegatierTrainer has the numbers of the plain Trainer in fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from tiny_runs import exactness_config, plain_model
from trainer_runs import Rows, arguments
from transformers import Trainer, TrainingArguments

import megatier

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer

STEPS = 4
SAVED = 2
"""The step whose checkpoint a run goes on from."""
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "constant"},
    {"lr_scheduler_type": "constant_with_warmup"},
    {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.7}},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    {"lr_scheduler_type": "inverse_sqrt"},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 1}},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "eval_strategy": "steps"},
    {"lr_scheduler_type": "greedy", "eval_strategy": "steps"},
)
CHECKPOINTING = min({"activation_checkpointing", "gradient_checkpointing"} & vars(TrainingArguments).keys())
"""The name of this flag in the installed version."""
STRATEGIES = TrainingArguments.__dataclass_fields__["train_sampling_strategy"].metadata.get("choices", ())
"""Those of the installed version."""
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "schedule": SCHEDULES,
    "length": ({"max_steps": STEPS}, {"max_steps": STEPS, "num_train_epochs": 1}, {"num_train_epochs": 0.4}),
    "accumulation": tuple({"gradient_accumulation_steps": n} for n in (1, 2, 3)),
    "warmup": tuple({"warmup_steps": n} for n in (0, 1, 0.5)),
    "clip": tuple({"max_grad_norm": norm} for norm in (0.0, 0.3, 1.0, 100.0)),
    "adam": ({"weight_decay": 0.0, "adam_beta1": 0.8}, {"weight_decay": 0.1, "adam_beta2": 0.9}),
    "smoothing": ({}, {"label_smoothing_factor": 0.1}),
    "noise": ({}, {}, {"neftune_noise_alpha": 5.0}),
    "rows": (
        {},
        *({"train_sampling_strategy": strategy} for strategy in STRATEGIES),
        {"data_seed": 7},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"accelerator_config": {"dispatch_batches": True}},
    ),
    "loader": ({}, {"dataloader_drop_last": True}, {"average_tokens_across_devices": False}, {"use_cache": True}),
    "evaluation": (
        {},
        {"eval_strategy": "steps", "eval_on_start": True},
        {"eval_strategy": "steps", "prediction_loss_only": True},
        {"eval_strategy": "steps", "load_best_model_at_end": True, "save_strategy": "steps"},
        {"save_strategy": "steps"},
    ),
    "other": ({}, {CHECKPOINTING: True}, {"torch_empty_cache_steps": 1}, {"full_determinism": True}),
}
MODELS = ("plain", "tied", "moe")
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "num_input_tokens_seen")


def combination(seed: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A model, arguments of a trainer, and arguments of `megatier.stream`."""
    draw = random.Random(seed)
    options: dict[str, Any] = {
        "adam_epsilon": 1e-6,
        "include_num_input_tokens_seen": "all",
        "per_device_eval_batch_size": 2,
        "seed": seed,
    }
    for values in AXES.values():
        options |= draw.choice(values)
    options.setdefault("max_steps", -1)
    if options.get("eval_strategy") == "steps":
        options["eval_steps"] = options["save_steps"] = SAVED // 2
    options["save_steps"] = options.get("save_steps", SAVED)
    fuses = draw.random() < 0.5 and not options.get("label_smoothing_factor")
    policy = draw.choice(("keep", "recompute"))
    name = draw.choice(MODELS)
    if name == "moe":  # a last digit may send a token to another expert, so all digits have to be equal
        options["max_grad_norm"] = 0.0
        fuses = False
        # The plain Trainer loses the experts when it loads a checkpoint: it saves each one, and loads stacks.
        options.update(save_strategy="no", load_best_model_at_end=False)
    return name, options, {"fused_loss": fuses, "activations": policy}


def history(trainer: Trainer) -> list[dict[str, float]]:
    """What was logged and depends on the numbers."""
    return [
        {name: entry[name] for name in ("step", "epoch", *COMPARED) if name in entry}
        for entry in trainer.state.log_history
    ]


def compare(seed: int, folder: Path) -> None:
    """Train both, go on from a checkpoint if there is one, and compare what they log and their weights."""
    name, options, chosen = combination(seed)
    is_saved = options.get("save_strategy") == "steps" and not options.get("load_best_model_at_end")
    for is_resumed in (False, True)[: 1 + is_saved]:
        found, weights = [], []
        for kind in ("plain", "streamed"):
            args = arguments(folder / kind, **options)
            source = plain_model(exactness_config(name))
            data: dict[str, Any] = {"train_dataset": Rows(24), "eval_dataset": Rows(5)}
            checkpoint = str(folder / kind / f"checkpoint-{SAVED}") if is_resumed else None
            if kind == "plain":
                betas = (args.adam_beta1, args.adam_beta2)
                own = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "ram": "64MiB"}
                plain = Trainer(source, args, optimizer_cls_and_kwargs=(megatier.TieredAdamW, own), **data)
                plain.train(resume_from_checkpoint=checkpoint)
                close_optimizer(plain)
                found.append(history(plain))
                weights.append(dict(plain.model.named_parameters()))  # type: ignore[union-attr]
                continue
            groups = options["gradient_accumulation_steps"]
            with megatier.stream(
                source, tiers=TIERS, accumulation_steps=groups, compute_dtype="fp32", **chosen
            ) as made:
                trainer = MegatierTrainer(made, args, **data)
                trainer.train(resume_from_checkpoint=checkpoint)
                found.append(history(trainer))
                weights.append(made.state_dict())
        where = f"seed {seed}: {name}, {options}, {chosen}, resumed: {is_resumed}"
        assert len(found[0]) == len(found[1]) > 1, where
        is_exact = not options["max_grad_norm"] and not chosen["fused_loss"]
        for expected, given in zip(*found, strict=True):
            # torch adds the squares of a norm up in fp32.
            norms = expected.pop("grad_norm", 0.0), given.pop("grad_norm", 0.0)
            assert norms[1] == pytest.approx(norms[0], rel=1e-6), where
            assert given == (expected if is_exact else pytest.approx(expected, rel=1e-6)), where
        limit = 0.0 if is_exact else 1e-6
        assert not {
            key: far
            for key, value in weights[0].items()
            if (far := float((weights[1][key] - value.detach()).abs().max())) > limit
        }, where


@pytest.mark.parametrize("seed", range(5))
def test_trainer_with_random_arguments_has_the_numbers_of_the_plain_one(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 60))
def test_trainer_with_many_random_arguments_has_the_numbers_of_the_plain_one(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)
