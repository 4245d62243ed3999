"""The conversion between a model's tensors and the stored tensors of a folder in Hugging Face's format.

The names differ (prefixes, renamed modules), and so do the tensors: transformers holds the experts of a layer in one
parameter, and the hub has a tensor for each expert. transformers lists the operations. Here they are applied not to
tensors but to runs of elements, so nothing is ever loaded to find out where it belongs.
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
    """Columns of the matrix that they are, if it is read column by column; 0: they are read as they lie."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor that is put together from runs, in the order of its own elements."""

    shape: Shape
    """Its shape when it is put together."""
    runs: tuple[TensorRun, ...]
    """The runs, whose elements lie one after the other in it."""


def assemble(model: PreTrainedModel, stored: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Find out what a folder's stored tensors make up.

    Args:
        model: the skeleton; names and shapes of its parameters and persistent buffers decide about prefixes.
        stored: shapes of the stored tensors by name.

    Returns:
        The tensors that result, by the names that they have in the model. Names that the model does not know are among
        them.

    Raises:
        UnsupportedModelError: a tensor needs an operation that is no rearrangement of whole runs, or shapes disagree.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    state = model.state_dict(keep_vars=True)
    assemblies: dict[str, Assembly] = {}
    parts: defaultdict[str, defaultdict[str, list[Assembly]]] = defaultdict(lambda: defaultdict(list))

    # In the order of numbers, because experts are joined in the order in which they come.
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)

        # A renaming for older files may also match a name that is right as it is.
        if target not in state and name in state:
            target = name
            pattern = None

        whole = Assembly(stored[name], (TensorRun(name=name, start=0, num_elements=math.prod(stored[name])),))
        if pattern is not None:
            parts[target][pattern].append(whole)
        elif target not in assemblies:
            assemblies[target] = whole
        else:
            raise UnsupportedModelError(f"{target}: two stored tensors claim to be it; one is {name}.")

    for target, by_pattern in parts.items():
        expected = tuple(state[target].shape) if target in state else None
        assemblies |= _converted(converter_of[next(iter(by_pattern))], target, by_pattern, expected)

    return assemblies


def hub_layout(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Assembly]:
    """Return the tensors to write, each as runs of the model's own, so that `from_pretrained` loads them back.

    This is the hub's layout if it is a rearrangement of runs, else the model's own names, which transformers also
    reads.

    Args:
        model: the skeleton.
        tensors: the model's tensors by name, tied ones once; only shapes are used.

    Raises:
        UnsupportedModelError: neither of the two would load back.
    """
    # On meta, because transformers reverts its conversions by computing with the tensors.
    own = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    for layout in (revert_weight_conversion(model, dict(own)), own):
        shapes = {name: tuple(tensor.shape) for name, tensor in layout.items()}
        try:
            assemblies = assemble(model, shapes)
        except UnsupportedModelError:
            continue

        # Tried by reading it back: a layout that does not give the model's own tensors again would be of no use.
        made = {name: assembly.shape for name, assembly in assemblies.items()}
        if made == {name: tuple(tensor.shape) for name, tensor in own.items()}:
            return _inverted(assemblies, shapes)

    raise UnsupportedModelError(f"{type(model).__name__}: no layout of its files is known that loads back unchanged.")


def holding(assembly: Assembly, start: int, stop: int) -> tuple[int, tuple[TensorRun, ...]]:
    """Return the runs that hold elements [start, stop) of a tensor, and which of its elements is their first.

    They hold no other elements, but for a matrix that is read column by column: it stays whole.
    """
    first = start
    runs = list[TensorRun]()
    position = 0

    for run in assembly.runs:
        lower = max(start, position)
        upper = min(stop, position + run.num_elements)
        if lower < upper and run.num_columns:
            first = min(first, position)
            runs.append(run)
        elif lower < upper:
            runs.append(replace(run, start=run.start + lower - position, num_elements=upper - lower))
        position += run.num_elements

    return first, tuple(runs)


def _converted(
    converter: WeightConverter, target: str, by_pattern: Mapping[str, list[Assembly]], expected: Shape | None
) -> dict[str, Assembly]:
    """Apply a converter's operations.

    Args:
        converter: says what transformers does with some stored tensors.
        target: the name that results; it contains the first of the converter's target patterns, and the others follow.
        by_pattern: the stored tensors, by the source pattern that they match.
        expected: the shape that the model has. If that is stored, an operation that looks at it changes nothing.

    Raises:
        UnsupportedModelError: an operation is not known, or shapes do not fit.
    """
    lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist):
            lists = [[_stack(target, tensors, operation.dim)] for tensors in lists]
        elif isinstance(operation, Concatenate):
            lists = [[_concatenate(target, [tensor for tensors in lists for tensor in tensors], operation.dim)]]
        elif isinstance(operation, Chunk) and len(lists) == len(lists[0]) == 1:
            chunks = _chunk(target, lists[0][0], len(converter.target_patterns), operation.dim)
            lists = [[chunk] for chunk in chunks]
        elif isinstance(operation, Transpose) and len(lists) == len(lists[0]) == 1:
            if not (operation.check_dims and lists[0][0].shape == expected):
                lists = [[_transpose(target, lists[0][0], operation.dim0, operation.dim1)]]
        else:
            raise UnsupportedModelError(
                f"{target}: it is stored in a form that only transformers can convert ({operation}). "
                "Load it with from_pretrained and save it with save_pretrained(save_original_format=False)."
            )

    patterns = converter.target_patterns
    if len(lists) != len(patterns):
        raise UnsupportedModelError(f"{target}: parts of it are missing in the files.")
    return {
        target.replace(patterns[0], pattern, 1): tensors[0] for pattern, tensors in zip(patterns, lists, strict=True)
    }


