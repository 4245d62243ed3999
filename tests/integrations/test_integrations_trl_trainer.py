"""TRL's SFTTrainer, DPOTrainer and KTOTrainer over a streamed model, against themselves over a plain one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_loops import open_streamed as ranks_streamed
from rank_pool import POOL
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from tiny_runs import exactness_config, plain_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import logged, open_streamed
from transformers import PreTrainedTokenizerFast, Trainer, set_seed

import megatier
from megatier.compute.token_tiles import TiledModule
from megatier.errors import AbsentWeightError, ConfigError
from megatier.integrations.streamed import Streamed

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")

import datasets
import trl
from accelerate import state

from megatier.integrations.trl_trainer import StreamedTrl

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
WORDS = [f"w{n}" for n in range(150)]
TRAINERS: dict[str, Any] = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "kto": trl.KTOTrainer}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
"""Settings of a plain trainer's `TieredAdamW`, which has megatier's order of operations."""
CONFIGS: dict[str, Any] = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig}
COLUMNS = {
    "sft": {"text": 20},
    "dpo": {"prompt": 6, "chosen": 8, "rejected": 8},
    "kto": {"prompt": 6, "completion": 8},
}


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def texts(columns: dict[str, int]) -> Any:
    """Forty rows with so many random words in each column."""
    generator = torch.Generator().manual_seed(5)

    def words(count: int) -> str:
        return " ".join(WORDS[n] for n in torch.randint(0, len(WORDS), (count,), generator=generator))

    rows = {name: [words(n) for _ in range(40)] for name, n in columns.items()}
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(rows), fingerprint=str(columns))


def build(make: Callable[..., Trainer], model: Any, kind: str, folder: Path, **options: Any) -> Trainer:
    """A trainer for ten steps of SFT, DPO or KTO. Options in `given` are those of its constructor."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "max_length": 32,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    given = options.pop("given", {})
    config = CONFIGS[kind](output_dir=str(folder), **{**chosen, **options})
    rows = texts(COLUMNS[kind])
    if kind == "kto":
        rows = rows.add_column("label", [number % 2 == 0 for number in range(len(rows))])
    extra = {"train_dataset": rows, "processing_class": tokenizer()}
    if kind != "sft" and "ref_model" not in given:
        extra["ref_model"] = plain_model(exactness_config("plain"))
    return make(model, args=config, **{**extra, **given})


def run(
    make: Callable[..., Trainer], model: Any, kind: str, folder: Path, **options: Any
) -> tuple[list[float], list[float]]:
    """Losses and norms of a trainer's steps."""
    trainer = build(make, model, kind, folder, **options)
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "grad_norm")


def streamed_class(kind: str) -> Any:
    return type("StreamedTrainer", (StreamedTrl, TRAINERS[kind]), {})


def steps_of(trainer: Trainer) -> list[list[float]]:
    """Losses and norms of a run, in which whatever is drawn is seeded."""
    set_seed(3)
    trainer.train()
    return [logged(trainer, "loss"), logged(trainer, "grad_norm")]


