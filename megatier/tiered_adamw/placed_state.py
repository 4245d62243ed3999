"""The placed state of a tiered optimizer: its chunks in their homes, and the threads that update them.

The number of a parameter is its index among all parameters of the optimizer, including those without a gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatier import _native
from megatier.errors import NonFiniteError, OptimizerError
from megatier.hardware import cores_usable
from megatier.optim.adamw import Scalars, adamw_threads, begin_adamw, rounding_of, step_scalars
from megatier.optim.masters import plane_dtype
from megatier.optim.muon import Matrix, update_matrix
from megatier.optim.norm_tiles import PIECE_ELEMENTS, sum_squares
from megatier.owner import Owner
from megatier.store.lease import Lease
from megatier.tier import Kind
from megatier.tiered_adamw.chunk_store import ChunkStore
from megatier.tiered_adamw.chunks import AHEAD, ChunkPlan, ElementRun, StateChunk
from megatier.tiered_adamw.parameters import form_of, in_order, schema_of
from megatier.workers import Workers

Entry = Mapping[str, Tensor]
"""The state of one parameter by the names of `state_dict`: the kinds, and `step`."""


class PlacedState:
    """The state of an optimizer's parameters, which begins with zeros. Use it from one thread.

    Attributes:
        store: the chunks.
        steps: the number of updates of each parameter that had any, by the parameter's number.
        owner: the process that has allocated the state.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        plan: ChunkPlan,
        nvme: Sequence[str],
        kept: str,
        seed: int,
    ) -> None:
        """Allocate all memory and files, and start the threads.

        Args:
            parameters: all parameters of the optimizer, on one device.
            names: their names, for messages.
            plan: the chunks of the parameters that need a gradient.
            nvme: mounts, which are opened only if a chunk is at home there.
            kept: the format of the state, as in the plan (`schema_of`).
            seed: the seed of the random numbers that round moments in bf16.

        Raises:
            CapacityError, TransferError: see `ChunkStore`.
        """
        self._parameters = parameters
        self._names = names
        self._kept = kept
        self._seed = seed
        trained = {index: parameter for index, parameter in enumerate(parameters) if parameter.requires_grad}
        self._forms = {index: form_of(parameter) for index, parameter in trained.items()}
        self.steps: dict[int, int] = {}
        self.owner = Owner("the state of this optimizer")

        device = next((parameter.device for parameter in trained.values()), torch.device("cpu"))
        self.store = ChunkStore(plan, nvme, device)
        try:
            self._start_threads()
        except BaseException:
            self.store.tiers.close()
            raise

    @property
    def is_torn(self) -> bool:
        """Whether an interrupt has torn the state."""
        return self.store.tiers.consistency.is_torn

    def mend(self) -> None:
        """Make the state usable after it was torn: end the threads, free all slots, and start new threads.

        Call `load` afterwards, because the chunks may hold anything.
        """
        # An update of the interrupted step may still run. Closing the pool ends it, and only then slots may be reused.
        self._pool.close()
        self._workers.close()
        self.store.tiers.reset()

        # The old finalizer has the old threads. It is detached after the new one exists, because one has to close the
        # store.
        old = self._finalizer
        self._start_threads()
        old.detach()

    def close(self) -> None:
        """End the threads, remove the files and free the memory. Closing twice is safe."""
        self._finalizer()

    def _start_threads(self) -> None:
        """Start the threads of AdamW and of the checks, with a finalizer that ends them and frees the chunks."""
        num_threads = cores_usable()
        self._pool = adamw_threads(num_threads)
        self._workers = Workers(num_threads, "megatier-gradient")

        # The finalizer must not refer to this object, which it would keep alive.
        ended = (self._pool, self._workers, self.store)
        self._finalizer = weakref.finalize(self, _release, self.owner, *ended)

    # ------------------------------------------------------------------ a step

    def gradients(self, numbers: Collection[int]) -> dict[int, Tensor]:
        """Return every gradient of these parameters, flat, in the order of its parameter's elements in memory.

        Raises:
            OptimizerError, NonFiniteError: a gradient or its parameter is not valid.
        """
        gradients = {}
        for index, parameter in enumerate(self._parameters):
            if (grad := parameter.grad) is None or index not in numbers:
                continue

            # Kernels get addresses and lengths, and the state has the parameter's memory order at the time of placing.
            if self._forms.get(index) != form_of(parameter):
                raise OptimizerError(
                    f"{self._names[index]} was changed after its state was placed: its type, shape, strides or "
                    "device; or it needed no gradient then. Make a new optimizer; load_state_dict gives it the state."
                )
            if grad.layout is not torch.strided:
                raise OptimizerError(f"the gradient of {self._names[index]} is sparse; make it dense (sparse=False).")
            gradients[index] = in_order(parameter, grad.to(parameter.dtype))
        self._check_finite(gradients)
        return gradients

    def _check_finite(self, gradients: Mapping[int, Tensor]) -> None:
        """Raise if a gradient is not finite, by its sum of squares in fp64, which bf16 and fp32 cannot overflow."""
        pieces: list[Tensor] = []
        for grad in gradients.values():
            if grad.numel():
                pieces += grad.split(PIECE_ELEMENTS)
        sums = [sum_squares(piece) for piece in pieces if piece.is_cuda]
        on_cpu = [piece for piece in pieces if not piece.is_cuda]
        sums += self._workers.map(sum_squares, on_cpu)

        # All sums are read at once, because on a GPU each read makes the host wait.
        if sums and not torch.cat(sums).isfinite().all():
            index = next(index for index, grad in gradients.items() if not grad.isfinite().all())
            raise NonFiniteError(
                f"the gradient of {self._names[index]} is not finite; no parameter was changed. Leave this step out by "
                "zero_grad(); lower the learning rate, or clip, if it happens again."
            )

    def update(self, gradients: Mapping[int, Tensor], settings: Callable[[int], Mapping[str, Any]]) -> None:
        """Update the parameters that have a gradient. If this raises, some of them are a step ahead of others.

        Each chunk is leased, updated and released. The update of the next chunk begins before the current one has
        ended. `SLOTS` counts the chunks in slots: those ahead, two in `flying`, and one that is being written home.

        Args:
            gradients: the result of `gradients`.
            settings: returns the settings of a parameter's group, by the parameter's number.
        """
        due: list[tuple[StateChunk, list[ElementRun]]] = []
        for chunk in self.store.chunks:
            runs = [run for run in chunk.runs if run.parameter in gradients]
            if runs:
                due.append((chunk, runs))

        flying: deque[tuple[StateChunk, Lease, list[_native.Batch | None]]] = deque()
        try:
            for number, (chunk, runs) in enumerate(due):
                # Towards the end this brings the first chunks again, for the next step.
                ahead, _ = due[(number + AHEAD) % len(due)]
                self.store.prefetch(ahead)

                # Noted before its updates begin: if one of them fails, those before it are still waited for below.
                lease = self.store.lease(chunk)
                batches: list[_native.Batch | None] = []
                flying.append((chunk, lease, batches))
                for run in runs:
                    gradient = gradients[run.parameter][run.start : run.stop]
                    batch = self._apply(run, lease.bytes, gradient, settings(run.parameter))
                    batches.append(batch)

                # The one before is given back only now, so that the threads had this one's work when they ended it.
                if len(flying) > 1:
                    _finish(self.store, *flying.popleft())
        finally:
            # Also after an error: threads may be at work on parameters and slots. The stack calls all of them, the
            # oldest first, even if one raises.
            with contextlib.ExitStack() as rest:
                for applied in reversed(flying):
                    rest.callback(_finish, self.store, *applied)

        self.store.tiers.take_log()  # for which nobody asks here
        for index in gradients:
            self.steps[index] = self.steps.get(index, 0) + 1

    def _apply(
        self, run: ElementRun, chunk: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> _native.Batch | None:
        """Begin the update of a run, whose state lies in a chunk's bytes. Return what to wait for."""
        index = run.parameter
        parameter = self._parameters[index]
        learning_rate = group["lr"]
        step = self.steps.get(index, 0) + 1
        decay = 1 - learning_rate * group["weight_decay"]

        # The parameter is the weight plane, a view of its memory: the kernel takes elements in the order of memory.
        planes = {kind: chunk[start:stop] for kind, (start, stop) in run.planes.items()}
        weights = in_order(parameter, parameter)
        planes[Kind.WEIGHT] = weights[run.start : run.stop]

        # The last of the kernels' numbers is the factor of clipping: gradients come here clipped, if at all.
        if run.schema.by_matrix:
            of_kernels = (0.0,) * 7 + (1.0,)
            scalars = Scalars(decay, step, learning_rate, group["momentum"], of_kernels)
            matrix = Matrix(0, tuple(parameter.shape))
            update_matrix(matrix, planes, gradient, scalars, 0)
            return None

        of_adamw = step_scalars(step, learning_rate, group["betas"], group["eps"])
        scalars = Scalars(decay, step, learning_rate, 0.0, (*of_adamw, 1.0))
        rounding = rounding_of(run.schema, self._seed, step, str(index), run.start)
        segment = (0, run.stop - run.start, decay)
        return begin_adamw(self._pool, planes, gradient, [segment], scalars, {}, rounding)

    # ------------------------------------------------------------------ numbers in and out

    def check(self, state: Mapping[int, Entry]) -> None:
        """Refuse a state of other parameters.

        Raises:
            OptimizerError: names the first parameter that it does not fit.
        """
        for index, entry in state.items():
            form = self._forms.get(index)
            kinds = [] if form is None else schema_of(form.dtype, self._kept).passing_kinds
            shapes = [tuple(entry[kind].shape) for kind in kinds if kind in entry]

            # torch has no remainder. All else belongs to this optimizer, and to no other.
            needed = ["step", *(kind for kind in kinds if kind is not Kind.REMAINDER)]
            is_whole = all(name in entry for name in needed)
            has_shape = form is not None and all(shape == form.shape for shape in shapes)
            if not (is_whole and has_shape):
                had = "none here" if form is None else f"{tuple(form.shape)} here"
                raise OptimizerError(
                    f"the state of parameter {index} has shapes {shapes}, {had}. Load the state of the same model."
                )

    def load(self, state: Mapping[int, Entry]) -> None:
        """Take a state that `check` has let pass, chunk by chunk; parameters that it does not have begin with zeros."""
        for chunk in self.store.chunks:
            with self.store.overwrite(chunk) as block:
                for run in chunk.runs:
                    entry = state.get(run.parameter, {})
                    self._fill(run, block, entry)

        self.steps = {index: int(entry["step"]) for index, entry in state.items()}

    @torch.no_grad()
    def _fill(self, run: ElementRun, chunk: Tensor, entry: Entry) -> None:
        """Fill the planes of a run from a parameter's state, with zeros for each kind that the state has not."""
        for kind, plane in _planes(run, chunk):
            if kind in entry:
                plane.copy_(in_order(self._parameters[run.parameter], entry[kind])[run.start : run.stop])
            else:
                plane.zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes of the entries that `empty` makes."""
        return sum(
            self._parameters[index].numel() * sum(dtype.itemsize for dtype in self._types(index).values())
            for index in self.steps
        )

    def empty(self, numbers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the entries of parameters that had an update, for `copy_to` to fill."""
        entries = {}
        for index in numbers:
            parameter = self._parameters[index]
            entry = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
            for kind, dtype in self._types(index).items():
                # Strided as the parameter, as the state of torch's own optimizers is.
                entry[str(kind)] = torch.empty_strided(parameter.size(), parameter.stride(), dtype=dtype, device="cpu")
            entries[index] = entry
        return entries

    @torch.no_grad()
    def copy_to(self, state: Mapping[int, Entry]) -> None:
        """Write the numbers into entries that `empty` made."""
        for index, entry in state.items():
            entry["step"].fill_(self.steps[index])

        wanted = [chunk for chunk in self.store.chunks if any(run.parameter in state for run in chunk.runs)]

        # Closed whatever happens, because the generator holds the lease of a chunk.
        with contextlib.closing(self.store.read(wanted)) as chunks:
            for chunk, block in chunks:
                for run in chunk.runs:
                    # Of a chunk that several parameters share, some may not be asked for.
                    entry = state.get(run.parameter, {})
                    _copy_run(run, block, entry)

    def _types(self, index: int) -> dict[Kind, torch.dtype]:
        """Return the kinds of a parameter's state with their types; fp32 is its own master and has no remainder."""
        schema = schema_of(self._forms[index].dtype, self._kept)
        return {kind: plane_dtype(schema, kind) for kind in schema.passing_kinds}


def _planes(run: ElementRun, chunk: Tensor) -> Iterator[tuple[Kind, Tensor]]:
    """Yield each kind of a run's state, as a flat view of a chunk in RAM."""
    for kind, (start, stop) in run.planes.items():
        yield kind, chunk[start:stop].view(plane_dtype(run.schema, kind))


def _copy_run(run: ElementRun, chunk: Tensor, entry: Entry) -> None:
    """Write the planes of a run into a parameter's entry, as far as that has their kinds."""
    for kind, plane in _planes(run, chunk):
        tensor = entry.get(kind)
        if tensor is not None:
            in_order(tensor, tensor)[run.start : run.stop] = plane


def _finish(store: ChunkStore, chunk: StateChunk, lease: Lease, batches: Iterable[_native.Batch | None]) -> None:
    """Wait for the updates of a chunk, then start its way home."""
    # A GPU's updates lie on its current stream, and the store orders the copies home behind them.
    for batch in batches:
        if batch is not None:
            batch.wait()

    # After an interrupt inside the store nobody knows whose its slots are: `load_state_dict` takes all of them back.
    if not store.tiers.consistency.is_torn:
        store.give_back(chunk, lease)


def _release(owner: Owner, pool: _native.ThreadPool, workers: Workers, store: ChunkStore) -> None:
    """End the threads and free the chunks. This runs in `close`, at the optimizer's end or at that of the process."""
    # A forked child inherits the finalizer; it has none of the threads, and the files are its parent's.
    if owner.is_here:
        pool.close()
        workers.close()
        store.tiers.close()
