"""The torch optimizer of a streamed model: its settings, which schedulers change, and the calls that end a step."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Never, Protocol

from transformers import PreTrainedModel

from megatier.config.schema import TrainConfig
from megatier.errors import OptimizerError, StreamedModelError
from megatier.models.decoder import decay_parameter_names
from megatier.optimizers import OPTIMIZERS
from megatier.tiered_adamw.external_state import ExternalStateOptimizer, check_group

_SHARED_SETTINGS = ("lr", "betas", "eps", "momentum")
"""Settings that all groups share. AdamW has no momentum."""


class Stepped(Protocol):
    """The streamed model as its optimizer sees it: a model, and the two ways in which a step ends."""

    model: PreTrainedModel

    def finish_step(self) -> object:
        """Clip, and release the step's updates."""

    def drop_gradients(self) -> None:
        """Abandon the step that has begun."""


class StreamedOptimizer(ExternalStateOptimizer):
    """The optimizer of a streamed model: AdamW, or Muon for the matrices of layers.

    It has two groups: parameters with weight decay, and those without (biases, norms). Frozen parameters are in
    neither. `step` reads the learning rate, betas, eps, decay and momentum when it is called, whenever the updates run.
    `state_dict` holds only the settings, because `Streamed.save` writes the moments.
    """

    _remedy = "Streamed.save writes weights and moments, and Streamed.restore takes them."

    def __init__(self, streamed: Stepped, train: TrainConfig) -> None:
        """Sort the parameters into two groups with their initial settings. Only `Streamed` makes one."""
        self._streamed = streamed
        # torch requires the parameters themselves. They lie on meta, so the groups only say which weights decay.
        decayed = decay_parameter_names(streamed.model)
        parameters = [(name, p) for name, p in streamed.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in parameters if name in decayed], "weight_decay": train.weight_decay},
            {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
        ]
        given = {
            "lr": train.learning_rate,
            "betas": (train.beta1, train.beta2),
            "eps": train.eps,
            "momentum": train.momentum,
        }
        shared = {name: given[name] for name in OPTIMIZERS[train.optimizer].settings}
        self._settings = (*shared, "weight_decay")
        super().__init__(groups, {**shared, "weight_decay": train.weight_decay})
        self._own = self._parameters_now()

    def _update(self) -> None:
        self._streamed.finish_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that `step` has not ended. After `step` there are none to drop."""
        self._streamed.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse any group besides the two that the constructor adds.

        Raises:
            StreamedModelError: both groups are there already.
        """
        # torch's constructor adds the two groups by this method.
        if len(self.param_groups) == 2:
            raise StreamedModelError("the optimizer of a streamed model has all its parameters; no group can be added.")
        super().add_param_group(param_group)

    def settings(self) -> tuple[float, dict[str, Any]]:
        """Return the current learning rate, and the other settings by their names in `Hyperparameters`.

        Raises:
            StreamedModelError: the groups differ in a setting that they must share.
        """
        # torch would update the current parameters of the groups, so a user who has changed them expects that.
        if self._parameters_now() != self._own:
            raise StreamedModelError(
                "the groups of a streamed model's optimizer are those that it was opened with, in their order: name "
                "what is not trained in frozen of megatier.stream."
            )
        for group in self.param_groups:
            check_group(group, self._settings)

        # The kernels use one set of scalars for all units, and decay is on or off for each parameter.
        decayed, others = self.param_groups
        if different := [name for name in _SHARED_SETTINGS if decayed.get(name) != others.get(name)]:
            raise StreamedModelError(
                f"all groups of a streamed model share {different[0]}; set the same value in all param_groups."
            )
        if others["weight_decay"]:
            raise StreamedModelError("biases and norms of a streamed model do not decay: set weight_decay in group 0.")

        beta1, beta2 = decayed["betas"]
        other_settings = {name: decayed[name] for name in ("eps", "weight_decay", "momentum") if name in decayed}
        return float(decayed["lr"]), {"beta1": beta1, "beta2": beta2} | other_settings

    def _view(self) -> _OnTiers:
        """Return the value of `state`."""
        return _OnTiers()

    def _parameters_now(self) -> list[list[int]]:
        """Return the ids of each group's parameters, in order."""
        # By identity, since tensors compare elementwise, and those on meta have no elements.
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore loaded settings. torch calls this after its own checks.

        Raises:
            OptimizerError: the loaded state has moments, which would be ignored, or settings of another optimizer.
            ConfigError: a setting is out of range.
        """
        if state["state"]:
            raise OptimizerError(f"this state has moments, which are not loaded here. {self._remedy}")
        for group in state["param_groups"]:
            check_group(group, self._settings)
        super().__setstate__({"param_groups": state["param_groups"]})

    def saved_settings(self) -> list[dict[str, Any]]:
        """Return all settings of each group as plain JSON, including those that schedulers add."""
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"} for group in self.param_groups
        ]

    def take_saved_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the settings that `saved_settings` returned."""
        # JSON has no tuples, so the betas come back as a list.
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in saved.items()})


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a group has
    """Convert a number of another library, such as from a numpy schedule, to one that JSON supports."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    is_number = isinstance(value, numbers.Real)
    is_pythons = isinstance(value, int | float)
    return float(value) if is_number and not is_pythons else value


class _OnTiers(dict[Any, Any]):
    """`optimizer.state` of a streamed model: it raises an error wherever it would look like an empty state."""

    def __bool__(self) -> bool:
        """Refuse to answer, since the caller would take the state for empty and initialise it.

        Raises:
            StreamedModelError: always.
        """
        raise StreamedModelError(
            "the moments of a streamed model are on its tiers, and not in optimizer.state: Streamed.save writes them, "
            "and Streamed.restore takes them."
        )

    def __getitem__(self, parameter: object) -> Never:
        self.__bool__()
        raise AssertionError

    def __setitem__(self, parameter: object, value: object) -> Never:
        self.__bool__()
        raise AssertionError