def check_takes_the_same_steps(plain: Trainer, trainer: Trainer, streamed: Streamed) -> None:
    """Losses and weights are equal. Norms are not: torch adds their squares up in fp32."""
    plain.optimizer_cls_and_kwargs = (megatier.TieredAdamW, ADAMW)
    expected, found = steps_of(plain), steps_of(trainer)
    close_optimizer(plain)
    assert len(found[0]) == 10
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-6)

    assert plain.model is not None
    weights = {name.removeprefix("base_model.model."): value for name, value in plain.model.named_parameters()}
    state = streamed.state_dict()
    assert weights.keys() == state.keys()
    assert [name for name, value in weights.items() if not torch.equal(state[name], value.cpu())] == []


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_trl_ten_steps_agree_with_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    losses = compare(kind, tmp_path)
    assert len(losses) == 10


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_trl_on_a_gpu_takes_the_steps_of_the_plain_trainer_bit_for_bit(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_cpu": False, "max_grad_norm": 0.0}
    plain = build(TRAINERS[kind], plain_model(exactness_config("plain")), kind, tmp_path / "plain", **options)
    with open_streamed(tmp_path, "cuda", fused_loss=False, compile=False) as streamed:
        check_takes_the_same_steps(plain, build(streamed_class(kind), streamed, kind, tmp_path, **options), streamed)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_over_adapters_agrees_with_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = plain_model(exactness_config("plain"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(plain, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)

    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "accumulation_steps": 2, "clip": 0.5}
    with megatier.stream(model, tiers=TIERS, **options) as streamed:
        found = run(streamed_class(kind), streamed, kind, tmp_path / "streamed")
    expected = run(TRAINERS[kind], model, kind, tmp_path / "plain")
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


def compare(kind: str, folder: Path, **options: Any) -> list[float]:
    """The losses, which with and without megatier are the same."""
    plain = TRAINERS[kind]
    losses, norms = run(plain, plain_model(exactness_config("plain")), kind, folder, **options)
    with open_streamed(folder, fused_loss=False) as streamed:
        found = run(streamed_class(kind), streamed, kind, folder, **options)
    assert found[0][0] == losses[0]
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-6)
    return losses


def test_trl_ten_steps_in_tiles_of_tokens_agree_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TiledModule.backward
    tiled = list[TiledModule]()

    def note(module: TiledModule, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        tiled.append(module)
        return backward(module, *args, **kwargs)

    monkeypatch.setattr(TiledModule, "backward", note)
    losses, norms = run(trl.SFTTrainer, plain_model(exactness_config("plain")), "sft", tmp_path)
    with open_streamed(tmp_path, fused_loss=False, tile_tokens=20) as streamed:
        found = run(streamed_class("sft"), streamed, "sft", tmp_path)
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    assert len(tiled) == 10 * 2 * len(set(tiled)) > 0, "from the first forward on"


# ---------------------------------------------------------------------- the table of options in docs/trainers.md


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1}
WORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions alone": ("sft", {"given": {"train_dataset": {"prompt": 6, "completion": 8}}}),
    "packing": ("sft", {"packing": True}),
    "dft": ("sft", {"loss_type": "dft"}),
    "noise": ("sft", {"neftune_noise_alpha": 5.0}),
    "ipo": ("dpo", {"loss_type": "ipo"}),
    "reference in advance": ("dpo", {"precompute_ref_log_probs": True}),
    "reference that follows": (
        "dpo",
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.9},
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_trl_option_works_as_with_a_plain_model(name: str, tmp_path: Path) -> None:
    kind, options = WORKS[name]
    given = dict(options.get("given", {}))
    if "train_dataset" in given:
        given["train_dataset"] = texts(given["train_dataset"])
    losses = compare(kind, tmp_path, **{**options, "given": given, "max_steps": 4})
    assert len(losses) == 4


def test_trl_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    found = []
    for is_on in (True, False):
        with open_streamed(tmp_path, fused_loss=False) as streamed:
            options = {"gradient_checkpointing": is_on, "max_steps": 2}
            found.append(run(streamed_class("sft"), streamed, "sft", tmp_path, **options))
    assert found[0] == found[1]


def test_trl_bf16_over_a_model_that_computes_in_bf16_changes_nothing(tmp_path: Path) -> None:
    found = []
    for is_on in (True, False):
        with open_streamed(tmp_path, fused_loss=False, compute_dtype=torch.bfloat16) as streamed:
            found.append(run(streamed_class("sft"), streamed, "sft", tmp_path, bf16=is_on, max_steps=2))
    assert found[0] == found[1]


def test_trl_reference_of_sync_follows_the_masters(tmp_path: Path) -> None:
    options = SYNC | {"ref_model_mixup_alpha": 1.0, "max_steps": 2}
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        trainer: Any = build(streamed_class("dpo"), streamed, "dpo", tmp_path, **options)
        trainer.train()
        for name, parameter in trainer.ref_model.named_parameters():
            assert torch.equal(parameter, streamed.read(name))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "smoothing": ("sft", {"label_smoothing_factor": 0.1}, "label_smoothing_factor: TRL makes a second forward"),
    "own loss": ("sft", {"given": {"compute_loss_func": print}}, "compute_loss_func: TRL makes a second forward"),
    "adapters": ("sft", {"given": {"peft_config": object()}}, "has opened this model already. Give it peft_config"),
    "fsdp": ("sft", {"fsdp": "full_shard"}, "fsdp and deepspeed place the weights"),
    "optimizer": ("sft", {"optim": "adamw_8bit"}, "^optim is adamw_8bit; a streamed model has AdamW"),
    "compile": ("sft", {"torch_compile": True}, "pass compile=True to megatier.stream"),
    "no rows": ("sft", {"given": {"train_dataset": []}}, "train_dataset has no rows"),
    "named reference": (
        "dpo",
        {"given": {"ref_model": "folder"}},
        r"from_pretrained\('folder'\)",
    ),
    "no reference": ("dpo", {"given": {"ref_model": None}}, "does not come from there as it is now. Give ref_model"),
    "no reference in advance": (
        "dpo",
        {"precompute_ref_log_probs": True, "given": {"ref_model": None}},
        "precompute_ref_log_probs without ref_model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_trl_option_that_a_streamed_model_cannot_follow_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, options, message = REFUSED[name]
    with open_streamed(tmp_path, fused_loss=False) as streamed, pytest.raises(ConfigError, match=message):
        build(streamed_class(kind), streamed, kind, tmp_path, **options)


def test_trl_arguments_that_open_a_model_are_refused_with_a_folder(tmp_path: Path) -> None:
    arguments = {"model_init_kwargs": {"dtype": "float32", "revision": "other"}}
    with pytest.raises(ConfigError, match="model_init_kwargs has revision 'other': megatier opens the model"):
        build(streamed_class("sft"), tmp_path, "sft", tmp_path, **arguments)
    with pytest.raises(ConfigError, match="quantization_config: TRL would quantise"):
        build(streamed_class("sft"), tmp_path, "sft", tmp_path, given={"quantization_config": {"bits": 4}})


def test_trl_arguments_that_trls_scripts_give_a_folder_are_taken(tmp_path: Path) -> None:
    plain_model(exactness_config("plain")).save_pretrained(tmp_path / "model")
    arguments = {"revision": "main", "trust_remote_code": False, "attn_implementation": None, "dtype": "float32"}
    given = {"tiers": TIERS}
    options = {"model_init_kwargs": arguments, "given": given}
    trainer = build(streamed_class("sft"), str(tmp_path / "model"), "sft", tmp_path, **options)
    with cast("Any", trainer).streamed as streamed:
        assert streamed.model.dtype == torch.float32
        trainer.args.max_steps = 1
        trainer.train()


def test_trl_dpo_from_a_folder_compares_with_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    plain_model(exactness_config("plain")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    found = []
    for given in ({}, {"ref_model": None}):
        with megatier.stream(
            folder, tiers=TIERS, accumulation_steps=2, compute_dtype="fp32", fused_loss=False
        ) as model:
            options = {"max_steps": 2, "given": given}
            found.append(run(streamed_class("dpo"), model, "dpo", tmp_path, **options))
            with pytest.raises(ConfigError, match="Give ref_model"):
                build(streamed_class("dpo"), model, "dpo", tmp_path, given={"ref_model": None})
    assert found[0] == found[1]


def test_trl_rows_that_make_no_whole_steps_are_left_out_on_request(tmp_path: Path) -> None:
    rows = texts({"text": 20}).select(range(13))
    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "given": {"train_dataset": rows}}
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        with pytest.raises(ConfigError, match=r"13 rows, 7 batches .* takes 4 rows .* leaves 1 row out"):
            run(streamed_class("sft"), streamed, "sft", tmp_path, **options)
        losses, _ = run(streamed_class("sft"), streamed, "sft", tmp_path, dataloader_drop_last=True, **options)
    assert len(losses) == 6


def test_trl_over_a_fused_loss_is_refused(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match="fused_loss=False"):
        streamed_class("sft")(streamed)


def test_trl_without_the_mixin_or_after_it_names_the_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the mixin comes first, class Bad\(StreamedTrl, SFTTrainer\)"):
        type("Bad", (trl.SFTTrainer, StreamedTrl), {})
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        with pytest.raises(AttributeError, match=r"class Mine\(StreamedTrl, SFTTrainer\)"):
            build(trl.SFTTrainer, streamed, "sft", tmp_path)
        with pytest.raises(ConfigError, match="give the Streamed itself"):
            build(streamed_class("sft"), streamed.model, "sft", tmp_path)
        with pytest.raises(AbsentWeightError, match="StreamedTrl for those of TRL"):
            build(trl.SFTTrainer, streamed.model, "sft", tmp_path).train()


def run_on_ranks(kind: str, folder: Path, has_adapters: bool = False) -> Any:
    """The same on this rank, with four backwards on all ranks; and the weights."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    more: dict[str, Any] = {}
    if has_adapters:
        more["peft_config"] = importlib.import_module("peft").LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    with ranks_streamed(compute_dtype="fp32", fused_loss=False, **more) as streamed:
        figures = run(
            streamed_class(kind), streamed, kind, folder, gradient_accumulation_steps=streamed.accumulation_steps
        )
        return figures, {name: value.numpy() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "has_adapters", "sizes"),
    [
        ("sft", False, (2, 4)),
        ("dpo", False, (2, 4)),
        pytest.param("dpo", True, (2,), marks=pytest.mark.slow),
    ],
)
def test_trl_on_ranks_has_the_numbers_of_one_process(
    kind: str, has_adapters: bool, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    if has_adapters:
        pytest.importorskip("peft")
    ((figures, weights),) = POOL.run(run_on_ranks, 1, kind, tmp_path / "1", has_adapters)
    for size in sizes:
        for found, has in POOL.run(run_on_ranks, size, kind, tmp_path / str(size), has_adapters):
            assert found == figures
            assert [name for name in weights if (has[name] != weights[name]).any()] == []


@pytest.mark.slow
def test_trl_kto_on_ranks_has_nearly_the_numbers_of_one_process(tmp_path: Path) -> None:
    """TRL's estimate of the divergence is a mean over the rows of all ranks, so it is another one."""
    ((alone, _),) = POOL.run(run_on_ranks, 1, "kto", tmp_path / "1")
    (figures, weights), (other, has) = POOL.run(run_on_ranks, 2, "kto", tmp_path / "2")
    assert other == figures
    assert [name for name in weights if (has[name] != weights[name]).any()] == []
    for found, expected in zip(figures, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-2)
