"""Finds the law by which a large parameter is drawn, so that any chunk of it can be drawn by itself.

Hugging Face's own `_init_weights` sets a parameter by operations such as `normal_` and `zero_`. For a large parameter
these are not run but noted (`Noting`), and its chunks are drawn later: in any order, by several threads, each chunk by
a generator whose seed depends on the run's seed, the parameter's name and the chunk's number alone.

An operation that does not treat each element by itself is run at once, over a parameter that was drawn whole before.
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

LAW_ELEMENTS = 4 << 20
"""Elements of a chunk. A parameter that has no more is drawn whole with the others of its unit."""

aten = torch.ops.aten
DRAWING = frozenset({aten.normal_.default, aten.uniform_.default})
SETTING = DRAWING | {aten.zero_.default, aten.fill_.Scalar}
"""Operations that set every element anew."""
NOTED = SETTING | {
    *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar),
    *(aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.sub_.Scalar),
    *(aten.clamp_.default, aten.erfinv_.default, aten.exp_.default, aten.neg_.default),
}
"""Operations that treat each element by itself, if their other arguments are numbers."""
SERIAL_ELEMENTS = 16 << 10
"""Elements that torch treats in the thread that asks: more would go to a team of threads for each of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on a run of a parameter's elements."""

    operation: Callable[..., Tensor]
    """What is called, in place."""
    arguments: tuple[Any, ...]
    """The numbers that it is called with."""
    start: int
    """The first element of the run, in the slice that the law is of."""
    stop: int
    """The end of the run."""


class Law:
    """The law of a parameter, or of a run of its elements."""

    def __init__(self, tensor: TensorSlice, seed: int) -> None:
        """Begin with no step.

        Args:
            tensor: the parameter or the run of it.
            seed: that of the run.
        """
        self.parameter = nn.Parameter(torch.empty(tensor.shape, dtype=torch.float32, device="cpu"))
        """Stands in the parameter's place while steps are noted. Nobody touches its pages, so they take no memory."""
        self.name = tensor.name
        """That of the parameter."""
        self._steps: list[Operation] = []
        self._key = f"{seed}:{tensor.name}"
        self._first = tensor.offset
        self._size = tensor.num_elements
        self._whole = math.prod(tensor.parameter_shape)

    @property
    def is_complete(self) -> bool:
        """Whether the steps set every element, whatever was there before."""
        if not self._steps:
            return False
        # A step that sets all elements clears those before it, so only the first one can set them.
        first = self._steps[0]
        return first.operation in SETTING and self._is_all(first)

    def note(self, operation: Callable[..., Tensor], target: Tensor, arguments: tuple[Any, ...]) -> bool:
        """Note an operation on the parameter or a view of it; returns False if it cannot be done chunk by chunk."""
        has_numbers_alone = all(isinstance(argument, int | float | None) for argument in arguments)
        is_run = target.is_contiguous() and target.dtype is torch.float32
        if operation not in NOTED or not has_numbers_alone or not is_run:
            return False

        start = int(target.storage_offset())
        stop = start + int(target.numel())
        step = Operation(operation=operation, arguments=arguments, start=start, stop=stop)
        is_all = self._is_all(step)

        # A chunk's generator draws for the chunk's elements, so what is drawn has to be all of the parameter.
        if operation in DRAWING and not is_all:
            return False

        # What is set anew needs nothing that was done before.
        if operation in SETTING and is_all:
            self._steps.clear()
        self._steps.append(step)
        return True

    @torch.no_grad()
    def settle(self) -> Tensor:
        """Fill the parameter's own memory, with NaN where no step sets it, and return it, flat."""
        # A view, as the parameter is contiguous.
        flat = self.parameter.detach().flatten()
        for start, values in self.draw(0, self._size):
            stop = start + values.numel()
            flat[start:stop] = values
        return flat

    def draw(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, flat fp32 values) of elements [start, stop) of the slice, in order."""
        # Chunks are counted from the parameter's first element, so that a run of it has the values of the whole.
        first_chunk = (self._first + start) // LAW_ELEMENTS
        end_chunk = -(-(self._first + stop) // LAW_ELEMENTS)
        for number in range(first_chunk, end_chunk):
            begin = number * LAW_ELEMENTS
            size = min(LAW_ELEMENTS, self._whole - begin)
            first = begin - self._first
            values = self._draw_chunk(number, first, size)

            # The chunk is drawn whole even so, because a generator gives its numbers from the chunk's beginning on.
            lower = max(first, start)
            upper = min(first + size, stop)
            yield lower, values[lower - first : upper - first]

    @torch.no_grad()
    def _draw_chunk(self, number: int, first: int, size: int) -> Tensor:
        """Return the values of a chunk, the first of which is an element of the slice, or lies before it."""
        values = torch.empty(size, dtype=torch.float32, device="cpu")
        if not self.is_complete:
            values.fill_(math.nan)

        for index, step in enumerate(self._steps):
            if step.operation in DRAWING:
                # One for each step and chunk, so that chunks may be drawn in any order.
                generator = torch.Generator("cpu")
                generator.manual_seed(seed_of(f"{self._key}:{index}:{number}"))
                step.operation(values, *step.arguments, generator=generator)
                continue

            # A step may be for some elements alone, such as the row of the padding token.
            lower = max(0, step.start - first)
            upper = max(0, step.stop - first)
            for part in values[lower:upper].split(SERIAL_ELEMENTS):
                step.operation(part, *step.arguments)
        return values

    def _is_all(self, step: Operation) -> bool:
        return (step.start, step.stop) == (0, self._size)


class Noting(TorchDispatchMode):
    """Notes operations on parameters that have a law, while it is the mode."""

    def __init__(self, laws: Iterable[Law]) -> None:
        """Take the laws."""
        super().__init__()  # type: ignore[no-untyped-call]
        # A view has the storage of what it is a view of.
        self._laws = {_storage(law.parameter): law for law in laws}

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - whatever is called
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        touched = {_storage(tensor) for tensor in tensors} & self._laws.keys()

        # A view changes nothing, and whatever is done with it comes by here.
        if not touched or function.is_view:
            return function(*args, **kwargs)

        # Only an operation in place on the parameter alone can be noted: it begins with what it changes.
        if not kwargs and args[0] is tensors[0] and self._note(function, args):
            return args[0]

        # Settled, the parameter holds its values as any other tensor does.
        for storage in touched:
            self._laws.pop(storage).settle()
        return function(*args, **kwargs)

    def _note(self, function: Any, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
        law = self._laws.get(_storage(args[0]))
        return law is not None and law.note(function, args[0], args[1:])

    @property
    def noted(self) -> list[Law]:
        """The laws that say all that was done with their parameters."""
        return list(self._laws.values())


def has_law(tensor: TensorSlice) -> bool:
    """Return whether a parameter is so large that its chunks are drawn by themselves."""
    return math.prod(tensor.parameter_shape) > LAW_ELEMENTS


def _storage(tensor: Tensor) -> int:
    """Return a number that tells a tensor's memory from that of others."""
    return int(tensor.untyped_storage()._cdata)


def seed_of(text: str) -> int:
    """Return a seed of 64 bits that depends on every letter of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
