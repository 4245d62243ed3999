"""TieredAdamW: a torch optimizer for any model, its state in RAM and on NVMe.

    with TieredAdamW(model.parameters(), lr=1e-4, ram="8GiB", nvme=["/mnt/a:200GiB"]) as optimizer:
        ...                                   # any loop, scheduler or clipping that takes a torch optimizer

Parameters and gradients stay where they are, on the CPU or a GPU. The state, two fp32 moments, and for bf16 parameters
the 16 bits that the fp32 master has beyond them, streams past them: chunks are read ahead, updated in C (on a GPU in
Triton) and written back behind. The arithmetic is that of `numerics.optimizer`. Where the state lies changes no bit.
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
from megatier.errors import CapacityError, ConfigError, NonFiniteError, OptimizerError
from megatier.hardware import cores_usable, ram_available_bytes
from megatier.integrations.chunk_store import ChunkStore
from megatier.integrations.chunks import AHEAD, Chunk, ChunkPlan, ParameterSize, Run, plan_chunks
from megatier.integrations.parameters import Form, check_parameters, form_of, in_order
from megatier.integrations.state_file import write_state_file
from megatier.numerics.optimizer import PIECE_ELEMENTS, SPAN_ELEMENTS, adamw_threads, begin_adamw, step_scalars
from megatier.numerics.vector_math import warm
from megatier.store.blockfile import budget_bytes
from megatier.store.lease import Lease
from megatier.tier import Kind, Tier

STATE = {Kind.EXP_AVG: torch.float32, Kind.EXP_AVG_SQ: torch.float32, Kind.REMAINDER: torch.int16}
"""Names in `state_dict`, and types."""
Due = tuple[Chunk, tuple[Run, ...]]
"""A chunk, and those of its runs that have a gradient."""


class TieredAdamW(Optimizer):
    """AdamW whose state lies in RAM and on NVMe.

    It behaves as `torch.optim.AdamW` does, with these differences:

    - bf16 parameters have fp32 masters: the parameter is the master, rounded, and its remainder is state.
    - Memory and files are allocated by the first step, or `load_state_dict`; groups are added before it. `close`, the
      end of the `with` block, or that of the process, gives them back.
    - A gradient that is not finite is refused before anything is changed.
    - `optimizer.state` is empty. `state_dict` gives the state where it fits RAM; `save_state` streams it to a file.

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
            lr: learning rate, read at each step from its group, as the next three.
            betas: decay of the moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled.
            ram: bytes for state, slots included, such as "8GiB".
            nvme: where the rest goes: mounts as DIRECTORY or DIRECTORY:SIZE; a list, or comma-separated.

        Raises:
            PlanError: the state does not fit.
            ConfigError: a size, a mount or a hyperparameter is not usable.
            OptimizerError: a parameter cannot be taken.
        """
        warm()
        self._ram, self._nvme = parse_bytes(str(ram)), parse_list(nvme)
        self._nvme_bytes = sum(budget_bytes(parse_mount(text, "nvme")) for text in self._nvme)
        self._chunks: ChunkStore | None = None
        self._forms: dict[int, Form] = {}
        """Of the parameters that have state."""
        self._steps: dict[int, int] = {}
        """Updates of each parameter so far."""
        self._is_torn = self._is_closed = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files and free the memory. Safe to call twice; parameters keep their values."""
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
            closure: computes the loss, and gradients, anew.

        Raises:
            NonFiniteError: a gradient is NaN or infinite. Nothing was changed; `zero_grad` and go on if you like.
            OptimizerError: a gradient or parameter cannot be taken; nothing was changed.
            TransferError, IntegrityError: a drive failed. Parameters and state are torn until `load_state_dict`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_whole()
        store = self._start()
        gradients = self._gradients()
        runs = ((chunk, tuple(run for run in chunk.runs if run.parameter in gradients)) for chunk in store.chunks)
        self._is_torn = True
        self._update(store, [due for due in runs if due[1]], gradients)
        for index in gradients:
            self._steps[index] = self._steps.get(index, 0) + 1
        self._is_torn = False
        torch.autograd.graph.increment_version([self._parameters[index] for index in gradients])
        return loss

    def _update(self, store: ChunkStore, due: Sequence[Due], gradients: Mapping[int, Tensor]) -> None:
        """Each chunk comes, is updated and leaves; the next one's update begins before one has ended."""
        flying: deque[tuple[Chunk, Lease, list[_native.Batch | None]]] = deque()
        try:
            for number, (chunk, runs) in enumerate(due):
                store.prefetch(due[(number + AHEAD) % len(due)][0])  # at the end, for the next step
                flying.append((chunk, store.lease(chunk), []))
                _, lease, batches = flying[-1]
                for run in runs:
                    batches.append(self._apply(run, lease.bytes, gradients))
                if len(flying) > 1:
                    _finish(store, *flying.popleft())
        finally:
            with contextlib.ExitStack() as rest:  # whatever happens: threads may be at work on parameters and slots
                for applied in reversed(flying):
                    rest.callback(_finish, store, *applied)

    def _apply(self, run: Run, chunk: Tensor, gradients: Mapping[int, Tensor]) -> _native.Batch | None:
        index = run.parameter
        group = self.param_groups[self._group_of[index]]
        learning_rate = group["lr"]
        scalars = step_scalars(self._steps.get(index, 0) + 1, learning_rate, group["betas"], group["eps"])
        planes = {kind: chunk[start:stop] for kind, (start, stop) in run.planes.items()}
        planes[Kind.WEIGHT] = in_order(self._parameters[index], self._parameters[index])[run.start : run.stop]
        segment = (0, run.stop - run.start, 1 - learning_rate * group["weight_decay"])
        return begin_adamw(self._pool, planes, gradients[index][run.start : run.stop], [segment], (*scalars, 1.0), {})

    def _gradients(self) -> dict[int, Tensor]:
        """Every gradient, flat, in the order of its parameter's elements.

        Raises:
            OptimizerError, NonFiniteError: one of them, or its parameter, cannot be taken.
        """
        found = {}
        for index, parameter in enumerate(self._parameters):
            if (grad := parameter.grad) is None:
                continue
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
        """By sums of squares, which finite numbers of bf16 and fp32 cannot overflow in fp64."""
        pieces = [piece for grad in gradients.values() if grad.numel() for piece in grad.split(PIECE_ELEMENTS)]
        sums = [_sum_squares(piece) for piece in pieces if piece.is_cuda]
        sums += self._threads.map(_sum_squares, (piece for piece in pieces if not piece.is_cuda))
        if sums and not torch.cat(sums).isfinite().all():
            index = next(index for index, grad in gradients.items() if not grad.isfinite().all())
            raise NonFiniteError(
                f"the gradient of {self._name(index)} is not finite; no parameter was changed. Leave this step out by "
                "zero_grad(); lower the learning rate, or clip, if it happens again."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim.AdamW gives it, in RAM; bf16 parameters have `remainder` beside their moments.

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
        """Write what `torch.save(optimizer.state_dict(), path)` would, chunk by chunk, whatever its size.

        The file is there when it is whole. `optimizer.load_state_dict(torch.load(path, mmap=True))` streams it back.

        Raises:
            TransferError: the file cannot be written, or a drive failed; what was at `path` is still there.
            OptimizerError: a step or a load failed half way, so there is no whole state.
        """
        write_state_file(path, self._describe, lambda state_dict: self._copy_to(state_dict["state"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a TieredAdamW, wherever its parts lay, or of a torch.optim.AdamW, chunk by chunk.

        It mends an optimizer of which a step or a load failed, or was interrupted, half way.
        Load the parameters too: the state belongs to their values. `torch.load(path, mmap=True)` needs no RAM.

        Raises:
            OptimizerError: it is not the state of these parameters, or of another variant of AdamW.
            ValueError: other groups (torch's).
        """
        state: dict[int, dict[str, Tensor]] = state_dict["state"]
        self._check_open()
        if state:  # else some trainers load an empty one before they move the model
            self._start()
        self._check_loaded(state_dict)
        was_torn, self._is_torn = self._is_torn, True
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError:  # before anything was changed
            self._is_torn = was_torn
            raise
        for group in self.param_groups:
            group["lr"] = float(group["lr"])  # torch's may be a tensor
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
    def _fill(self, run: Run, chunk: Tensor, entry: Mapping[str, Tensor]) -> None:
        """Planes of a run from a parameter's state; what is missing (a remainder, all of it) is 0."""
        for kind, plane in _planes(run, chunk):
            if kind in entry:
                plane.copy_(in_order(self._parameters[run.parameter], entry[kind])[run.start : run.stop])
            else:
                plane.zero_()

    def _describe(self) -> dict[str, Any]:
        """The state_dict, with tensors whose numbers are still missing."""
        self._check_whole()
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
        """Write the numbers into what was described."""
        for index, entry in state.items():
            entry["step"].fill_(self._steps[index])
        if self._chunks is None:
            return
        with contextlib.closing(self._chunks.read()) as chunks:
            for chunk, block in chunks:
                for run in chunk.runs:
                    entry = state.get(run.parameter, {})
                    for kind, plane in _planes(run, block):
                        if kind in entry:
                            in_order(entry[kind], entry[kind])[run.start : run.stop] = plane

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
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
        is_split = self._forms[index].dtype is torch.bfloat16
        return {kind: dtype for kind, dtype in STATE.items() if is_split or kind is not Kind.REMAINDER}

    # ------------------------------------------------------------------ before the first step

    def _plan(self) -> ChunkPlan:
        """Where everything would lie, with the parameters as they are now."""
        trained = self._trained()
        check_parameters(trained.values())
        sizes = [ParameterSize(i, p.numel(), p.dtype is torch.bfloat16) for i, p in trained.items()]
        return plan_chunks(sizes, self._ram, self._nvme_bytes)

    def _trained(self) -> dict[int, Tensor]:
        """The parameters that need a gradient, by their number among all."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return {index: parameter for index, parameter in enumerate(parameters) if parameter.requires_grad}

    def _start(self) -> ChunkStore:
        """Allocate everything, once."""
        self._check_open()
        if self._chunks is not None:
            return self._chunks
        plan, trained = self._plan(), self._trained()
        device = next((parameter.device for parameter in trained.values()), torch.device("cpu"))
        self._parameters: list[Tensor] = [parameter for group in self.param_groups for parameter in group["params"]]
        self._group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self._forms = {index: form_of(parameter) for index, parameter in trained.items()}
        chunks = ChunkStore(plan, self._nvme, device, _update_tier(device))
        try:
            self._start_threads(chunks)
        except BaseException:
            chunks.close()
            raise
        self._chunks = chunks
        return chunks

    def _start_threads(self, chunks: ChunkStore) -> None:
        self._pool = adamw_threads(cores_usable())
        self._threads = ThreadPoolExecutor(cores_usable(), "megatier-gradient")
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._pool, self._threads, chunks)

    def _mend(self, chunks: ChunkStore) -> None:
        """After something broke off: nobody is at work on a chunk any more, and nobody has one."""
        self._pool.close()  # whatever is at work there, perhaps nobody waits for it
        self._threads.shutdown()
        chunks.reset()
        self._finalizer.detach()
        self._start_threads(chunks)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OptimizerError("this TieredAdamW is closed; make a new one.")

    def _check_whole(self) -> None:
        self._check_open()
        if self._is_torn or (self._chunks is not None and self._chunks.is_torn):
            raise OptimizerError(
                "a step or a load failed, or was interrupted, half way, so parameters and state do not belong "
                "together. Load both from a saved state, or make a new TieredAdamW."
            )

    def _name(self, index: int) -> str:
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        return str(names[index]) if names else f"parameter {index}"


def _check_settings(group: Mapping[str, Any]) -> None:
    """Refuse what torch.optim.AdamW refuses."""
    for name in ("lr", "eps", "weight_decay"):
        if isinstance(group[name], Tensor):
            raise ConfigError(f"{name} is a tensor; give a plain number. Schedulers may set another at any step.")
        if not 0 <= group[name] < math.inf:
            raise ConfigError(f"{name} is {group[name]!r}; it must be at least 0.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ConfigError(f"betas is {group['betas']!r}; both must be from 0 to below 1.")


def _update_tier(device: torch.device) -> Tier:
    """Where the parameters are."""
    return Tier.GPU if device.type == "cuda" else Tier.RAM


def _planes(run: Run, chunk: Tensor) -> Iterator[tuple[Kind, Tensor]]:
    """Each kind of a run's state in a chunk in RAM, flat."""
    for kind, (start, stop) in run.planes.items():
        yield kind, chunk[start:stop].view(STATE[kind])


def _sum_squares(grad: Tensor) -> Tensor:
    """fp64 sums of squares of a flat tensor, one per span."""
    if grad.is_cuda:
        from megatier.numerics import kernels  # Triton comes with torch's CUDA builds alone

        return kernels.sum_squares(grad)
    sums = torch.empty(-(-grad.numel() // SPAN_ELEMENTS), dtype=torch.float64)
    _native.sum_squares(grad.data_ptr(), grad.numel(), grad.dtype is torch.bfloat16, sums.data_ptr())
    return sums


def _finish(store: ChunkStore, chunk: Chunk, lease: Lease, batches: Iterable[_native.Batch | None]) -> None:
    for batch in batches:
        if batch is not None:
            batch.wait()
    # After an interrupt inside the store nobody knows whose its slots are: `load_state_dict` takes all of them back.
    if not store.is_torn:
        store.give_back(chunk, lease)


def _release(process: int, pool: _native.ThreadPool, threads: ThreadPoolExecutor, store: ChunkStore) -> None:
    """Also at the end of the process; but a forked child leaves its parent's files alone."""
    if os.getpid() == process:
        pool.close()
        threads.shutdown()
        store.close()


__all__ = ["TieredAdamW"]
