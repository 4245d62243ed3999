"""TieredAdamW: a torch optimizer for any model, its state in RAM and on NVMe.

    with TieredAdamW(model.parameters(), lr=1e-4, ram="8GiB", nvme=["/mnt/a:200GiB"]) as optimizer:
        ...                                   # any loop, scheduler or clipping that takes a torch optimizer

Parameters and gradients stay where they are, on the CPU or a GPU. The state is two fp32 moments and, for bf16
parameters, the 16 bits that the fp32 master has beyond them. It comes to the parameters chunk by chunk: chunks are read
ahead, updated in C (on a GPU in Triton) and written back afterwards. The arithmetic is that of `numerics.optimizer`.
The place of the state changes no bit.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from megatier import _native
from megatier.config.values import parse_bytes, parse_list, parse_mount
from megatier.drives.blockfile import budget_bytes
from megatier.errors import CapacityError, ConfigError, NonFiniteError, OptimizerError
from megatier.hardware import cores_usable, ram_available_bytes
from megatier.integrations.chunk_store import ChunkStore
from megatier.integrations.chunks import AHEAD, ChunkPlan, ElementRun, ParameterSize, StateChunk, plan_chunks
from megatier.integrations.parameters import Form, check_parameters, form_of, in_order
from megatier.integrations.state_file import write_state_file
from megatier.numerics.optimizer import PIECE_ELEMENTS, SPAN_ELEMENTS, adamw_threads, begin_adamw, step_scalars
from megatier.numerics.vector_math import warm
from megatier.store.lease import Lease
from megatier.tier import Kind, Tier

STATE = {Kind.EXP_AVG: torch.float32, Kind.EXP_AVG_SQ: torch.float32, Kind.REMAINDER: torch.int16}
"""Kinds of state by their names in `state_dict`, with their types."""
Due = tuple[StateChunk, tuple[ElementRun, ...]]
"""A chunk, and the runs of it whose parameters have a gradient in this step."""


class TieredAdamW(Optimizer):
    """AdamW whose state lies in RAM and on NVMe.

    It behaves as `torch.optim.AdamW` does, with these differences:

    - bf16 parameters have fp32 masters: the parameter is the master, rounded, and its remainder is state.
    - The first step, or `load_state_dict`, allocates memory and files, so groups are added before it. `close`, the end
      of the `with` block or the end of the process gives them back.
    - A gradient that is not finite is refused before anything is changed.
    - `optimizer.state` is empty. `state_dict` gives the state if it fits RAM; `save_state` streams it to a file.

    Use it from one thread.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        ram: int | str,
        nvme: str | Sequence[str] = (),
    ) -> None:
        """Plan where the state of the parameters that need a gradient will lie; nothing large is allocated yet.

        Args:
            params: parameters, named parameters or groups; bf16 or fp32, all on one device.
            lr: learning rate. Each step reads it from the parameter's group, and the next three too.
            betas: decay of the moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled weight decay.
            ram: bytes for state, slots included, such as "8GiB".
            nvme: mounts that take the rest, as DIRECTORY or DIRECTORY:SIZE; a list, or comma-separated.

        Raises:
            PlanError: the state does not fit.
            ConfigError: a size, a mount or a hyperparameter is not usable.
            OptimizerError: a parameter cannot be taken.
        """
        warm()
        self._ram = parse_bytes(str(ram))
        self._nvme = parse_list(nvme)
        self._nvme_bytes = sum(budget_bytes(parse_mount(text, "nvme")) for text in self._nvme)

        self._chunks: ChunkStore | None = None
        """The state; None before the first step or load."""
        self._forms: dict[int, Form] = {}
        """Form of each parameter that has state, by its number among all parameters."""
        self._steps: dict[int, int] = {}
        """Number of updates so far of each parameter that had any, by its number."""
        self._is_torn = False
        """Whether a step or a load has begun and has not come to its end."""
        self._is_closed = False

        # torch adds the groups in here by `add_param_group`, which needs all of the above.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files and free the memory. Parameters keep their values. Closing twice is safe."""
        self._is_closed = True
        if self._chunks is not None:
            self._finalizer()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, before the first step.

        Raises:
            OptimizerError: it is too late, or a parameter cannot be taken.
            PlanError, ConfigError: see `__init__`.
        """
        if self._chunks is not None:
            raise OptimizerError("the first step has placed all state: add groups before it, or make a new optimizer.")
        super().add_param_group(param_group)

        # A group that cannot be taken is taken out again, so that a caller who handles the error has what it had.
        try:
            _check_settings(self.param_groups[-1])
            self._plan()
        except BaseException:
            self.param_groups.pop()
            raise

    # ------------------------------------------------------------------ step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Write-backs, and work on a GPU, may still run when it returns.

        Args:
            closure: computes loss and gradients anew, and returns the loss.

        Raises:
            NonFiniteError: a gradient is NaN or infinite. Nothing was changed; `zero_grad` and go on if you like.
            OptimizerError: a gradient or parameter cannot be taken. Nothing was changed.
            TransferError, IntegrityError: a drive failed. Parameters and state do not belong together until
                `load_state_dict`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # All that can be refused is refused here, so that a caller may go on after such an error.
        self._check_whole()
        store = self._start()
        gradients = self._gradients()
        runs = ((chunk, tuple(run for run in chunk.runs if run.parameter in gradients)) for chunk in store.chunks)

        # From the first chunk to the last count some parameters are a step ahead of others. Whatever ends this early,
        # a drive that fails or Ctrl-C, leaves the mark, and nothing but a load takes it away.
        self._is_torn = True
        self._update(store, [due for due in runs if due[1]], gradients)
        for index in gradients:
            self._steps[index] = self._steps.get(index, 0) + 1
        self._is_torn = False

        # C and Triton write past torch, whose autograd would not see that saved weights have changed.
        torch.autograd.graph.increment_version([self._parameters[index] for index in gradients])
        return loss

    def _update(self, store: ChunkStore, due: Sequence[Due], gradients: Mapping[int, Tensor]) -> None:
        """Bring, update and give back each chunk; the next chunk's update begins before one's has ended.

        `SLOTS` counts on what is in slots at once: chunks ahead, two in `flying`, and one on its way home.
        """
        flying: deque[tuple[StateChunk, Lease, list[_native.Batch | None]]] = deque()
        try:
            for number, (chunk, runs) in enumerate(due):
                # Towards the end this brings the first chunks again, for the next step.
                store.prefetch(due[(number + AHEAD) % len(due)][0])

                # Noted before its updates begin: if one of them fails, those before it are still waited for below.
                flying.append((chunk, store.lease(chunk), []))
                _, lease, batches = flying[-1]
                for run in runs:
                    batches.append(self._apply(run, lease.bytes, gradients))

                # The one before is given back only now, so that the threads had this one's work when they ended it.
                if len(flying) > 1:
                    _finish(store, *flying.popleft())
        finally:
            # Also after an error: threads may be at work on parameters and slots. The stack calls all of them, the
            # oldest first, even if one raises.
            with contextlib.ExitStack() as rest:
                for applied in reversed(flying):
                    rest.callback(_finish, store, *applied)

    def _apply(self, run: ElementRun, chunk: Tensor, gradients: Mapping[int, Tensor]) -> _native.Batch | None:
        """Begin the update of a run, whose state lies in a chunk's bytes; return what to wait for."""
        index = run.parameter
        group = self.param_groups[self._group_of[index]]
        learning_rate = group["lr"]
        scalars = step_scalars(self._steps.get(index, 0) + 1, learning_rate, group["betas"], group["eps"])

        # The parameter is the weight plane, a view of its memory: the kernel takes elements in the order of memory.
        planes = {kind: chunk[start:stop] for kind, (start, stop) in run.planes.items()}
        planes[Kind.WEIGHT] = in_order(self._parameters[index], self._parameters[index])[run.start : run.stop]
        segment = (0, run.stop - run.start, 1 - learning_rate * group["weight_decay"])
        return begin_adamw(self._pool, planes, gradients[index][run.start : run.stop], [segment], (*scalars, 1.0), {})

    def _gradients(self) -> dict[int, Tensor]:
        """Return every gradient, flat, in the order of its parameter's elements in memory.

        Raises:
            OptimizerError, NonFiniteError: one of them, or its parameter, cannot be taken.
        """
        found = {}
        for index, parameter in enumerate(self._parameters):
            if (grad := parameter.grad) is None:
                continue

            # The kernels get addresses and lengths, and the state's order is that of the parameter as it was placed.
            if self._forms.get(index) != form_of(parameter):
                raise OptimizerError(
                    f"{self._name(index)} was changed after its state was placed: its type, shape, strides or device; "
                    "or it needed no gradient then. Make a new TieredAdamW; load_state_dict gives it the state."
                )
            if grad.layout is not torch.strided:
                raise OptimizerError(f"the gradient of {self._name(index)} is sparse; make it dense (sparse=False).")
            found[index] = in_order(parameter, grad.to(parameter.dtype))
        self._check_finite(found)
        return found

    def _check_finite(self, gradients: Mapping[int, Tensor]) -> None:
        """Refuse gradients that are not finite, by sums of squares: those of bf16 and fp32 cannot overflow fp64."""
        pieces = [piece for grad in gradients.values() if grad.numel() for piece in grad.split(PIECE_ELEMENTS)]
        sums = [_sum_squares(piece) for piece in pieces if piece.is_cuda]
        sums += self._threads.map(_sum_squares, (piece for piece in pieces if not piece.is_cuda))

        # One look at all sums: on a GPU each look would make the host wait.
        if sums and not torch.cat(sums).isfinite().all():
            index = next(index for index, grad in gradients.items() if not grad.isfinite().all())
            raise NonFiniteError(
                f"the gradient of {self._name(index)} is not finite; no parameter was changed. Leave this step out by "
                "zero_grad(); lower the learning rate, or clip, if it happens again."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.AdamW does, in RAM. bf16 parameters have a `remainder` as well as moments.

        Raises:
            CapacityError: it does not fit RAM.
            OptimizerError: a step or a load failed half way, so there is no whole state.
        """
        needed = sum(
            self._parameters[index].numel() * sum(dtype.itemsize for dtype in self._types(index).values())
            for index in self._steps
        )
        if needed > (free := ram_available_bytes()):
            raise CapacityError("ram", needed, free, "Write the state to a file with save_state(path): that streams.")

        described = self._describe()
        self._copy_to(described["state"])
        return described

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `torch.save(optimizer.state_dict(), path)` writes, chunk by chunk, whatever its size.

        The file appears when it is whole. `optimizer.load_state_dict(torch.load(path, mmap=True))` streams it back.

        Args:
            path: the file, which replaces one that is there.

        Raises:
            TransferError: the file cannot be written, or a drive failed. A file that was at `path` is still there.
            OptimizerError: a step or a load failed half way, so there is no whole state.
        """
        write_state_file(path, self._describe, lambda state_dict: self._copy_to(state_dict["state"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a TieredAdamW, wherever its parts lay, or of a torch.optim.AdamW, chunk by chunk.

        This mends an optimizer whose step or load failed, or was interrupted, half way. Load the parameters too,
        because the state belongs to their values. `torch.load(path, mmap=True)` needs no RAM.

        Args:
            state_dict: as `state_dict` or `save_state` made it.

        Raises:
            OptimizerError: it is not the state of these parameters, or of another variant of AdamW.
            ValueError: other groups (torch's).
        """
        state: dict[int, dict[str, Tensor]] = state_dict["state"]
        self._check_open()

        # Some trainers load an empty state before they move the model, whose devices are not known until then.
        if state:
            self._start()
        self._check_loaded(state_dict)

        # From here on something is changed. torch itself checks the groups before it changes any.
        was_torn = self._is_torn
        self._is_torn = True
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError:
            self._is_torn = was_torn
            raise
        for group in self.param_groups:
            group["lr"] = float(group["lr"])  # torch's may be a tensor

        # After something broke off, leases, threads and dirty slots of that time are dropped before chunks are used.
        if self._chunks is not None:
            if was_torn or self._chunks.is_torn:
                self._mend(self._chunks)
            for chunk in self._chunks.chunks:
                with self._chunks.overwrite(chunk) as block:
                    for run in chunk.runs:
                        self._fill(run, block, state.get(run.parameter, {}))

        self._steps = {index: int(entry["step"]) for index, entry in state.items()}
        self._is_torn = False

    @torch.no_grad()
    def _fill(self, run: ElementRun, chunk: Tensor, entry: Mapping[str, Tensor]) -> None:
        """Fill the planes of a run from a parameter's state, with zeros for each kind that the state has not."""
        for kind, plane in _planes(run, chunk):
            if kind in entry:
                plane.copy_(in_order(self._parameters[run.parameter], entry[kind])[run.start : run.stop])
            else:
                plane.zero_()

    def _describe(self) -> dict[str, Any]:
        """Return the state_dict with tensors whose numbers are still missing."""
        self._check_whole()

        # torch's own state_dict packs what lies in `self.state`, which is therefore filled for a moment.
        for index in self._steps:
            parameter = self._parameters[index]
            self.state[parameter] = {"step": torch.tensor(0.0)} | {
                str(kind): torch.empty_strided(parameter.size(), parameter.stride(), dtype=dtype)
                for kind, dtype in self._types(index).items()
            }
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @torch.no_grad()
    def _copy_to(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write the numbers into the tensors that `_describe` made."""
        for index, entry in state.items():
            entry["step"].fill_(self._steps[index])
        if self._chunks is None:
            return

        # Closed whatever happens, because the generator holds the lease of a chunk.
        with contextlib.closing(self._chunks.read()) as chunks:
            for chunk, block in chunks:
                for run in chunk.runs:
                    entry = state.get(run.parameter, {})
                    for kind, plane in _planes(run, block):
                        if kind in entry:
                            in_order(entry[kind], entry[kind])[run.start : run.stop] = plane

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that is of another variant of AdamW or of other parameters, before anything is changed."""
        for group in state_dict["param_groups"]:
            if variant := next((name for name in ("amsgrad", "maximize") if group.get(name)), None):
                raise OptimizerError(f"this state belongs to AdamW with {variant}, which TieredAdamW has not.")

        for index, entry in state_dict["state"].items():
            form = self._forms.get(index)
            shapes = [tuple(entry[kind].shape) for kind in STATE if kind in entry]
            if form is None or "step" not in entry or any(shape != form.shape for shape in shapes):
                had = "none here" if form is None else f"{tuple(form.shape)} here"
                raise OptimizerError(
                    f"the state of parameter {index} has shapes {shapes}, {had}. Load the state of the same model."
                )

    def _types(self, index: int) -> dict[Kind, torch.dtype]:
        """Return the kinds of a parameter's state with their types; fp32 is its own master and has no remainder."""
        is_split = self._forms[index].dtype is torch.bfloat16
        return {kind: dtype for kind, dtype in STATE.items() if is_split or kind is not Kind.REMAINDER}

    # ------------------------------------------------------------------ before the first step

    def _plan(self) -> ChunkPlan:
        """Return the place of every piece of state, for the parameters as they are now."""
        trained = self._trained()
        check_parameters(trained.values())
        sizes = [ParameterSize(i, p.numel(), p.dtype is torch.bfloat16) for i, p in trained.items()]
        return plan_chunks(sizes, self._ram, self._nvme_bytes)

    def _trained(self) -> dict[int, Tensor]:
        """Return the parameters that need a gradient, by their number among all parameters."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return {index: parameter for index, parameter in enumerate(parameters) if parameter.requires_grad}

    def _start(self) -> ChunkStore:
        """Allocate everything, once, and return the chunks."""
        self._check_open()
        if self._chunks is not None:
            return self._chunks

        # Planned anew: parameters may have been frozen, cast or moved since the groups were added.
        plan = self._plan()
        trained = self._trained()
        device = next((parameter.device for parameter in trained.values()), torch.device("cpu"))
        self._parameters: list[Tensor] = [parameter for group in self.param_groups for parameter in group["params"]]
        self._group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self._forms = {index: form_of(parameter) for index, parameter in trained.items()}

        # `_chunks` is set last: a failure before that leaves nothing allocated, and the next call begins again.
        chunks = ChunkStore(plan, self._nvme, device, _update_tier(device))
        try:
            self._start_threads(chunks)
        except BaseException:
            chunks.close()
            raise
        self._chunks = chunks
        return chunks

    def _start_threads(self, chunks: ChunkStore) -> None:
        """Start the threads of AdamW and of the checks, with what ends them and frees the chunks."""
        self._pool = adamw_threads(cores_usable())
        self._threads = ThreadPoolExecutor(cores_usable(), "megatier-gradient")
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._pool, self._threads, chunks)

    def _mend(self, chunks: ChunkStore) -> None:
        """Begin anew after something broke off: end the threads, take back all slots, and start other threads."""
        # An update may run for which nobody waits, because its step was interrupted. Closing the pool ends it, and
        # only then may slots be handed out again.
        self._pool.close()
        self._threads.shutdown()
        chunks.reset()

        # The finalizer holds the old threads; a new one takes its place.
        self._finalizer.detach()
        self._start_threads(chunks)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OptimizerError("this TieredAdamW is closed; make a new one.")

    def _check_whole(self) -> None:
        """Refuse to use state that a step or a load has left half done."""
        self._check_open()
        if self._is_torn or (self._chunks is not None and self._chunks.is_torn):
            raise OptimizerError(
                "a step or a load failed, or was interrupted, half way, so parameters and state do not belong "
                "together. Load both from a saved state, or make a new TieredAdamW."
            )

    def _name(self, index: int) -> str:
        """Return a parameter's name for messages, or its number if the groups have no names."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        return str(names[index]) if names else f"parameter {index}"


def _check_settings(group: Mapping[str, Any]) -> None:
    """Refuse the settings that torch.optim.AdamW refuses, and those that are tensors."""
    for name in ("lr", "eps", "weight_decay"):
        if isinstance(group[name], Tensor):
            raise ConfigError(f"{name} is a tensor; give a plain number. Schedulers may set another at any step.")
        if not 0 <= group[name] < math.inf:
            raise ConfigError(f"{name} is {group[name]!r}; it must be at least 0.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ConfigError(f"betas is {group['betas']!r}; both must be from 0 to below 1.")


def _update_tier(device: torch.device) -> Tier:
    """Return the tier in which chunks are updated, which is that of the parameters."""
    return Tier.GPU if device.type == "cuda" else Tier.RAM


def _planes(run: ElementRun, chunk: Tensor) -> Iterator[tuple[Kind, Tensor]]:
    """Yield each kind of a run's state, as a flat view of a chunk in RAM."""
    for kind, (start, stop) in run.planes.items():
        yield kind, chunk[start:stop].view(STATE[kind])


def _sum_squares(grad: Tensor) -> Tensor:
    """Return the sums of squares of a flat tensor, fp64 [spans]."""
    if grad.is_cuda:
        from megatier.numerics import kernels  # Triton comes with torch's CUDA builds alone

        return kernels.sum_squares(grad)

    sums = torch.empty(-(-grad.numel() // SPAN_ELEMENTS), dtype=torch.float64)
    _native.sum_squares(grad.data_ptr(), grad.numel(), grad.dtype is torch.bfloat16, sums.data_ptr())
    return sums


def _finish(store: ChunkStore, chunk: StateChunk, lease: Lease, batches: Iterable[_native.Batch | None]) -> None:
    """Wait for the updates of a chunk, then start its way home."""
    # A GPU's updates lie on its current stream, and the store orders the copies home behind them.
    for batch in batches:
        if batch is not None:
            batch.wait()

    # After an interrupt inside the store nobody knows whose its slots are: `load_state_dict` takes all of them back.
    if not store.is_torn:
        store.give_back(chunk, lease)


def _release(process: int, pool: _native.ThreadPool, threads: ThreadPoolExecutor, store: ChunkStore) -> None:
    """End the threads and free the chunks. This runs in `close`, at the optimizer's end or at that of the process."""
    # A forked child inherits the finalizer; it has none of the threads, and the files are its parent's.
    if os.getpid() == process:
        pool.close()
        threads.shutdown()
        store.close()


__all__ = ["TieredAdamW"]
