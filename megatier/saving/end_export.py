"""Exports the trained weights of a run at its end as a Hugging Face folder, and saves them if that fails."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from megatier.checkpoint.checkpoint import open_masters
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    MODEL_FOLDER,
    SAVEPOINT_FOLDER,
    last_checkpoint,
    parse_step,
    step_path,
)
from megatier.config.schema import RunConfig
from megatier.errors import (
    ExportError,
    MegatierError,
    StallError,
)
from megatier.foreign import printable
from megatier.models.export import Tokens
from megatier.report.console import say
from megatier.saving.model_folder import write_model
from megatier.saving.saves import Saves
from megatier.session.session import Session
from megatier.watch.work_count import WorkCount


def export_at_end(
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
    all_ranks = session.all_ranks

    # An error is kept and not raised at once, because the state has to be saved first.
    error: Exception | None = None
    done = WorkCount()
    with saves.watch_export(done):
        try:
            with all_ranks.failing_together():
                session.player.drain()
            saves.check_directory()
        except StallError:
            raise
        except (MegatierError, OSError) as raised:
            error = raised
        else:
            error = _write_model(console, session, best, folder, tokenizer, dtype, done)

    # The first rank alone writes the model. If it failed, all ranks save the state together.
    if (reason := all_ranks.broadcast(lambda: None if error is None else str(error))) is not None:
        saved = saves.save_at_end(step, partial(say, console))
        raise ExportError(reason, step, _describe_resume(directory, saved)) from error


def _write_model(
    console: Console,
    session: Session,
    best: Path | None,
    folder: Path,
    tokenizer: Tokens,
    dtype: str,
    done: WorkCount,
) -> Exception | None:
    """Write the model of a session, or that of its best checkpoint, on the first rank; return the error if it failed.

    An error of another rank is raised, because the first rank waits for that rank's shard of the model.
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
            # A drive that does not answer takes no checkpoint either.
            raise
        except (MegatierError, OSError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises Exception itself; the state comes first
            failed = MegatierError(f"{type(error).__name__}: {printable(str(error))}.")
            # `raise ... from` is no choice here, since the caller raises the error.
            failed.__cause__ = error
            return failed
    return None


def _describe_resume(directory: Path, saved: Path | None) -> str:
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
                steps.append(parse_step(path))
        before = f"step {max(steps)}" if steps else "its start"
        return f"Nothing more could be saved; `megatier resume {directory}` goes on from {before}."

    # A savepoint has no arrays that could be exported: it keeps the run's own block files.
    finish = f"They are kept in {saved}: `megatier resume {directory}` writes the model once that is mended"
    if saved.parent.name == CHECKPOINT_FOLDER:
        finish += f", `megatier export {directory} FOLDER` writes it elsewhere"
    return f"{finish}."
