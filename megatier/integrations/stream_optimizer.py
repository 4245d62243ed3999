"""The torch optimizer of a streamed model: settings that schedulers drive, and the calls that end a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim.optimizer import Optimizer

from megatier.config.schema import TrainConfig
from megatier.errors import StreamedModelError
from megatier.models.decoder import decays

if TYPE_CHECKING:
    from megatier.integrations.streamed import Streamed

SHARED = ("lr", "betas", "eps")
"""Settings that all groups share."""


class StreamedAdamW(Optimizer):
    """AdamW of a streamed model.

    It has two groups, parameters with weight decay and those without (biases, norms); frozen ones are in neither.
    Learning rate, betas, eps and decay are read by `step`, whenever the updates run. `state` is empty, and `state_dict`
    holds the settings alone: the moments are in `Streamed.save`.
    """

    def __init__(self, streamed: Streamed, train: TrainConfig) -> None:
        """Made by Streamed."""
        self._streamed = streamed
        decayed = decays(streamed.model)
        parameters = [(name, p) for name, p in streamed.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in parameters if name in decayed], "weight_decay": train.weight_decay},
            {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": train.learning_rate, "betas": (train.beta1, train.beta2), "eps": train.eps})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """End the step: its updates run ahead of the next forward, with the settings of this moment.

        Args:
            closure: makes the step's forwards and backwards.

        Raises:
            StreamedModelError, TimelineError, NonFiniteError: see `Streamed.finish_step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._streamed.finish_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that `step` has not ended; after `step` there are none."""
        self._streamed.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, but for the groups it is made with."""
        if len(self.param_groups) == 2:
            raise StreamedModelError("the optimizer of a streamed model has all its parameters; no group can be added.")
        super().add_param_group(param_group)

    def settings(self) -> tuple[float, float, float, float, float]:
        """Learning rate, beta1, beta2, eps and weight decay as the groups say now.

        Raises:
            StreamedModelError: the groups differ where they cannot.
        """
        decayed, others = self.param_groups
        if different := [name for name in SHARED if decayed[name] != others[name]]:
            raise StreamedModelError(
                f"all groups of a streamed model share {different[0]}; set it alike in param_groups."
            )
        if others["weight_decay"]:
            raise StreamedModelError("biases and norms of a streamed model do not decay: set weight_decay in group 0.")
        beta1, beta2 = decayed["betas"]
        return float(decayed["lr"]), beta1, beta2, decayed["eps"], decayed["weight_decay"]

    def saved_settings(self) -> list[dict[str, Any]]:
        """All settings of each group, schedulers' own included, as plain JSON."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def take_saved_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """What `saved_settings` gave."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in saved.items()})
