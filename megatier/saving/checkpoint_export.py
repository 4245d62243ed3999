"""Exports the trained weights of a checkpoint, or merges a folder of adapters, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatier.adapters.first_weights import AdaptedWeights
from megatier.adapters.merge import MergedWeights
from megatier.adapters.stored_adapters import read_config
from megatier.checkpoint.checkpoint import UNBOUND, check_moments, is_bound, open_masters, read_state
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    check_no_saved_run,
    find_adapter,
    find_checkpoint,
    step_path,
)
from megatier.checkpoint.run_state import RunState
from megatier.config.data_section import DataConfig
from megatier.config.file import from_dict
from megatier.config.lora import ADAPTER_FILE
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.processor import load_tokens
from megatier.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
)
from megatier.foreign import one_version
from megatier.models.decoder import Unit, find_units
from megatier.models.weights import TensorReader
from megatier.report.console import say
from megatier.report.history import read_what_there_is
from megatier.saving.model_folder import SHARD_BYTES, write_model
from megatier.saving.origin import UNKNOWN_ORIGIN, check_origin, find_changes, keep_exported, read_origin
from megatier.session.rank_shards import Read
from megatier.setup.skeleton import open_base, open_model


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
            keeps it (`output.load_best_model_at_end`). To merge also a folder of adapters, or a run directory that
            has none but exported ones.
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
    check_no_saved_run(folder)
    source = _find_source(path, base, merges=merges)
    config = source.config
    say(console, f"from {source.path}")
    _tell_remarks(console, path, source)

    # The checkpoint has the weights. The model's config, buffers and tokenizer come from where the run had them, and
    # are compared with what they were (`origin`).
    with one_version():
        model, reader = open_model(config)
        tokens, tokenizer = load_tokens(config)
        plain, weights = open_base(config.model, config.train.seed, decodes=True) if merges else (model, reader)
        if not accepts_changes:
            _check_origin(source, model, tokenizer)

    units = find_units(model)
    with _open_masters(source, units, checks=not accepts_changes) as masters:
        # The skeleton with adapters says what is added to which matrix, and the plain one what is written.
        read = masters
        if merges:
            trained = _make_parameter_reader(units, masters, reader)
            read = MergedWeights(weights, model, trained).read

        assert read is not None
        dtype = dtype or config.output.export_dtype
        write_model(console, folder, plain, find_units(plain), read, tokens, dtype, shard_bytes)


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is exported: a checkpoint, or a folder of adapters."""

    path: Path
    config: RunConfig
    """The run that wrote the checkpoint, or one that would go on with the adapters."""
    state: RunState | None = None
    """The state in the checkpoint; None: a folder of adapters, which has trained weights alone."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint, if it is one."""
        return None if self.state is None else self.path


def _find_source(path: Path, base: str | None, *, merges: bool) -> ExportSource:
    """Return what lies at a path; see `export_checkpoint`."""
    adapter = find_adapter(path) if merges else None
    if adapter is not None:
        source = ExportSource(adapter, _make_config(adapter, base))
    else:
        checkpoint, state = _choose_checkpoint(path)
        source = ExportSource(checkpoint, _with_base(from_dict(state.config), base), state)

    if merges and source.config.model.lora is None:
        raise ConfigError(f"--merge: {path} has no adapters. Leave it out.")
    return source


def _tell_remarks(console: Console, path: Path, source: ExportSource) -> None:
    """Say what nobody can know of a checkpoint, and which step it is of if the run went on after it.

    Args:
        console: what a person sees.
        path: what the user named.
        source: what was found there.
    """
    state = source.state
    if state is None:
        return
    if not is_bound(source.path):
        say(console, UNBOUND.format(source.path.name))
    if not state.origin:
        say(console, UNKNOWN_ORIGIN.format(source.path.name))

    is_best = source.config.output.load_best_model_at_end and state.best.step == state.step
    _mention_later_steps(console, path, state.step, is_best=is_best)


def _check_origin(source: ExportSource, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model or tokenizer that are not those of the checkpoint, as far as they are exported.

    Raises:
        ConfigError: names what changed.
    """
    if source.state is None or not source.state.origin:
        return
    before = keep_exported(source.state.origin)
    now = keep_exported(read_origin(source.config, model, tokenizer))
    changes = find_changes(before, now)
    check_origin(changes, source.config, remedy=", or add --accept-changes to export it with these")


def _choose_checkpoint(path: Path) -> tuple[Path, RunState]:
    """Return the checkpoint at a path, or of the run there its last one, or its best one if it keeps that.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    checkpoint = find_checkpoint(path)
    state = RunState.read(read_state(checkpoint))
    output = state.config.get("output", {})
    step = state.best.step

    # Whoever names a checkpoint wants that one, even if another is the best.
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
def _open_masters(source: ExportSource, units: Sequence[Unit], *, checks: bool) -> Iterator[Read | None]:
    """Yield what reads the masters of a checkpoint; None for a folder of adapters.

    Args:
        source: what is exported.
        units: all units of its model.
        checks: whether its moments are looked at too.

    Raises:
        CheckpointError: it was removed while it was read: a run that goes on removes older checkpoints when a new one
            is whole.
    """
    checkpoint = source.checkpoint
    if checkpoint is None:
        yield None
        return

    try:
        if checks:
            _check_moments(checkpoint, units)
        with open_masters(checkpoint, units) as masters:
            yield masters
    except DamagedCheckpointError as error:
        # Only one that is still there can be called damaged.
        if checkpoint.exists():
            raise
        raise CheckpointError(f"{checkpoint} was removed meanwhile, by its run or by hand. Export again.") from error


def _check_moments(checkpoint: Path, units: Sequence[Unit]) -> None:
    """Refuse a checkpoint whose moments were exchanged: no export has them, but who knows what else was.

    Raises:
        DamagedCheckpointError: names the file, and how the weights are exported all the same.
    """
    try:
        check_moments(checkpoint, units)
    except DamagedCheckpointError as error:
        error.add_remedy("Or export its weights alone, which are compared as they are read, with --accept-changes.")
        raise


def _with_base(config: RunConfig, base: str | None) -> RunConfig:
    """Return the config of a run whose model may have been moved to another place since.

    Raises:
        ConfigError: the run began with no model that lies anywhere.
    """
    if base is None:
        return config
    if config.model.path is None:
        raise ConfigError("--base: the run began with a new model, by model.config. Leave it out.")
    return replace(config, model=replace(config.model, path=base))


def _make_config(adapter: Path, base: str | None) -> RunConfig:
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


def _make_parameter_reader(
    units: Sequence[Unit], masters: Read | None, reader: TensorReader
) -> Callable[[str], Tensor]:
    """Return a function that reads whole trained parameters by their names.

    Args:
        units: all units.
        masters: reads those of a checkpoint; None: they lie in a folder of adapters.
        reader: the reader of the model with adapters.
    """
    if masters is None:
        # `_make_config` names the folder as the adapter, so `open_model` has opened it.
        assert isinstance(reader, AdaptedWeights) and reader.stored is not None
        return reader.stored.read

    places = {}
    for unit in units:
        for tensor in unit.layout.trained.tensors:
            places[tensor.name] = unit, tensor

    def whole(name: str) -> Tensor:
        unit, tensor = places[name]
        return masters(unit, tensor.start, tensor.stop)

    return whole


def _mention_later_steps(console: Console, path: Path, step: int, *, is_best: bool) -> None:
    """Say so if the run has gone on after its last checkpoint."""
    # An export needs no report, so a damaged one does not stop it.
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
