"""The section `output` of a run's configuration: what the run writes, and where.

`config.schema` has the other sections. Pure: no file is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatier.config.section import Section, explained

REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*"
"""A repository of the hub, with its owner."""
TRACKER_NAMES = ("trackio", "wandb", "mlflow", "tensorboard")
"""What a run can report to, each by its own library, which the extra of that name brings."""


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig(Section):
    """What the run writes."""

    NAME = "output"

    directory: str = "runs/megatier"
    """Run directory: resolved config, metrics.jsonl, checkpoints and the exported model. One run may use it at a
    time."""
    export: bool = True
    """Write the model as a Hugging Face folder at the end."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the exported weights. fp32 writes the master weights."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face hub, as owner/name, to which the exported model is uploaded at the end, with the
    token of `hf auth login` or HF_TOKEN. None: nothing is uploaded."""
    hub_private_repo: bool = True
    """Make that repository private if it is new."""
    checkpoint_every: int | Literal["auto"] = "auto"
    """Steps between checkpoints, with one more at the end; at least 0. auto: after five minutes, then each half hour,
    or less often so that it takes at most 2 % of the time; also if the export fails; never if savepoint_every is set,
    or if the drive has no room for two. 0: only if Ctrl-C, SIGTERM, or steps that are not finite end the run, or if the
    export fails."""
    savepoint_every: int = 0
    """Steps between savepoints, at least 0. A savepoint leaves spilled state where it is on NVMe and writes only the
    rest, so it is faster than a checkpoint. `resume` needs the same tiers and drives for it. The last one is kept until
    there is a newer checkpoint. 0: none."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep, at least 1. Older ones are removed."""
    load_best_model_at_end: bool = False
    """Export the model with the lowest held-out loss instead of the last one. Each evaluation that is the best so far
    writes a checkpoint, and the last of these is kept besides output.keep_checkpoints."""
    trace: bool = False
    """Write a trace of transfers, compute and stalls, for `megatier trace` or Perfetto."""
    tensorboard: bool = False
    """Write TensorBoard files, just as report_to: tensorboard does. Use report_to if there are other trackers too. This
    needs the extra megatier[tensorboard]."""
    report_to: tuple[str, ...] = ()
    """Trackers that get the config and all figures, out of trackio, wandb, mlflow and tensorboard. Each needs the extra
    of its name, and takes server, token and offline mode from its own variables and login. A tracker that fails is
    given up with a warning."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()
        is_named = self.directory != ""
        self.need("directory", is_named, "a path")

        # The tokenizers library writes to no other path, which would be found when the run is over.
        self.need("directory", _is_text(self.directory), "a path in UTF-8")
        every = self.checkpoint_every
        is_count = every == "auto" or every >= 0
        self.need("checkpoint_every", is_count, "auto or at least 0")

        self.need_least(savepoint_every=0, keep_checkpoints=1)

        is_named = self.push_to_hub is None or re.fullmatch(REPOSITORY, self.push_to_hub) is not None
        self.need("push_to_hub", is_named, "owner/name, or null")
        self.need("push_to_hub", self.push_to_hub is None or self.export, "null without output.export")
        is_used = self.push_to_hub is not None or self.hub_private_repo
        self.need("hub_private_repo", is_used, "true without output.push_to_hub")

        is_known_once = len(self.report_to) == len({*self.report_to} & {*TRACKER_NAMES})
        self.need("report_to", is_known_once, f"[] or some of {', '.join(TRACKER_NAMES)}, each once")

    @property
    def writes_tensorboard(self) -> bool:
        """Whether TensorBoard's files are written; there are two settings for it."""
        return self.tensorboard or "tensorboard" in self.report_to

    @property
    def saves_by_time(self) -> bool:
        """Whether the clock decides when a checkpoint is written, because no setting does."""
        return self.checkpoint_every == "auto" and not self.savepoint_every


def _is_text(path: str) -> bool:
    """Return whether a path is UTF-8. Bytes of one that are not come as surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


__all__ = ["OutputConfig"]
