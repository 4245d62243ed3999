"""MegatierTrainer on several ranks: the losses, norms, weights and checkpoints of one process that accumulates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_loops import GROUPS, open_streamed
from rank_pool import POOL
from trainer_runs import Rows, arguments, logged

from megatier.errors import ConfigError

state = pytest.importorskip("accelerate.state")

from megatier.integrations.transformers_trainer import MegatierTrainer  # noqa: E402 - needs accelerate

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
SAVES = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


def prepare(folder: Path, options: dict[str, Any]) -> Any:
    """Arguments of this rank, for steps of GROUPS backwards on all ranks."""
    # accelerate keeps for the process what it found in its first run.
    state.AcceleratorState._reset_state(reset_partial_state=True)
    steps = GROUPS // int(os.environ["WORLD_SIZE"])
    return arguments(folder, **{"gradient_accumulation_steps": steps, **SAVES, **options})


def fit(folder: Path, options: dict[str, Any], resumed: str | None = None) -> tuple[dict[str, list[float]], Any]:
    """Train on this rank; what was logged, and the weights."""
    args = prepare(folder / "run", options)
    is_fused = not {"bf16", "label_smoothing_factor"} & options.keys()
    with open_streamed(compute_dtype="fp32", fused_loss=is_fused) as streamed:
        trainer = MegatierTrainer(streamed, args, train_dataset=Rows(64), eval_dataset=Rows(16))
        trainer.train(resume_from_checkpoint=resumed)
        weights = {name: value.numpy() for name, value in streamed.state_dict().items()}
        return {key: logged(trainer, key) for key in LOGGED}, weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of one process that trains with no more options, and what it came to."""
    folder = tmp_path_factory.mktemp("alone")
    (found,) = POOL.run(fit, 1, folder, {})
    return folder, found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of two ranks that train as well, and what they came to."""
    folder = tmp_path_factory.mktemp("two")
    return folder, POOL.run(fit, 2, folder, {})


def resumed(run: Path, folder: Path, size: int, checkpoint: str) -> list[Any]:
    """What ranks come to that go on from a checkpoint of a run. They do so in a copy, since they write there."""
    shutil.copytree(run / "run", folder / f"{size}/run")
    return POOL.run(fit, size, folder / str(size), {}, str(folder / f"{size}/run/{checkpoint}"))


def check(found: list[Any], expected: Any) -> None:
    """Compare what all ranks have with one process."""
    figures, weights = expected
    for own, has in found:
        assert own == figures
        assert [name for name in weights if (has[name] != weights[name]).any()] == []


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (2,)),
        pytest.param({"bf16": True}, (2,), marks=pytest.mark.slow),
        pytest.param({}, (4,), marks=pytest.mark.slow),
        pytest.param({"bf16": True}, (4,), marks=pytest.mark.slow),
        pytest.param({"logging_steps": 3}, (2, 4), marks=pytest.mark.slow),
        pytest.param({"label_smoothing_factor": 0.1}, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_trainer_on_ranks_logs_and_saves_what_one_process_does(
    options: dict[str, Any],
    sizes: Sequence[int],
    tmp_path: Path,
    alone: tuple[Path, Any],
    two: tuple[Path, list[Any]],
) -> None:
    folder, expected = (tmp_path, *POOL.run(fit, 1, tmp_path, options)) if options else alone
    for size in sizes:
        own = tmp_path / str(size)
        place, results = two if size == 2 and not options else (own, POOL.run(fit, size, own, options))
        check(results, expected)
        for name in ("model.safetensors", "trainer_state.json"):
            found = place / "run/checkpoint-4" / name
            assert (
                name != "model.safetensors" or found.read_bytes() == (folder / "run/checkpoint-4" / name).read_bytes()
            )
            assert found.exists()


@pytest.mark.parametrize("size", [1, 4, pytest.param(2, marks=pytest.mark.slow)])
def test_trainer_on_ranks_goes_on_with_any_number_of_ranks_bit_for_bit(
    size: int, two: tuple[Path, list[Any]], tmp_path: Path, alone: tuple[Path, Any]
) -> None:
    check(resumed(two[0], tmp_path, size, "checkpoint-2"), alone[1])


def go_on_with_other_groups(folder: Path) -> str:
    """What the Trainer says on this rank to a checkpoint of steps of GROUPS backwards, if steps have twice as many."""
    args = prepare(folder / "run", {"gradient_accumulation_steps": GROUPS})
    with open_streamed(compute_dtype="fp32", accumulation_steps=GROUPS) as streamed:
        trainer = MegatierTrainer(streamed, args, train_dataset=Rows(64), eval_dataset=Rows(16))
        with pytest.raises(ConfigError) as error:
            trainer.train(resume_from_checkpoint=str(folder / "run/checkpoint-2"))
    return str(error.value)


def test_trainer_refuses_a_checkpoint_whose_steps_had_another_number_of_groups(tmp_path: Path) -> None:
    POOL.run(fit, 1, tmp_path, {"max_steps": 2})
    for found in POOL.run(go_on_with_other_groups, 2, tmp_path):
        assert "its steps had 4 backwards of all ranks, and those of this run have 8" in found
        assert "gradient_accumulation_steps and accumulation_steps to 2" in found


def refuse(folder: Path, num_rows: int, options: dict[str, Any]) -> str:
    """What the Trainer says to rows or arguments on this rank."""
    args = prepare(folder, options)
    with open_streamed(compute_dtype="fp32") as streamed, pytest.raises(ConfigError) as error:
        MegatierTrainer(streamed, args, train_dataset=Rows(num_rows), eval_dataset=Rows(8)).train()
    return str(error.value)


@pytest.mark.parametrize(
    ("num_rows", "options", "message"),
    [
        (63, {}, "63 rows, 16 batches an epoch for each process, and a step of a streamed model takes 8 rows"),
        (12, {}, "12 rows, 3 batches an epoch for each process"),
        (64, {"accelerator_config": {"split_batches": True}}, "split_batches"),
        (64, {"save_on_each_node": True}, "save_on_each_node"),
    ],
)
def test_trainer_on_ranks_refuses_what_they_cannot_share(
    num_rows: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for found in POOL.run(refuse, 2, tmp_path, num_rows, options):
        assert message in found


def fail_loss(folder: Path) -> list[float]:
    """Train with one loss that is not finite on the second rank."""
    args = prepare(folder, {"max_steps": 2, "save_strategy": "no"})

    class Poisoned(MegatierTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found: Any = super().compute_loss(*args, **kwargs)
            is_due = torch.is_grad_enabled() and self.state.global_step == 1 and self.args.process_index == 1
            return found * float("nan") if is_due else found

    with open_streamed(compute_dtype="fp32") as streamed:
        trainer = Poisoned(streamed, args, train_dataset=Rows(64), eval_dataset=Rows(16))
        trainer.train()
        assert streamed.last is not None
        assert streamed.last.skipped
        return logged(trainer, "loss")


def test_loss_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all(tmp_path: Path) -> None:
    first, second = POOL.run(fail_loss, 2, tmp_path)
    assert first == second
    assert all(torch.tensor(first).isfinite())


def evaluate(folder: Path, options: dict[str, Any], counts: tuple[int, ...]) -> list[Any]:
    """Losses, logits, labels and inputs of evaluations and predictions of so many rows, in batches of four."""

    def compute_metrics(prediction: Any) -> dict[str, float]:
        found.append([prediction.predictions, prediction.label_ids, prediction.inputs])
        return {}

    found: list[Any] = []
    options = {"eval_strategy": "no", "per_device_eval_batch_size": 4, "include_for_metrics": ["inputs"], **options}
    args = prepare(folder, options)
    with open_streamed(compute_dtype="fp32", fused_loss=False) as streamed:
        trainer = MegatierTrainer(streamed, args, train_dataset=Rows(64), compute_metrics=compute_metrics)
        for count in counts:
            found.append(trainer.evaluate(Rows(count))["eval_loss"])
            found.append((trainer.predict(Rows(count)).metrics or {})["test_loss"])
    return found


def check_evaluations(size: int, folder: Path, options: dict[str, Any], counts: tuple[int, ...]) -> None:
    """Compare evaluations of so many ranks with those of one process."""
    (alone,) = POOL.run(evaluate, 1, folder, options, counts)
    assert len(alone) >= 2 * len(counts)
    for found in POOL.run(evaluate, size, folder, options, counts):
        for own, expected in zip(found, alone, strict=True):
            if isinstance(expected, float):
                assert own == expected
            else:
                assert all((has == wanted).all() for has, wanted in zip(own, expected, strict=True))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation_on_ranks_counts_each_row_once_where_rows_fill_no_round(size: int, tmp_path: Path) -> None:
    check_evaluations(size, tmp_path, {}, (22, 19, 17, 16, 3))


def test_evaluation_on_ranks_of_losses_alone_counts_each_row_once(tmp_path: Path) -> None:
    check_evaluations(2, tmp_path, {"prediction_loss_only": True, "include_for_metrics": []}, (22, 17, 1))


def test_evaluation_on_ranks_that_drops_a_batch_of_one_process_counts_the_same_rows(tmp_path: Path) -> None:
    check_evaluations(2, tmp_path, {"dataloader_drop_last": True}, (18, 16))


class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Rows that do not say how many they are."""

    def __iter__(self) -> Any:
        return (Rows(3)[number] for number in range(3))


