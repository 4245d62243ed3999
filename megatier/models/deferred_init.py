"""Deferred initialisation of large parameters: record how Hugging Face sets one, and draw any chunk of it later.

Hugging Face's own `_init_weights` sets a parameter by in-place operations such as `normal_` and `zero_`. For a large
parameter `RecordInits` records them instead of running them, and `DeferredInit` draws its chunks later, in any order
and from several threads. The generator of a chunk is seeded from the run's seed, the parameter's name and the number of
the chunk, so the values do not depend on who draws them or when.

An operation that does not treat each element by itself cannot be recorded. The parameter is then materialized, and the
operation runs on it. `initialiser` is the only caller.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatier.layout import TensorSlice

INIT_CHUNK_ELEMENTS = 4 << 20
"""Elements of a chunk. A parameter that has no more is drawn whole, together with the others of its unit."""

aten = torch.ops.aten
DRAWING_OPS = frozenset({aten.normal_.default, aten.uniform_.default})
OVERWRITING_OPS = DRAWING_OPS | {aten.zero_.default, aten.fill_.Scalar}
"""In-place operations that overwrite every element."""
RECORDED_OPS = OVERWRITING_OPS | {
    *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar),
    *(aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.sub_.Scalar),
    *(aten.clamp_.default, aten.erfinv_.default, aten.exp_.default, aten.neg_.default),
}
"""In-place operations that treat each element by itself, as long as their other arguments are numbers."""
SERIAL_ELEMENTS = 16 << 10
"""Elements of one operation on a chunk. torch hands larger operations to a team of threads, once for each thread of
ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on a run of a parameter's elements."""

    operation: Callable[..., Tensor]
    """The in-place function."""
    arguments: tuple[Any, ...]
    """Its numeric arguments."""
    start: int
    """The first element of the run, counted in the slice that is initialised."""
    stop: int
    """The end of the run."""


