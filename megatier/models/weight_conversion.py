"""Converts between a model's tensors and the stored tensors of a folder in Hugging Face's format.

Names differ (prefixes, renamed modules), and so do tensors: transformers holds the experts of a layer in one parameter,
while the hub stores a tensor for each expert. transformers lists the conversion operations. Here they are applied to
runs of elements instead of tensors, so nothing has to be loaded to find out where it belongs. Reading (`weights`) and
writing (`export`) both use this.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from megatier.errors import UnsupportedModelError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRun:
    """Consecutive elements of one named tensor."""

    name: str
    """The tensor."""
    start: int
    """The number of the first element in it."""
    num_elements: int
    """The number of elements."""
    num_columns: int = 0
    """The number of columns of their matrix, if it is read column by column; 0: they are read in order."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor that is assembled from runs, in the order of its own elements."""

    shape: Shape
    """Its shape."""
    runs: tuple[TensorRun, ...]
    """The runs, in the order of the tensor's elements."""


def assemble(model: PreTrainedModel, stored: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return the model's tensors as assemblies of a folder's stored tensors.

    Args:
        model: the skeleton, whose names and shapes decide about prefixes.
        stored: shapes of the stored tensors by name.

    Returns:
        The resulting tensors, by their names in the model. Unknown names are included.

    Raises:
        UnsupportedModelError: a tensor needs an operation that does not just rearrange runs, or shapes disagree.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state = model.state_dict(keep_vars=True)
    assemblies: dict[str, Assembly] = {}

    # By the resulting name, then by the converter's pattern that the stored name matches.
    to_convert: defaultdict[str, defaultdict[str, list[Assembly]]] = defaultdict(lambda: defaultdict(list))

    # In numeric order, since experts are joined in the order in which they come.
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)

        # A renaming for older files may also match a name that is already right.
        if target not in state and name in state:
            target = name
            pattern = None

        run = TensorRun(name=name, start=0, num_elements=math.prod(stored[name]))
        whole = Assembly(stored[name], (run,))
        if pattern is not None:
            to_convert[target][pattern].append(whole)
        elif target not in assemblies:
            assemblies[target] = whole
        else:
            raise UnsupportedModelError(f"{target}: two stored tensors claim to be it; one is {name}.")

    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for target, by_pattern in to_convert.items():
        # All patterns of a target belong to one converter.
        converter = converter_of[next(iter(by_pattern))]
        expected = tuple(state[target].shape) if target in state else None
        assemblies |= _converted(converter, target, by_pattern, expected)

    return assemblies


def hub_layout(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Assembly]:
    """Return the tensors to write, as runs of the model's own tensors, such that `from_pretrained` loads them back.

    This is the hub's layout if it only rearranges runs, otherwise the model's own names, which transformers reads too.

    Args:
        model: the skeleton.
        tensors: the model's tensors by name, tied ones once; only shapes are used.

    Raises:
        UnsupportedModelError: neither would load back.
    """
    # On meta, since transformers reverts its conversions by computing with the tensors.
    own_layout = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    own_shapes = _shapes(own_layout)

    for layout in (revert_weight_conversion(model, dict(own_layout)), own_layout):
        stored_shapes = _shapes(layout)
        try:
            assemblies = assemble(model, stored_shapes)
        except UnsupportedModelError:
            continue

        # Checked by reading it back, since a layout that does not restore the model's own tensors is useless.
        read_shapes = {name: assembly.shape for name, assembly in assemblies.items()}
        if read_shapes == own_shapes:
            return _inverted(assemblies, stored_shapes)

    raise UnsupportedModelError(f"{type(model).__name__}: no layout of its files is known that loads back unchanged.")


def runs_holding(assembly: Assembly, start: int, stop: int) -> tuple[int, tuple[TensorRun, ...]]:
    """Return the runs that hold elements [start, stop) of a tensor, and the index of their first element.

    They hold no other elements, except that a matrix that is read column by column stays whole.
    """
    first = start
    runs = list[TensorRun]()
    position = 0

    for run in assembly.runs:
        lower = max(start, position)
        upper = min(stop, position + run.num_elements)
        if lower < upper and run.num_columns:
            # A run with columns must be read whole, so reading begins before `start`.
            first = min(first, position)
            runs.append(run)
        elif lower < upper:
            wanted = replace(run, start=run.start + lower - position, num_elements=upper - lower)
            runs.append(wanted)
        position += run.num_elements

    return first, tuple(runs)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by their names."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _converted(
    converter: WeightConverter, target: str, by_pattern: Mapping[str, list[Assembly]], expected: Shape | None
) -> dict[str, Assembly]:
    """Apply a converter's operations.

    Args:
        converter: what transformers does with some stored tensors.
        target: the resulting name, which contains the converter's first target pattern. The others follow from it.
        by_pattern: the stored tensors, by the source pattern that they match.
        expected: the shape in the model. An operation that checks shapes leaves a tensor of this shape as it is.

    Raises:
        UnsupportedModelError: an operation is not known, or shapes do not fit.
    """
    # As in transformers, each operation takes a list of tensors for each source pattern, and returns lists.
    lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]

    for operation in converter.operations:
        single = lists[0][0] if len(lists) == len(lists[0]) == 1 else None

        if isinstance(operation, MergeModulelist):
            lists = [[_stack(target, tensors, operation.dim)] for tensors in lists]
        elif isinstance(operation, Concatenate):
            joined = [tensor for tensors in lists for tensor in tensors]
            lists = [[_concatenate(target, joined, operation.dim)]]
        elif isinstance(operation, Chunk) and single is not None:
            chunks = _chunk(target, single, len(converter.target_patterns), operation.dim)
            lists = [[chunk] for chunk in chunks]
        elif isinstance(operation, Transpose) and single is not None:
            is_transposed_already = operation.check_dims and single.shape == expected
            if not is_transposed_already:
                lists = [[_transpose(target, single, operation.dim0, operation.dim1)]]
        else:
            raise UnsupportedModelError(
                f"{target}: it is stored in a form that only transformers can convert ({operation}). "
                "Load it with from_pretrained and save it with save_pretrained(save_original_format=False)."
            )

    patterns = converter.target_patterns
    if len(lists) != len(patterns):
        raise UnsupportedModelError(f"{target}: parts of it are missing in the files.")

    first = patterns[0]
    return {target.replace(first, pattern, 1): tensors[0] for pattern, tensors in zip(patterns, lists, strict=True)}