class Flat:
    """Puts the examples of a batch into one row."""

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def refuse_evaluation(folder: Path, options: dict[str, Any], case: str) -> str:
    """What the Trainer says to an evaluation on this rank."""
    args = prepare(folder, {"per_device_eval_batch_size": 4, **options})
    rows = Endless() if case == "endless" else Rows(22)
    extra: dict[str, Any] = {"data_collator": Flat()} if case == "flat" else {}
    with open_streamed(compute_dtype="fp32", fused_loss=False) as streamed, pytest.raises(ConfigError) as error:
        trainer = MegatierTrainer(
            streamed, args, train_dataset=Rows(64), eval_dataset=rows, compute_metrics=lambda _: {}, **extra
        )
        trainer.evaluate()
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "case", "message"),
    [
        ({}, "endless", "Evaluate a dataset with a length"),
        ({"dataloader_drop_last": True}, "", "2 ranks leave 1 batches of the evaluation out"),
        ({}, "flat", "have [1, 1] rows on the ranks, and the dataset has 2 for that of rank 1"),
    ],
)
def test_evaluation_on_ranks_that_would_not_count_each_row_once_is_refused(
    options: dict[str, Any], case: str, message: str, tmp_path: Path
) -> None:
    for found in POOL.run(refuse_evaluation, 2, tmp_path, options, case):
        assert message in found
