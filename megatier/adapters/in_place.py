"""Decides which frozen weights of a base a run reads from NVMe in place, in the model's own files.

A unit's frozen weights are read in place if the files hold exactly the bytes that the run needs, in runs that are not
too short, on the drives of `tiers.nvme`. All others are copied into block files when the run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from megatier.adapters.first_weights import base_name
from megatier.config.schema import TiersConfig
from megatier.drives.extent import FilePart
from megatier.foreign import printable
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.safetensors_format import SAFETENSORS_DTYPES, SAFETENSORS_NAMES, StoredTensor
from megatier.models.weight_conversion import Assembly, TensorRun, assemble, runs_holding
from megatier.models.weight_files import read_headers
from megatier.optim.masters import weight_dtype

_TENSORS_ATTRIBUTE = "tensors_of_base"
"""The attribute of a skeleton with the tensors of its base."""
RUN_BYTES_MIN = 64 << 10
"""The shortest run of a tensor that is assembled from several, since whole pages are read around each run."""


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """The tensors of a base as stored in its folder."""

    stored: Mapping[str, StoredTensor]
    """The stored tensors, by their stored names."""
    assemblies: Mapping[str, Assembly]
    """Their assembly into parameters of the base, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """The units whose frozen weights can be read in place."""

    parts: Mapping[str, tuple[FilePart, ...]] = field(default_factory=dict)
    """The parts of files that hold each unit's frozen weights, by unit name. `start` counts in the unit's block of
    weights."""
    why_not: str = ""
    """Why the other frozen weights of the base are copied; empty: there are none."""


def note_base_tensors(model: PreTrainedModel, folder: Path, stored: Mapping[str, StoredTensor] | None = None) -> None:
    """Store on a skeleton, which has no adapters yet, what its base's folder holds.

    Raises:
        UnsupportedModelError: a file is missing or damaged.
    """
    if stored is None:
        stored = read_headers(folder)

    # Before adapters change the names, since the conversion needs those of a plain model.
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    assemblies = assemble(model, shapes)
    setattr(model, _TENSORS_ATTRIBUTE, BaseTensors(stored, assemblies))


def in_place(model: PreTrainedModel, units: Sequence[Unit], tiers: TiersConfig, num_ranks: int) -> InPlace:
    """Return the units whose frozen weights can be read in place.

    Args:
        model: the skeleton.
        units: its units, with their schemas.
        tiers: the mounts, and how they are read.
        num_ranks: the world size.
    """
    frozen = [unit for unit in units if unit.layout.has_base and unit.layout.num_trained < unit.layout.num_elements]

    # Without NVMe nothing lies on drives, and a base in RAM is copied once, whatever its files are.
    if not frozen or not tiers.nvme:
        return InPlace()

    base: BaseTensors | None = getattr(model, _TENSORS_ATTRIBUTE, None)
    if base is None:
        return InPlace(why_not="it is quantised, was given in RAM, or has no files yet")
    # These reasons apply to the whole base, so no unit is checked.
    if why := _why_refused(base, tiers, num_ranks):
        return InPlace(why_not=why)

    parts: dict[str, tuple[FilePart, ...]] = {}
    reasons: list[str] = []
    for unit in frozen:
        of_unit = _parts(unit, base)
        if isinstance(of_unit, str):
            reasons.append(of_unit)
        else:
            parts[unit.name] = of_unit
    return InPlace(parts=parts, why_not=reasons[0] if reasons else "")


def _why_refused(base: BaseTensors, tiers: TiersConfig, num_ranks: int) -> str:
    """Return why nothing of a base is read in place; empty: it may be."""
    if tiers.gpu_direct:
        return "tiers.gpu_direct reads block files alone"
    if not tiers.checksums:
        return "tiers.checksums is false, and files that others may write are always verified"
    if num_ranks > 1:
        return "several ranks have shards of it"

    # A step is planned with the speed of the mounts, which other drives may not have.
    paths = [tensor.path for tensor in base.stored.values()]
    drives = _drives(paths)
    for mount in tiers.mounts:
        if _drives([mount.directory]) != drives:
            folder = min(path.parent for path in paths)
            return f"{folder} and {mount.directory} (tiers.nvme) are on different file systems"
    return ""


def _drives(paths: Iterable[Path]) -> set[int | None]:
    """Return the file systems of paths; None stands for a missing path."""
    drives: set[int | None] = set()
    for path in set(paths):
        try:
            drives.add(path.stat().st_dev)
        except OSError:
            # None differs from every drive, so nothing is read in place.
            drives.add(None)
    return drives


def _parts(unit: Unit, base: BaseTensors) -> tuple[FilePart, ...] | str:
    """Return the parts of files with a unit's frozen weights, in order, or why they cannot be read in place."""
    dtype = weight_dtype(unit.layout.schema)
    parts: list[FilePart] = []
    for tensor in unit.layout.tensors:
        # Frozen elements come after the trained ones.
        is_trained = tensor.start < unit.layout.num_trained
        if is_trained or not tensor.num_elements:
            continue
        # If one tensor cannot be read in place, the whole unit is copied, since its block has one place for all frozen
        # weights.
        runs = _runs(tensor, base)
        if isinstance(runs, str):
            return runs

        position = tensor.start * dtype.itemsize
        for run in runs:
            stored = base.stored[run.name]
            if SAFETENSORS_DTYPES.get(stored.dtype) is not dtype:
                wanted = SAFETENSORS_NAMES[dtype]
                return f"{printable(stored.name)} is {printable(stored.dtype)} in its file and {wanted} in the run"

            # Whole pages are read around each run, so many short runs would read far more than needed.
            num_bytes = run.num_elements * dtype.itemsize
            if len(runs) > 1 and num_bytes < RUN_BYTES_MIN:
                return f"{printable(tensor.name)} is put together from short pieces of its file"

            part = FilePart(
                path=stored.path,
                file_offset=stored.offset + run.start * dtype.itemsize,
                start=position,
                num_bytes=num_bytes,
                version=stored.version,
            )
            parts.append(part)
            position += num_bytes
    return tuple(parts)


def _runs(tensor: TensorSlice, base: BaseTensors) -> tuple[TensorRun, ...] | str:
    """Return the runs of stored elements that form a tensor, or why they cannot be read in place."""
    assembly = base.assemblies.get(base_name(tensor.name))
    if assembly is None:
        return f"{printable(tensor.name)} is stored under another name"
    _, runs = runs_holding(assembly, *tensor.elements)
    if any(run.num_columns for run in runs):
        return f"{printable(tensor.name)} is stored transposed"
    return runs
