"""The base of torch optimizers whose state is outside of `optimizer.state`, in chunks on tiers.

Schedulers, checkpoint libraries and users expect of every torch optimizer that they can read, copy and replace its
state. This class answers each such use correctly, or refuses it with an error before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Never, SupportsIndex, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatier.config.values import check_setting
from megatier.errors import OptimizerError

NUMBER_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Settings that a parameter group may have, all of them numbers."""
FIXED: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
    "nesterov": True,
    "adjust_lr_fn": "match_rms_adamw",
}
"""Settings of torch's optimizers that change numbers, with the only value that is taken here."""


def check_group(group: Mapping[str, Any], settings: Collection[str]) -> None:
    """Refuse a parameter group whose settings an update could not follow.

    Args:
        group: the group, as it is now.
        settings: the names of those that the optimizer has.

    Raises:
        ConfigError: a setting is no number, or out of range.
        OptimizerError: one is missing, or is of another optimizer.
    """
    for name in NUMBER_SETTINGS:
        if (name in group) is not (name in settings):
            verb = "has no" if name in settings else "has"
            raise OptimizerError(f"a parameter group {verb} {name}, so it is of another optimizer.")
        if name in group:
            check_setting(name, group[name])
    for name, value in FIXED.items():
        if name in group and group[name] != value:
            raise OptimizerError(f"a parameter group has {name}={group[name]!r}; this optimizer has {value!r} alone.")


class ExternalStateOptimizer(Optimizer):
    """A torch optimizer whose state is outside of `state`, and which cannot be copied."""

    _remedy: str
    """A sentence for messages, which says how to copy and replace the state."""
    _shown: MutableMapping[Any, Any] | None = None
    """The object that `state` returns while torch packs it; None: the view."""

    def _view(self) -> MutableMapping[Any, Any]:
        """Return the object that `state` is."""
        raise NotImplementedError

    def _update(self) -> None:
        """Update the parameters by their gradients."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters by their gradients, with the settings of this moment.

        Of a streamed model this ends the step: its updates run ahead of the next forward. Of a tiered optimizer,
        write-backs, and work on a GPU, may still run when it returns.

        Args:
            closure: makes forwards and backwards anew, and returns the loss.

        Raises:
            StreamedModelError, TimelineError: see `Streamed.finish_step`.
            NonFiniteError: a gradient is NaN or infinite. A tiered optimizer has changed nothing; `zero_grad` and go on
                if you like.
            OptimizerError: a gradient or parameter cannot be taken. Nothing was changed.
            TransferError, IntegrityError: a drive failed. Parameters and state of a tiered optimizer do not belong
                together until `load_state_dict`.
        """
        # As in torch, a closure has gradients also where they are switched off around the step.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        self._update()
        return loss

    @property
    def state(self) -> Any:  # noqa: ANN401 - torch's attribute is a defaultdict
        """The state of each parameter that has any, to be looked at."""
        # Made when it is asked for, because it refers to the optimizer, which then would not go with its last name.
        return self._view() if self._shown is None else self._shown

    @state.setter
    def state(self, value: Any) -> None:  # noqa: ANN401
        # torch's constructor sets an empty one.
        if not hasattr(self, "param_groups"):
            return
        raise OptimizerError(f"the state of this optimizer lies elsewhere and is not replaced here. {self._remedy}")

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        """Refuse to be copied or pickled: a copy would have no state, threads or files.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(f"this optimizer cannot be copied or pickled. {self._remedy}")


class StateView(MutableMapping[Tensor, "EntryCopy"]):
    """`optimizer.state` of a tiered optimizer: copies of the state, read when they are asked for."""

    def __init__(
        self, parameters: Callable[[], Sequence[Tensor]], read: Callable[[Tensor], Mapping[str, Tensor]], remedy: str
    ) -> None:
        """Take functions that list parameters with state and read one's, and a remedy for messages."""
        self._parameters = parameters
        self._read = read
        self._remedy = remedy

    def __len__(self) -> int:
        return len(self._parameters())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._parameters())

    def __contains__(self, parameter: object) -> bool:
        # By identity: tensors compare element by element.
        return any(each is parameter for each in self._parameters())

    def __getitem__(self, parameter: Tensor) -> EntryCopy:
        if parameter not in self:
            raise KeyError(parameter)

        # Tensors of inference mode refuse to be changed in place, which would change nothing but the copy.
        with torch.inference_mode():
            return EntryCopy(self._read(parameter), self._remedy)

    def __setitem__(self, parameter: Tensor, entry: object) -> None:
        raise OptimizerError(f"the state of this optimizer is not changed here. {self._remedy}")

    def __delitem__(self, parameter: Tensor) -> None:
        raise OptimizerError(f"the state of this optimizer is not changed here. {self._remedy}")


class EntryCopy(dict[str, Tensor]):
    """A copy of one parameter's state."""

    def __init__(self, entry: Mapping[str, Tensor], remedy: str) -> None:
        """Take the tensors, and how they are replaced, for messages."""
        super().__init__(entry)
        self._remedy = remedy

    def __setitem__(self, name: str, value: Tensor) -> None:
        # Trainers that move the state of an optimizer to another device set what was there.
        present = self.get(name)
        if present is not None and torch.equal(present, value.to(present.device)):
            return
        raise OptimizerError(f"this is a copy of {name}, and to set it changes nothing. {self._remedy}")


__all__ = ["EntryCopy", "ExternalStateOptimizer", "StateView", "check_group"]