def _stack(target: str, tensors: Sequence[Assembly], dim: int) -> Assembly:
    """Join tensors along a new dimension."""
    unsqueezed = [Assembly((*t.shape[:dim], 1, *t.shape[dim:]), t.runs) for t in tensors]
    return _concatenate(target, unsqueezed, dim)


def _concatenate(target: str, tensors: Sequence[Assembly], dim: int) -> Assembly:
    """Join tensors along a dimension that they have."""
    shapes = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(shapes) != 1 or any(dim >= len(tensor.shape) for tensor in tensors):
        raise UnsupportedModelError(f"{target}: its stored parts have different shapes, which do not fit together.")

    first = tensors[0].shape

    # Elements are taken from each tensor in turn, so many at a time as lie together below the dimension.
    feeds = [(deque(tensor.runs), math.prod(tensor.shape[dim:])) for tensor in tensors]
    runs = [run for _ in range(math.prod(first[:dim])) for feed, count in feeds for run in _take(feed, count)]
    return Assembly((*first[:dim], sum(tensor.shape[dim] for tensor in tensors), *first[dim + 1 :]), tuple(runs))


def _chunk(target: str, tensor: Assembly, num_chunks: int, dim: int) -> list[Assembly]:
    """Cut a tensor into equal parts along a dimension."""
    shape = tensor.shape
    if dim >= len(shape) or shape[dim] % num_chunks:
        raise UnsupportedModelError(f"{target}: shape {shape} cannot be cut into {num_chunks} equal parts.")
    feed = deque(tensor.runs)
    count = math.prod(shape[dim:]) // num_chunks
    runs: list[list[TensorRun]] = [[] for _ in range(num_chunks)]
    for _ in range(math.prod(shape[:dim])):
        for chunk in runs:
            chunk.extend(_take(feed, count))

    part = (*shape[:dim], shape[dim] // num_chunks, *shape[dim + 1 :])
    return [Assembly(part, tuple(chunk)) for chunk in runs]


def _transpose(target: str, tensor: Assembly, dim0: int, dim1: int) -> Assembly:
    """Swap the last two dimensions of a tensor, by reading each matrix column by column."""
    *stack, rows, columns = tensor.shape
    feed = deque(tensor.runs)
    runs = list[TensorRun]()

    # Only the last two can be swapped so, and only if each matrix is one run that is not transposed yet.
    if {dim0 % len(tensor.shape), dim1 % len(tensor.shape)} == {len(stack), len(stack) + 1}:
        for _ in range(math.prod(stack)):
            runs += [replace(run, num_columns=columns) for run in _take(feed, rows * columns) if not run.num_columns]

    if len(runs) != math.prod(stack):
        raise UnsupportedModelError(f"{target}: shape {tensor.shape} is stored transposed in a way that is not known.")
    return Assembly((*stack, columns, rows), tuple(runs))


def _take(feed: deque[TensorRun], num_elements: int) -> Iterable[TensorRun]:
    """Remove the next elements from the front of a sequence of runs, and yield them."""
    while num_elements:
        run = feed.popleft()
        taken = min(run.num_elements, num_elements)
        if taken < run.num_elements:
            if run.num_columns:
                raise UnsupportedModelError(f"{run.name} is stored transposed, and would have to be cut.")
            feed.appendleft(TensorRun(name=run.name, start=run.start + taken, num_elements=run.num_elements - taken))

        num_elements -= taken
        yield replace(run, num_elements=taken)


def _inverted(assemblies: Mapping[str, Assembly], shapes: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return (stored tensor: own runs), given (own tensor: stored runs)."""
    pieces: dict[str, list[tuple[int, TensorRun]]] = {name: [] for name in shapes}
    for own_name, assembly in assemblies.items():
        position = 0
        for run in assembly.runs:
            # A matrix of so many rows and columns that is read column by column becomes one of as many columns as it
            # had rows. So that is how it is read on the way back.
            rows = run.num_elements // run.num_columns if run.num_columns else 0
            pieces[run.name].append(
                (run.start, TensorRun(name=own_name, start=position, num_elements=run.num_elements, num_columns=rows))
            )
            position += run.num_elements

    return {
        name: Assembly(shape, tuple(run for _, run in sorted(pieces[name], key=lambda piece: piece[0])))
        for name, shape in shapes.items()
    }
