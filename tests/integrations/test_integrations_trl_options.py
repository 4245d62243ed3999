"""Options of TRL's configs: a streamed model has the numbers of a plain one in fp32, or the option is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import exactness_config, plain_model

from megatier.errors import ConfigError

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")

import datasets
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from test_integrations_grpo import PLAIN as GRPO
from test_integrations_grpo import STREAMED as STREAMED_GRPO
from test_integrations_grpo import figures, plain, saved
from test_integrations_grpo import trainer as grpo_trainer
from test_integrations_trl_trainer import TRAINERS, build, compare, run, streamed_class, texts, tokenizer
from trainer_runs import open_streamed

import megatier

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} </s> "
    "{% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


def chats(_: Path) -> dict[str, Any]:
    """Conversations, and a tokenizer whose template marks the assistant's turns."""
    rows = texts({"user": 5, "assistant": 7})
    made = [
        {"messages": [{"role": role, "content": row[role]} for role in ("user", "assistant")]} for row in rows.to_list()
    ]
    named = tokenizer()
    named.chat_template = CHAT
    return {"train_dataset": datasets.Dataset.from_list(made), "processing_class": named}


def pairs(_: Path) -> dict[str, Any]:
    return {"train_dataset": texts({"prompt": 6, "completion": 8})}


SFT: dict[str, dict[str, Any]] = {
    "padding_free": {"padding_free": True, "max_length": None},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 16, "dataloader_drop_last": True},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "max_length": 12, "shuffle_dataset": True},
    "truncated": {"max_length": 9, "truncation_mode": "keep_start", "pad_to_multiple_of": 8},
    "cut at the start": {"max_length": 9, "truncation_mode": "keep_end"},
    "all of a completion's rows": {"completion_only_loss": False, "rows": pairs},
    "dft over completions": {"loss_type": "dft", "completion_only_loss": True, "rows": pairs},
    "assistant_only_loss": {"assistant_only_loss": True, "rows": chats},
    "end and fill": {"eos_token": "w3", "pad_token": "w4", "dataset_num_proc": 1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_packing": True, "eval_on_start": True},
}
DPO: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name}
        for name in ("hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired")
    },
    **{name: {"loss_type": name} for name in ("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")},
    "weighted": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "use_weighting": {"use_weighting": True},
    "lengths": {"ld_alpha": 0.5, "max_length": 12, "beta": 0.3},
    "forward_kl": {"f_divergence_type": "forward_kl", "disable_dropout": False},
    "js": {"f_divergence_type": "js_divergence", "pad_to_multiple_of": 8},
    "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3, "padding_free": True},
    "in advance": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 5},
}
DPO["robust"]["label_smoothing"] = 0.1
DPO["exo_pair"]["label_smoothing"] = 0.01
KTO: dict[str, dict[str, Any]] = {
    "weights": {"desirable_weight": 0.7, "undesirable_weight": 1.3, "beta": 0.3, "disable_dropout": False},
    "apo": {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random", "max_length": 10},
    "in advance": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 5},
    "sync": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
}
CASES = [(kind, name) for kind, cases in (("sft", SFT), ("dpo", DPO), ("kto", KTO)) for name in cases]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_trl_option_has_the_numbers_of_the_plain_trainer(kind: str, name: str, tmp_path: Path) -> None:
    options = dict({"sft": SFT, "dpo": DPO, "kto": KTO}[kind][name])
    rows = options.pop("rows", None)
    given = rows(tmp_path) if rows else {}
    if "eval_strategy" in options:
        given["eval_dataset"] = texts({"text": 12})
    assert len(compare(kind, tmp_path, max_steps=2, given=given, **options)) == 2


GRPO_CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "iterations": {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "generations of several steps": {"steps_per_generation": 4},
    "generations within a step": {"steps_per_generation": 1},
    "masked": {"mask_truncated_completions": True, "scale_rewards": "batch", "shuffle_dataset": False},
    "entropies": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "scale_rewards": "none"},
    "adaptive": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 3.0},
    "drawn": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    "generate": {"generation_kwargs": {"min_new_tokens": 2}, "cache_implementation": "static"},
    "off policy": {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "disable_dropout": True},
    "reference": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "use_bias_correction_kl": False},
}


@pytest.mark.parametrize("name", GRPO_CASES)
def test_grpo_option_has_the_numbers_of_the_plain_trainer(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
    reference: Any = grpo_trainer(GRPO, plain(path), tmp_path, **GRPO_CASES[name])
    reference.optimizer_cls_and_kwargs = (megatier.TieredAdamW, adamw)
    reference.args.max_steps = 3
    expected = figures(reference)
    close_optimizer(reference)
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "accumulation_steps": 2}
    with megatier.stream(path, tiers=TIERS, **options) as streamed:
        trainer = grpo_trainer(STREAMED_GRPO, streamed, tmp_path, **GRPO_CASES[name])
        trainer.args.max_steps = 3
        losses, norms, rewards = figures(trainer)
    assert len(losses) == 3
    assert [losses, rewards] == [expected[0], expected[2]]
    assert norms == pytest.approx(expected[1], rel=1e-5)


def test_sft_of_a_mixture_of_experts_adds_its_auxiliary_loss(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "max_grad_norm": 0.0}
    for coefficient in (0.0, 0.3):
        losses, norms = run(
            TRAINERS["sft"],
            plain_model(exactness_config("moe")),
            "sft",
            tmp_path,
            router_aux_loss_coef=coefficient,
            **options,
        )
        settings: dict[str, Any] = {"accumulation_steps": 2, "compute_dtype": "fp32", "fused_loss": False}
        with megatier.stream(plain_model(exactness_config("moe")), tiers=TIERS, **settings) as streamed:
            found = run(streamed_class("sft"), streamed, "sft", tmp_path, router_aux_loss_coef=coefficient, **options)
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation_offloading": ({"activation_offloading": True}, 'pass activations="offload"'),
    "use_liger_kernel": ({"use_liger_kernel": True}, "use_liger_kernel puts other forwards"),
    "chat_template_path": ({"chat_template_path": "org/tokenizer"}, "is a tokenizer, whose tokens TRL would add"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_trl_option_that_changes_weights_is_refused_before_the_trainer_begins(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    with open_streamed(tmp_path, fused_loss=False) as streamed, pytest.raises(ConfigError, match=message):
        build(streamed_class("sft"), streamed, "sft", tmp_path, **options)


def test_trl_template_of_a_file_is_taken(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT, encoding="utf-8")
    given = chats(tmp_path)
    given["processing_class"].chat_template = None
    assert len(compare("sft", tmp_path, max_steps=1, chat_template_path=str(template), given=given)) == 1


def test_trl_options_that_a_folder_cannot_follow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code: megatier opens the model by the code of transformers"):
        build(streamed_class("sft"), str(tmp_path), "sft", tmp_path, trust_remote_code=True)
    with pytest.raises(ConfigError, match="stream_kwargs has fused_loss"):
        build(streamed_class("sft"), str(tmp_path), "sft", tmp_path, given={"stream_kwargs": {"fused_loss": True}})
