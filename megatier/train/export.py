"""Exports trained weights as a Hugging Face folder, at the end of a run or later from one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from megatier.adapters.adapter_folder import export
from megatier.adapters.first_weights import AdaptedWeights
from megatier.adapters.lora import adapter_config
from megatier.adapters.merge import MergedWeights
from megatier.adapters.stored_adapters import read_config
from megatier.checkpoint.checkpoint import UNBOUND, check_moments, is_bound, open_masters, read_state
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    SAVEPOINT_FOLDER,
    find_adapter,
    find_checkpoint,
    last_checkpoint,
    step_of,
    step_path,
)
from megatier.checkpoint.run_state import RunState
from megatier.config.data_section import DataConfig
from megatier.config.file import from_dict
from megatier.config.lora import ADAPTER_FILE
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.processor import load_processor
from megatier.data.tokenizer import load_tokenizer
from megatier.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    ExportError,
    MegatierError,
    StallError,
    mib,
)
from megatier.foreign import one_version, shown
from megatier.models.decoder import Unit, find_units
from megatier.models.export import Tokens
from megatier.report.history import read_what_there_is
from megatier.session.rank_shards import Read
from megatier.session.session import Session
from megatier.setup.skeleton import open_base, open_model
from megatier.setup.workload import COMPUTE_DTYPES
from megatier.train.origin import UNKNOWN, check_origin, differences, exported, origin_of
from megatier.train.outlet import say
from megatier.train.saves import Saves
from megatier.train.watchdog import Tally

SHARD_BYTES = 4 << 30
"""Bytes of a file of weights at most."""


def export_checkpoint(
    console: Console,
    path: Path,
    folder: Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    merges: bool = False,
    base: str | None = None,
    accepts_changes: bool = False,
) -> None:
    """Write the model of a checkpoint. This needs no GPU and no tiers, and never has the model whole in RAM.

    Args:
        console: what a person sees.
        path: a checkpoint, or a run directory, whose last whole checkpoint is taken, or the best one of a run that
            keeps it (`output.load_best_model_at_end`). To merge also a folder of
            adapters, or a run directory that has none but exported ones.
        folder: a new or empty folder.
        dtype: `bf16`, or `fp32` for the masters; None: as the run's `output.export_dtype`, and bf16 for a folder of
            adapters.
        shard_bytes: see `models.export.export`.
        merges: merge adapters into their base, in pieces, so that the folder needs no PEFT.
        base: where the model that the run began with is now; None: where it was, or where the config of a folder of
            adapters says.
        accepts_changes: take the config, buffers and tokenizer that the run's model.path and data.tokenizer give now,
            also if they are not those of the checkpoint, and ask nothing about its moments.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError, CapacityError, TransferError, UnsupportedModelError: see `models.export.export`; or the model that
            the run began with, whose buffers are written too, is gone or is another one now; or there are no adapters
            to merge, or they are for another base.
    """
    # A folder of adapters has their trained weights, and neither a checkpoint nor the state of a run.
    adapter = find_adapter(path) if merges else None
    checkpoint = state = None
    if adapter is not None:
        config = _config_of(adapter, base)
    else:
        checkpoint, state = _chosen(path)
        config = _moved(from_dict(state.config), base)
    if merges and config.model.lora is None:
        raise ConfigError(f"--merge: {path} has no adapters. Leave it out.")

    say(console, f"from {checkpoint or adapter}")
    if checkpoint is not None and state is not None:
        if not is_bound(checkpoint):
            say(console, UNBOUND.format(checkpoint.name))
        if not state.origin:
            say(console, UNKNOWN.format(checkpoint.name))
        is_best = config.output.load_best_model_at_end and state.best.step == state.step
        _mention_later_steps(console, path, state.step, is_best=is_best)

    # The checkpoint has the weights. The model's config, buffers and tokenizer come from where the run had them, and
    # are compared with what they were (`origin`).
    with one_version():
        model, reader = open_model(config)
        processor = load_processor(config) if config.data.images else None
        tokenizer = load_tokenizer(config) if processor is None else processor.tokenizer
        plain, weights = open_base(config.model, config.train.seed, decodes=True) if merges else (model, reader)
        if state is not None and state.origin and not accepts_changes:
            changes = differences(exported(state.origin), exported(origin_of(config, model, tokenizer)))
            check_origin(changes, config, remedy=", or add --accept-changes to export it with these")

    units = find_units(model)
    with _there(checkpoint):
        if checkpoint is not None and not accepts_changes:
            _check_rest(checkpoint, units)
        with ExitStack() as stack:
            masters = None if checkpoint is None else stack.enter_context(open_masters(checkpoint, units))
            read = masters
            if merges:
                # The skeleton with adapters says what is added to which matrix, and the plain one what is written.
                if masters is not None:
                    trained = _whole(units, masters)
                else:
                    assert isinstance(reader, AdaptedWeights) and reader.stored is not None
                    trained = reader.stored.read
                read = MergedWeights(weights, model, trained).read
            assert read is not None
            write_model(
                console,
                folder,
                plain,
                find_units(plain),
                read,
                processor or tokenizer,
                dtype or config.output.export_dtype,
                shard_bytes,
            )


def _chosen(path: Path) -> tuple[Path, RunState]:
    """Return the checkpoint at a path, or of the run there its last one, or its best one if it keeps that.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    checkpoint = find_checkpoint(path)
    state = RunState.read(read_state(checkpoint))
    output = state.config.get("output", {})
    step = state.best.step
    if checkpoint == path or not output.get("load_best_model_at_end") or step is None or step == state.step:
        return checkpoint, state

    best = step_path(path / CHECKPOINT_FOLDER, step)
    if not best.is_dir():
        raise CheckpointError(
            f"{best} is not there, which has the lowest held-out loss of the run. Bring it back, or name {checkpoint} "
            "to export the last step."
        )
    return best, RunState.read(read_state(best))


