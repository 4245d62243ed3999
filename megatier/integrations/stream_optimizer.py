"""The torch optimizer of a streamed model: settings that schedulers drive, and the calls that end a step."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Never, Protocol

from transformers import PreTrainedModel

from megatier.config.schema import TrainConfig
from megatier.errors import OptimizerError, StreamedModelError
from megatier.models.decoder import decays
from megatier.optimizers import OPTIMIZERS
from megatier.tiered_adamw.external_state import ExternalStateOptimizer, check_group

_SHARED_SETTINGS = ("lr", "betas", "eps", "momentum")
"""Settings that all groups share. AdamW has no momentum."""


class Stepped(Protocol):
    """The streamed model as its optimizer sees it: a model, and the two ways in which a step ends."""

    model: PreTrainedModel

    def finish_step(self) -> object:
        """Clip, and make the step's updates due."""

    def drop_gradients(self) -> None:
        """Give up the step that has begun."""


class StreamedOptimizer(ExternalStateOptimizer):
    """The optimizer of a streamed model: AdamW, or Muon for the matrices of layers.

    It has two groups, the parameters with weight decay and those without it (biases, norms). Frozen ones are in
    neither. `step` reads learning rate, betas, eps, decay and momentum, whenever the updates themselves run.
    `state_dict` holds only the settings, because `Streamed.save` writes the moments.
    """

    _remedy = "Streamed.save writes weights and moments, and Streamed.restore takes them."

    def __init__(self, streamed: Stepped, train: TrainConfig) -> None:
        """Sort the parameters into two groups, with the settings to begin with; only `Streamed` makes one."""
        self._streamed = streamed
        # torch wants the parameters themselves. They lie on meta, so the groups say which weights decay and hold none.
        decayed = decays(streamed.model)
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
        """Refuse any group but the two that the optimizer is made with.

        Raises:
            StreamedModelError: it has both of them already.
        """
        # torch's own constructor adds the two groups by this method.
        if len(self.param_groups) == 2:
            raise StreamedModelError("the optimizer of a streamed model has all its parameters; no group can be added.")
        super().add_param_group(param_group)

    def settings(self) -> tuple[float, dict[str, Any]]:
        """Return the learning rate as the groups have it now, and their other settings by names of `Hyperparameters`.

        Raises:
            StreamedModelError: the groups differ in a setting that they have to share.
        """
        # torch would update what the groups hold by now, so a user who has changed them expects that.
        if self._parameters_now() != self._own:
            raise StreamedModelError(
                "the groups of a streamed model's optimizer are those that it was opened with, in their order: name "
                "what is not trained in frozen of megatier.stream."
            )
        for group in self.param_groups:
            check_group(group, self._settings)

        # The kernels take one set of scalars for all units, and decay is on or off for each parameter.
        decayed, others = self.param_groups
        if different := [name for name in _SHARED_SETTINGS if decayed.get(name) != others.get(name)]:
            raise StreamedModelError(
                f"all groups of a streamed model share {different[0]}; set the same value in all param_groups."
            )
        if others["weight_decay"]:
            raise StreamedModelError("biases and norms of a streamed model do not decay: set weight_decay in group 0.")

        beta1, beta2 = decayed["betas"]
        own = {name: decayed[name] for name in ("eps", "weight_decay", "momentum") if name in decayed}
        return float(decayed["lr"]), {"beta1": beta1, "beta2": beta2} | own

    def _view(self) -> _OnTiers:
        """Return the object that `state` is."""
        return _OnTiers()

    def _parameters_now(self) -> list[list[int]]:
        """Return which parameters each group has, and in which order."""
        # By identity: tensors compare element by element, and those on meta have no elements to compare.
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings that a load brings; torch calls this after its own checks.

        Raises:
            OptimizerError: it brings moments too, which nobody would read, or settings of another optimizer.
            ConfigError: a setting is out of range.
        """
        if state["state"]:
            raise OptimizerError(f"this state has moments, which are not loaded here. {self._remedy}")
        for group in state["param_groups"]:
            check_group(group, self._settings)
        super().__setstate__({"param_groups": state["param_groups"]})

    def saved_settings(self) -> list[dict[str, Any]]:
        """Return all settings of each group as plain JSON, those that schedulers add included."""
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"} for group in self.param_groups
        ]

    def take_saved_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take back the settings that `saved_settings` returned."""
        # JSON has no tuples, so the betas come back as a list.
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in saved.items()})


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a group has
    """Return a number of another library, such as a schedule in numpy gives, as JSON takes it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    is_number = isinstance(value, numbers.Real)
    is_pythons = isinstance(value, int | float)
    return float(value) if is_number and not is_pythons else value


class _OnTiers(dict[Any, Any]):
    """`optimizer.state` of a streamed model: nothing to look at, and no sign that there is nothing yet."""

    def __bool__(self) -> bool:
        """Refuse to say: the caller would make a step to begin the state, or take it for all there is.

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