def _stack(target: str, tensors: Sequence[Assembly], dim: int) -> Assembly:
    """Join tensors along a new dimension."""
    unsqueezed = [Assembly((*t.shape[:dim], 1, *t.shape[dim:]), t.runs) for t in tensors]
    return _concatenate(target, unsqueezed, dim)


def _concatenate(target: str, tensors: Sequence[Assembly], dim: int) -> Assembly:
    """Join tensors along a dimension that they have."""
    first = tensors[0].shape
    outer = first[:dim]
    inner = first[dim + 1 :]
    for tensor in tensors:
        shape = tensor.shape
        fits = dim < len(shape) and shape[:dim] == outer and shape[dim + 1 :] == inner
        if not fits:
            raise UnsupportedModelError(f"{target}: its stored parts have different shapes, which do not fit together.")

    # Elements are taken from each tensor in turn, as many as are contiguous below the dimension.
    feeds = [(deque(tensor.runs), math.prod(tensor.shape[dim:])) for tensor in tensors]
    runs = list[TensorRun]()
    for _ in range(math.prod(outer)):
        for feed, num_together in feeds:
            runs += _take(feed, num_together)

    length = sum(tensor.shape[dim] for tensor in tensors)
    return Assembly((*outer, length, *inner), tuple(runs))


def _chunk(target: str, tensor: Assembly, num_chunks: int, dim: int) -> list[Assembly]:
    """Cut a tensor into equal parts along a dimension."""
    shape = tensor.shape
    if dim >= len(shape) or shape[dim] % num_chunks:
        raise UnsupportedModelError(f"{target}: shape {shape} cannot be cut into {num_chunks} equal parts.")

    # The inverse of `_concatenate`: each chunk in turn gets the elements that are contiguous below the dimension.
    outer = shape[:dim]
    length = shape[dim] // num_chunks
    chunk_shape = (*outer, length, *shape[dim + 1 :])
    num_together = math.prod(chunk_shape[dim:])

    feed = deque(tensor.runs)
    chunks: list[list[TensorRun]] = [[] for _ in range(num_chunks)]
    for _ in range(math.prod(outer)):
        for chunk in chunks:
            chunk.extend(_take(feed, num_together))

    return [Assembly(chunk_shape, tuple(chunk)) for chunk in chunks]


def _transpose(target: str, tensor: Assembly, dim0: int, dim1: int) -> Assembly:
    """Swap the last two dimensions of a tensor, by reading each matrix column by column."""
    *stack, rows, columns = tensor.shape
    num_matrices = math.prod(stack)
    num_dims = len(tensor.shape)
    swapped = {dim0 % num_dims, dim1 % num_dims}
    feed = deque(tensor.runs)
    runs = list[TensorRun]()

    # Only the last two dimensions can be swapped so, and only if each matrix is one run that is not transposed yet.
    if swapped == {num_dims - 2, num_dims - 1}:
        for _ in range(num_matrices):
            matrix = _take(feed, rows * columns)
            runs += [replace(run, num_columns=columns) for run in matrix if not run.num_columns]

    if len(runs) != num_matrices:
        raise UnsupportedModelError(f"{target}: shape {tensor.shape} is stored transposed in a way that is not known.")
    return Assembly((*stack, columns, rows), tuple(runs))


def _take(feed: deque[TensorRun], num_elements: int) -> Iterable[TensorRun]:
    """Remove the next elements from the front of a sequence of runs, and yield them."""
    while num_elements:
        run = feed.popleft()
        taken = min(run.num_elements, num_elements)
        num_remaining = run.num_elements - taken
        if num_remaining:
            # The first elements of such a run are spread over all its columns, so they are not a run.
            if run.num_columns:
                raise UnsupportedModelError(f"{run.name} is stored transposed, and would have to be cut.")
            feed.appendleft(TensorRun(name=run.name, start=run.start + taken, num_elements=num_remaining))

        num_elements -= taken
        yield replace(run, num_elements=taken)


def _inverted(assemblies: Mapping[str, Assembly], shapes: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Invert a mapping from own tensors to stored runs: return the own runs of each stored tensor."""
    # Each run with the index of its first element in the stored tensor.
    placed: dict[str, list[tuple[int, TensorRun]]] = {name: [] for name in shapes}
    for own_name, assembly in assemblies.items():
        position = 0
        for run in assembly.runs:
            # A matrix that is read column by column becomes one with as many columns as it had rows, so that is how it
            # is read on the way back.
            num_rows = run.num_elements // run.num_columns if run.num_columns else 0
            own_run = TensorRun(
                name=own_name,
                start=position,
                num_elements=run.num_elements,
                num_columns=num_rows,
            )
            placed[run.name].append((run.start, own_run))
            position += run.num_elements

    inverted = dict[str, Assembly]()
    for name, shape in shapes.items():
        in_order = sorted(placed[name], key=lambda pair: pair[0])
        inverted[name] = Assembly(shape, tuple(run for _, run in in_order))
    return inverted