@contextmanager
def _there(checkpoint: Path | None) -> Iterator[None]:
    """Say so if what is read inside is gone: a run that goes on removes older checkpoints when a new one is whole."""
    try:
        yield
    except DamagedCheckpointError as error:
        if checkpoint is None or checkpoint.exists():
            raise
        raise CheckpointError(f"{checkpoint} was removed meanwhile, by its run or by hand. Export again.") from error


def _check_rest(checkpoint: Path, units: Sequence[Unit]) -> None:
    """Refuse a checkpoint whose moments were exchanged: no export has them, but who knows what else was.

    Raises:
        DamagedCheckpointError: names the file, and how the weights are exported all the same.
    """
    try:
        check_moments(checkpoint, units)
    except DamagedCheckpointError as error:
        error.add_remedy("Or export its weights alone, which are compared as they are read, with --accept-changes.")
        raise


def _moved(config: RunConfig, base: str | None) -> RunConfig:
    """Return the config of a run whose model may have been moved to another place since.

    Raises:
        ConfigError: the run began with no model that lies anywhere.
    """
    if base is None:
        return config
    if config.model.path is None:
        raise ConfigError("--base: the run began with a new model, by model.config. Leave it out.")
    return replace(config, model=replace(config.model, path=base))


def _config_of(adapter: Path, base: str | None) -> RunConfig:
    """Return the config of a run that would go on with a folder of adapters.

    Raises:
        ConfigError: it names no base.
    """
    # PEFT's own key. It may be null, or whatever else somebody wrote there.
    path = base or read_config(adapter).get("base_model_name_or_path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{adapter / ADAPTER_FILE} names no base. Give it with --base.")

    # A tokenizer beside the adapters may have tokens that the base's has not.
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = str(adapter) if has_tokenizer else None
    model = ModelConfig(path=path, lora={"adapter": str(adapter)})

    # No text is read, but a config without any is refused.
    data = DataConfig(files=("none",), tokenizer=tokenizer)
    return RunConfig(model=model, data=data)


def _whole(units: Sequence[Unit], read: Read) -> Callable[[str], Tensor]:
    """Return a function that reads whole parameters by their names."""
    places = {}
    for unit in units:
        for tensor in unit.layout.trained.tensors:
            places[tensor.name] = unit, tensor

    def whole(name: str) -> Tensor:
        unit, tensor = places[name]
        return read(unit, tensor.start, tensor.stop)

    return whole


def _mention_later_steps(console: Console, path: Path, step: int, *, is_best: bool) -> None:
    """Say so if the run has gone on after its last checkpoint."""
    steps = read_what_there_is(path / METRICS_FILE).steps
    last_step = steps[-1].step if steps else 0
    if last_step <= step:
        return
    if is_best:
        say(console, f"step {step} has the lowest held-out loss of the run, which went on to step {last_step}")
        return

    # The run itself may have exported its end, for which it needs no checkpoint.
    folder = path / MODEL_FOLDER
    where = folder if folder.exists() else "no folder"
    say(
        console,
        f"the run went on to step {last_step}, and this checkpoint is of step {step}; {where} has the model of its end",
    )


