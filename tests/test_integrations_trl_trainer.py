"""TRL's SFTTrainer and DPOTrainer over a streamed model, against themselves over a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import POOL
from test_integrations_transformers_trainer import logged, open_streamed
from test_ranks_streamed import open_streamed as ranks_streamed
from tiny_runs import exactness_config, one_thread, plain_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer

from megatier.errors import ConfigError
from megatier.integrations.trl_trainer import StreamedTrl

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
state = pytest.importorskip("accelerate.state")
pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
WORDS = [f"w{n}" for n in range(150)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


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


def run(
    make: Callable[..., Trainer], model: Any, kind: str, folder: Path, steps: int = 2
) -> tuple[list[float], list[float]]:
    """Ten steps of SFT or DPO, each of so many backwards on this rank; losses and norms."""
    config = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[kind](
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=steps,
        max_steps=10,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    rows = texts({"text": 20} if kind == "sft" else {"prompt": 6, "chosen": 8, "rejected": 8})
    extra = {"ref_model": plain_model(exactness_config("plain"))} if kind == "dpo" else {}
    trainer = make(model, args=config, train_dataset=rows, processing_class=tokenizer(), **extra)
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "grad_norm")


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_ten_steps_agree_with_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    plain = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[kind]
    losses, norms = run(plain, plain_model(exactness_config("plain")), kind, tmp_path)
    streamed_class = type("StreamedTrainer", (StreamedTrl, plain), {})
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        found = run(streamed_class, streamed, kind, tmp_path)
    assert len(losses) == 10
    assert found[0][0] == losses[0]
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-6)


def test_trl_over_a_fused_loss_is_refused(tmp_path: Path) -> None:
    streamed_class = type("StreamedTrainer", (StreamedTrl, trl.SFTTrainer), {})
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match="fused_loss=False"):
        streamed_class(streamed)


def run_on_ranks(kind: str, folder: Path) -> Any:
    """The same on this rank, with four backwards on all ranks; and the weights."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    streamed_class = type("StreamedTrainer", (StreamedTrl, {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[kind]), {})
    with ranks_streamed(compute_dtype="fp32", fused_loss=False) as streamed:
        figures = run(streamed_class, streamed, kind, folder, streamed.accumulation_steps)
        return figures, {name: value.numpy() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_on_ranks_has_the_numbers_of_one_process(kind: str, tmp_path: Path) -> None:
    ((figures, weights),) = POOL.run(run_on_ranks, 1, kind, tmp_path / "1")
    for size in (2, 4):
        for found, has in POOL.run(run_on_ranks, size, kind, tmp_path / str(size)):
            assert found == figures
            assert [name for name in weights if (has[name] != weights[name]).any()] == []
