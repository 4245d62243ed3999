"""TieredAdamW and TieredMuon: torch optimizers for any model, their state in RAM and on NVMe.

    with TieredAdamW(model.parameters(), lr=1e-4, ram="8GiB", nvme=["/mnt/a:200GiB"]) as optimizer:
        ...                                   # any loop, scheduler or clipping that takes a torch optimizer

Parameters and gradients stay where they are, on the CPU or a GPU. The state is two moments in fp32, or in bf16, and for
bf16 parameters the 16 bits that the fp32 master has beyond them. Muon has one momentum. The state comes to the
parameters chunk by chunk: chunks are read ahead, updated in C (on a GPU in Triton) or, of Muon, by torch, and written
back afterwards. The arithmetic is that of `optim`. The place of the state changes no bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatier.compute.vector_math import warm_up
from megatier.config.values import byte_count, number, parse_list, parse_mount, require
from megatier.drives.mounts import budget_bytes
from megatier.errors import CapacityError, OptimizerError
from megatier.finalizer import ClosedWhenDropped
from megatier.hardware import ram_available_bytes
from megatier.patch import patched
from megatier.tiered_adamw.chunks import ChunkPlan, ParameterSize, plan_chunks
from megatier.tiered_adamw.external_state import ExternalStateOptimizer, StateView, check_group
from megatier.tiered_adamw.parameters import check_parameters, schema_of
from megatier.tiered_adamw.placed_state import PlacedState
from megatier.tiered_adamw.state_file import StateDict, write_state_file


class TieredOptimizer(ClosedWhenDropped, ExternalStateOptimizer):
    """An optimizer whose state lies in RAM and on NVMe: `TieredAdamW` or `TieredMuon`.

    It behaves as torch's does, with these differences:

    - bf16 parameters have fp32 masters: the parameter is the rounded master, and its remainder is state.
    - The first step, or `load_state_dict`, allocates memory and files, so groups are added before it. `close`, the end
      of the `with` block or the end of the process gives them back.
    - A gradient that is not finite is refused before anything is changed.
    - `optimizer.state` gives copies, read when they are asked for. `state_dict` gives the state if it fits RAM;
      `save_state` streams it to a file. The optimizer itself is neither copied nor pickled.
    - Groups are read at each step, as in torch. A parameter that joins a group after the first step is refused.

    Use it from one thread.
    """

    _remedy = "Take its state_dict(), or save_state(path), and give it to load_state_dict() of another one."

    def __init__(
        self,
        params: ParamsT,
        settings: dict[str, Any],
        *,
        ram: int | str,
        nvme: str | Sequence[str],
        kept: str,
        seed: int = 0,
    ) -> None:
        """Plan the places of the state. Only the classes below call this.

        Args:
            params: see the classes below.
            settings: the default settings of groups.
            ram: see the classes below.
            nvme: see the classes below.
            kept: the format of the state, as `schema_of` names it.
            seed: the seed of the random numbers that round moments in bf16, at least 0.
        """
        # torch's vector maths may err if its first call in the process is parallel.
        warm_up()
        self._kept = kept
        self._settings = tuple(settings)
        self._seed = seed
        self._ram = byte_count("ram", ram)
        self._nvme = parse_list(nvme, "nvme")
        mounts = [parse_mount(text, "nvme") for text in self._nvme]
        self._nvme_bytes = sum(map(budget_bytes, mounts))

        self._placed: PlacedState | None = None
        """The state; None before the first step or load."""
        self._is_torn = False
        """Whether a step or a load has begun and not ended."""
        self._is_closed = False
        self._numbers: dict[int, int] = {}
        """The number of each placed parameter, by its id."""
        self._incoming: Mapping[int, Mapping[str, Tensor]] = {}
        """The state that is being loaded, by the numbers of the parameters."""

        # torch calls `add_param_group` in here, which needs all of the above.
        super().__init__(params, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files and free the memory. Parameters keep their values. Closing twice is safe."""
        self._is_closed = True
        self._disown()
        if self._placed is not None:
            self._placed.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, before the first step.

        Raises:
            OptimizerError: the first step has begun, or a parameter is not valid.
            PlanError, ConfigError: see `__init__`.
        """
        if self._placed is not None:
            raise OptimizerError("the first step has placed all state: add groups before it, or make a new optimizer.")
        super().add_param_group(param_group)

        # An invalid group is removed again, so that a caller can handle the error.
        try:
            check_group(self.param_groups[-1], self._settings)
            self._plan()
        except BaseException:
            self.param_groups.pop()
            raise

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def _update(self) -> None:
        # All checks come first, so that a caller may go on after their errors.
        self._check_whole()
        placed = self._start()
        groups = self._groups_now()
        gradients = placed.gradients(groups)

        # Meanwhile some parameters are a step ahead of others. After an error, such as of a drive or by Ctrl-C, the
        # mark stays until a load.
        self._is_torn = True
        placed.update(gradients, groups.__getitem__)
        self._is_torn = False

        # Autograd does not see writes of C and Triton, so tell it that these tensors have changed.
        torch.autograd.graph.increment_version([self._parameters[index] for index in gradients])

    # ------------------------------------------------------------------ state

    def state_dict(self) -> StateDict:
        """Return the state as torch.optim.AdamW does, in RAM. bf16 parameters have a `remainder` as well as moments.

        Raises:
            CapacityError: it does not fit RAM.
            OptimizerError: a step or a load failed half way, so there is no whole state.
        """
        needed = 0 if self._placed is None else self._placed.num_bytes
        if needed > (free := ram_available_bytes()):
            raise CapacityError("ram", needed, free, "Write the state to a file with save_state(path): that streams.")

        # The numbers come first, because torch hands the whole to hooks.
        entries = self._empty()
        if self._placed is not None:
            self._placed.copy_to(entries)
        return self._describe(entries)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `torch.save(optimizer.state_dict(), path)` writes, chunk by chunk, whatever its size.

        The file appears when it is whole. `optimizer.load_state_dict(torch.load(path, mmap=True))` streams it back.

        Args:
            path: the file, which replaces one that is there.

        Raises:
            TransferError: the file cannot be written, or a drive failed. A file that was at `path` is still there.
            OptimizerError: a step or a load failed half way, so there is no whole state.
        """
        placed = self._placed
        numbers = [] if placed is None else list(self._groups_now())

        def describe() -> StateDict:
            return self._describe(self._empty())

        def fill(written: StateDict) -> None:
            if placed is None:
                return
            # torch numbers parameters by their place in the groups now, and the state by that of its first step.
            entries = {numbers[position]: entry for position, entry in written["state"].items()}
            placed.copy_to(entries)

        write_state_file(path, describe, fill)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take the state of such an optimizer, wherever its parts lay, or of a torch.optim.AdamW, chunk by chunk.

        This mends an optimizer whose step or load failed, or was interrupted, half way. Load the parameters too,
        because the state belongs to their values. `torch.load(path, mmap=True)` needs no RAM.

        Args:
            state_dict: as `state_dict` or `save_state` made it.

        Raises:
            OptimizerError: it is not the state of these parameters, or of another optimizer.
            ValueError: other groups (torch's).
        """
        # The last hook before torch takes the groups: it sees what those of the user have made of the state. torch
        # would make copies of the moments, in the parameters' dtype.
        with self.register_load_state_dict_pre_hook(lambda _, given: self._checked(given)):
            super().load_state_dict(state_dict)

    def _checked(self, given: StateDict) -> StateDict:
        """Note a state that is about to be loaded. Return the groups alone, for torch.

        Raises:
            OptimizerError: it is of another optimizer or of other parameters. Nothing was changed.
        """
        self._check_open()
        groups = [{**group, "lr": _plain(group.get("lr"))} for group in given["param_groups"]]
        self._incoming = {}

        # torch itself refuses another number of groups.
        if len(groups) == len(self.param_groups):
            for group in groups:
                check_group(group, self._settings)

            # Some trainers load an empty state before they move the model, whose devices are not known until then.
            if given["state"]:
                placed = self._start()
                saved = [number for group in groups for number in group["params"]]
                number_of = dict(zip(saved, self._groups_now(), strict=False))

                # A number that no group has stays, so that `check` names it.
                self._incoming = {number_of.get(number, number): entry for number, entry in given["state"].items()}
                placed.check(self._incoming)
        return {**given, "state": {}, "param_groups": groups}

    def __setstate__(self, state: StateDict) -> None:
        """Take the groups of a load, and the state; torch calls this after its checks, and before the hooks of others.

        From here on something is changed.
        """
        was_torn = self._is_torn
        self._is_torn = True
        super().__setstate__({"param_groups": state["param_groups"]})

        # After something broke off, leases, threads and dirty slots of that time are dropped before chunks are used.
        if self._placed is not None:
            if was_torn or self._placed.is_torn:
                self._placed.mend()
            self._placed.load(self._incoming)
        self._incoming = {}
        self._is_torn = False

    def _describe(self, entries: Mapping[int, Mapping[str, Tensor]]) -> StateDict:
        """Return torch's state_dict with these entries."""
        # torch packs what lies in `self.state`, which is therefore another one for a moment.
        with patched(vars(self), _shown={self._parameters[number]: entry for number, entry in entries.items()}):
            return super().state_dict()

    def _empty(self) -> dict[int, dict[str, Tensor]]:
        """Return the entry of each parameter that had an update and is in a group, without numbers."""
        self._check_whole()
        if self._placed is None:
            return {}
        groups = self._groups_now()
        return self._placed.empty([number for number in self._placed.steps if number in groups])

    def _view(self) -> StateView:
        """Return the object that `state` is."""
        return StateView(self._with_state, self._entry_of, self._remedy)

    def _with_state(self) -> list[Tensor]:
        """Return the parameters that had an update."""
        return [] if self._placed is None else [self._parameters[number] for number in self._placed.steps]

    def _entry_of(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return a copy of a parameter's state."""
        self._check_whole()
        assert self._placed is not None
        number = self._numbers[id(parameter)]
        entries = self._placed.empty([number])
        self._placed.copy_to(entries)
        return entries[number]

    # ------------------------------------------------------------------ before the first step

    def _plan(self) -> ChunkPlan:
        """Return the place of every piece of state, for the parameters as they are now."""
        trained = {index: parameter for index, parameter in enumerate(self._all()) if parameter.requires_grad}
        check_parameters(trained.values(), self._kept)
        sizes = []
        for index, parameter in trained.items():
            schema = schema_of(parameter.dtype, self._kept)
            sizes.append(ParameterSize(index, parameter.numel(), schema))
        return plan_chunks(sizes, self._ram, self._nvme_bytes)

    def _all(self) -> list[Tensor]:
        """Return the parameters of all groups, whose numbers are their places here."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _start(self) -> PlacedState:
        """Allocate everything, once, and return the placed state."""
        self._check_open()
        if self._placed is not None:
            return self._placed

        # Planned anew: parameters may have been frozen, cast or moved since the groups were added.
        plan = self._plan()
        self._parameters = self._all()
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}

        # Set last: a failure before that leaves nothing allocated, and the next call begins again.
        self._placed = PlacedState(self._parameters, self._names(), plan, self._nvme, self._kept, self._seed)
        self._own()
        return self._placed

    def _groups_now(self) -> dict[int, Mapping[str, Any]]:
        """Return the group of each parameter by its number, in the order of the groups as they are now.

        Raises:
            ConfigError, OptimizerError: they cannot be followed. Nothing was changed.
        """
        groups: dict[int, Mapping[str, Any]] = {}
        for group in self.param_groups:
            check_group(group, self._settings)
            for parameter in group["params"]:
                number = self._numbers.get(id(parameter))
                if number is None or number in groups:
                    complaint = (
                        "came into the groups after the state was placed" if number is None else "is in two groups"
                    )
                    raise OptimizerError(
                        f"a parameter of shape {tuple(parameter.shape)} {complaint}. Make a new optimizer; "
                        "load_state_dict gives it the state."
                    )
                groups[number] = group
        return groups

    def _check_open(self) -> None:
        if self._is_closed:
            raise OptimizerError("this optimizer is closed; make a new one.")
        if self._placed is not None:
            self._placed.owner.check()

    def _check_whole(self) -> None:
        """Refuse to use state that a step or a load has left half done."""
        self._check_open()
        if self._is_torn or (self._placed is not None and self._placed.is_torn):
            raise OptimizerError(
                "a step or a load failed, or was interrupted, half way, so parameters and state do not belong "
                "together. Load both from a saved state, or make a new optimizer."
            )

    def _names(self) -> list[str]:
        """Return the name of each parameter for messages, which is its number if the groups have no names."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        return list(map(str, names)) or [f"parameter {index}" for index in range(len(self._parameters))]


class TieredAdamW(TieredOptimizer):
    """AdamW whose state lies in RAM and on NVMe; see `TieredOptimizer`."""

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
        moments: Literal["fp32", "bf16"] = "fp32",
        seed: int = 0,
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
            moments: type in which both moments are stored. bf16 takes 4 bytes a parameter less, and rounds
                stochastically.
            seed: of the random numbers by which moments in bf16 are rounded, at least 0.

        Raises:
            PlanError: the state does not fit.
            ConfigError: a size, a mount or a hyperparameter is not usable.
            OptimizerError: a parameter cannot be taken.
        """
        require(moments in ("fp32", "bf16"), "moments", moments, "fp32 or bf16")
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(
            params,
            settings,
            ram=ram,
            nvme=nvme,
            kept=moments,
            seed=number("seed", seed, "at least 0", least=0, whole=True),
        )


class TieredMuon(TieredOptimizer):
    """Muon whose momentum lies in RAM and on NVMe, for matrices alone; see `TieredOptimizer` and `optim.muon`.

    It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. Give all other parameters to a `TieredAdamW`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        ram: int | str,
        nvme: str | Sequence[str] = (),
    ) -> None:
        """Plan as `TieredAdamW` does, whose arguments and errors these are; only momentum is Muon's own.

        A matrix is updated whole, on the device where it lies, and its state is a chunk.
        """
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
        super().__init__(params, settings, ram=ram, nvme=nvme, kept="muon")


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a state has
    """Return a learning rate as a plain number; torch's may be a tensor."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


__all__ = ["TieredAdamW", "TieredMuon"]