def export_end(
    console: Console, config: RunConfig, session: Session, tokenizer: Tokens, saves: Saves, step: int
) -> None:
    """Write the model of a run whose steps are done, or its best one if the run keeps that.

    If it fails the state is saved, so that the export can be repeated.

    Args:
        console: what a person sees.
        config: the run.
        session: the run's state after its last step.
        tokenizer: is written too.
        saves: knows the best step, and saves the state.
        step: the last step.

    Raises:
        ExportError: it failed. The message says what is kept, and how to finish the run.
    """
    directory = Path(config.output.directory)
    folder = directory / MODEL_FOLDER
    best = None
    if saves.best_step not in (None, step):
        best = step_path(directory / CHECKPOINT_FOLDER, saves.best_step)
        say(console, f"the best model is that of step {saves.best_step}, with the held-out loss {saves.best.loss:.4f}")
    dtype = config.output.export_dtype
    crew = session.crew

    # What fails from here on is noted and not raised at once, because the state has to be saved first.
    error: Exception | None = None
    done = Tally()
    with saves.watching(done):
        try:
            with crew.together():
                session.player.drain()
            saves.check_directory()
        except StallError:
            raise
        except (MegatierError, OSError) as found:
            error = found
        else:
            error = _write_end(console, session, best, folder, tokenizer, dtype, done)

    # The first rank has written, and all of them save what it could not write.
    if (reason := crew.from_first(lambda: None if error is None else str(error))) is not None:
        saved = saves.keep_end(step, partial(say, console))
        raise ExportError(reason, step, _way_on(directory, saved)) from error


def _write_end(
    console: Console,
    session: Session,
    best: Path | None,
    folder: Path,
    tokenizer: Tokens,
    dtype: str,
    done: Tally,
) -> Exception | None:
    """Write the model of a session or of its best checkpoint, on the first rank; return what stopped it there.

    An error of another rank is raised: the first one waits for what that rank has of the model, so the run ends.
    """
    with session.reading_masters() as read:
        if read is None:
            return None
        try:
            with ExitStack() as stack:
                if best is not None:
                    read = stack.enter_context(open_masters(best, session.whole_units))
                counted = done.counting(read)
                write_model(console, folder, session.model, session.whole_units, counted, tokenizer, dtype)
        except StallError:
            # A drive that never answers takes no checkpoint either.
            raise
        except (MegatierError, OSError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises Exception itself; the state comes first
            failed = MegatierError(f"{type(error).__name__}: {shown(str(error))}.")
            # By hand, since this error is returned here, and raised by the caller.
            failed.__cause__ = error
            return failed
    return None


def _way_on(directory: Path, saved: Path | None) -> str:
    """Return how to finish a run whose export failed.

    Args:
        directory: the run directory.
        saved: the checkpoint or savepoint of the run's end; None: there is none.
    """
    if saved is None:
        # What was saved before stays. `resume` takes whichever is newer.
        steps = []
        for name in (CHECKPOINT_FOLDER, SAVEPOINT_FOLDER):
            path = last_checkpoint(directory / name)
            if path is not None:
                steps.append(step_of(path))
        before = f"step {max(steps)}" if steps else "its start"
        return f"Nothing more could be saved; `megatier resume {directory}` goes on from {before}."

    # A savepoint has no arrays that could be exported: it keeps the run's own block files.
    finish = f"They are kept in {saved}: `megatier resume {directory}` writes the model once that is mended"
    if saved.parent.name == CHECKPOINT_FOLDER:
        finish += f", `megatier export {directory} FOLDER` writes it elsewhere"
    return f"{finish}."


def write_model(
    console: Console,
    folder: Path,
    model: PreTrainedModel,
    units: Sequence[Unit],
    read: Read,
    tokenizer: Tokens,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write master weights with `adapters.adapter_folder.export`, and say where they are.

    Args:
        console: what a person sees.
        folder: a new or empty folder.
        model: the skeleton.
        units: the model's units.
        read: reads elements of a unit's masters.
        tokenizer: the tokenizer or processor, which is written into the folder too.
        dtype: `bf16` or `fp32`, of a whole model.
        shard_bytes: see `models.export.export`.
    """
    export(folder, model, units, read, COMPUTE_DTYPES[dtype], shard_bytes, tokenizer)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    what = "model"
    # `dtype` is of whole models: an adapter is written as its masters are.
    if adapter_config(model) is not None:
        what = "adapter"
        dtype = "fp32"
    say(console, f"{what} written to {folder} ({mib(num_bytes)}, {dtype})")