class DeferredInit:
    """The recorded initialisation of a parameter, or of a run of its elements."""

    def __init__(self, tensor: TensorSlice, seed: int) -> None:
        """Begin without any recorded step.

        Args:
            tensor: the parameter, or the run of its elements.
            seed: the run's seed.
        """
        self.parameter = nn.Parameter(torch.empty(tensor.shape, dtype=torch.float32, device="cpu"))
        """The stand-in for the parameter while steps are recorded. Nobody touches its pages, so it takes no memory."""
        self.name = tensor.name
        """The parameter's name."""
        self._steps: list[Operation] = []
        self._key = f"{seed}:{tensor.name}"
        self._first = tensor.offset
        self._size = tensor.num_elements
        self._whole = math.prod(tensor.parameter_shape)

    @property
    def is_complete(self) -> bool:
        """Whether the steps set every element, so that earlier values do not matter."""
        if not self._steps:
            return False
        # `record` drops the steps before one that overwrites all elements, so only the first step can be of that kind.
        first = self._steps[0]
        return first.operation in OVERWRITING_OPS and self._is_all(first)

    def record(self, operation: Callable[..., Tensor], target: Tensor, arguments: tuple[Any, ...]) -> bool:
        """Record an operation on the parameter or a view of it. Return False if it cannot be done chunk by chunk."""
        has_numbers_alone = all(isinstance(argument, int | float | None) for argument in arguments)
        is_run = target.is_contiguous() and target.dtype is torch.float32
        if operation not in RECORDED_OPS or not has_numbers_alone or not is_run:
            return False

        start = int(target.storage_offset())
        stop = start + int(target.numel())
        step = Operation(operation=operation, arguments=arguments, start=start, stop=stop)
        is_all = self._is_all(step)

        # A chunk has its own generator, so a random operation must cover the whole parameter.
        if operation in DRAWING_OPS and not is_all:
            return False

        # An operation that overwrites all elements makes the steps before it pointless.
        if operation in OVERWRITING_OPS and is_all:
            self._steps.clear()
        self._steps.append(step)
        return True

    @torch.no_grad()
    def materialize(self) -> Tensor:
        """Draw the values into the parameter's own memory, with NaN where no step sets one, and return them flat."""
        # A view, since the parameter is contiguous.
        flat = self.parameter.detach().flatten()
        for start, values in self.draw(0, self._size):
            stop = start + values.numel()
            flat[start:stop] = values
        return flat

    def draw(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, flat fp32 values) of elements [start, stop) of the slice, in order."""
        # Chunks are counted from the parameter's first element, so a slice of it gets the same values as the whole.
        first_chunk = (self._first + start) // INIT_CHUNK_ELEMENTS
        end_chunk = -(-(self._first + stop) // INIT_CHUNK_ELEMENTS)
        for number in range(first_chunk, end_chunk):
            begin = number * INIT_CHUNK_ELEMENTS
            size = min(INIT_CHUNK_ELEMENTS, self._whole - begin)
            first = begin - self._first
            values = self._draw_chunk(number, first, size)

            # The chunk is drawn whole even if less is wanted, because a generator only gives its numbers from the
            # start.
            lower = max(first, start)
            upper = min(first + size, stop)
            yield lower, values[lower - first : upper - first]

    @torch.no_grad()
    def _draw_chunk(self, number: int, first: int, size: int) -> Tensor:
        """Return the values of a chunk. Its first element may lie before the slice."""
        values = torch.empty(size, dtype=torch.float32, device="cpu")
        if not self.is_complete:
            values.fill_(math.nan)

        for index, step in enumerate(self._steps):
            if step.operation in DRAWING_OPS:
                # Each step of each chunk has its own generator, so chunks may be drawn in any order.
                generator = torch.Generator("cpu")
                generator.manual_seed(seed_of(f"{self._key}:{index}:{number}"))
                step.operation(values, *step.arguments, generator=generator)
                continue

            # A step may cover only some elements, such as the row of the padding token.
            lower = max(0, step.start - first)
            upper = max(0, step.stop - first)
            for part in values[lower:upper].split(SERIAL_ELEMENTS):
                step.operation(part, *step.arguments)
        return values

    def _is_all(self, step: Operation) -> bool:
        return (step.start, step.stop) == (0, self._size)


class RecordInits(TorchDispatchMode):
    """A dispatch mode that records operations on deferred parameters instead of running them."""

    def __init__(self, deferred: Iterable[DeferredInit]) -> None:
        """Record for these parameters."""
        super().__init__()  # type: ignore[no-untyped-call]
        # A view shares the storage of its base.
        self._deferred = {_storage(init.parameter): init for init in deferred}

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - whatever is called
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        touched = {_storage(tensor) for tensor in tensors} & self._deferred.keys()

        # A view changes nothing by itself, and operations on it are dispatched here too.
        if not touched or function.is_view:
            return function(*args, **kwargs)

        # Only an in-place operation on a single deferred parameter can be recorded: its first argument is what it
        # changes.
        if not kwargs and args[0] is tensors[0] and self._record(function, args):
            return args[0]

        # A materialized parameter holds its values like any other tensor.
        for storage in touched:
            self._deferred.pop(storage).materialize()
        return function(*args, **kwargs)

    def _record(self, function: Any, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
        init = self._deferred.get(_storage(args[0]))
        return init is not None and init.record(function, args[0], args[1:])

    @property
    def recorded(self) -> list[DeferredInit]:
        """The parameters that are still deferred: their steps describe all that was done to them."""
        return list(self._deferred.values())


def is_deferred(tensor: TensorSlice) -> bool:
    """Return whether a parameter is so large that its initialisation is deferred."""
    return math.prod(tensor.parameter_shape) > INIT_CHUNK_ELEMENTS


def _storage(tensor: Tensor) -> int:
    """Return a number that tells a tensor's memory from that of others."""
    return int(tensor.untyped_storage()._cdata)


def seed_of(text: str) -> int:
    """Return a seed of 64 bits that depends on every letter of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
