"""Presents a streamed model as the `PeftModel` that libraries on top of PEFT expect, above all TRL's trainers.

They call PEFT's `get_peft_model` for new adapters, or look for a `PeftModel`. A streamed model already contains its
adapters, so nothing is added here. This module needs PEFT, and is imported only if a model has adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Never, NoReturn, Self

from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel, PeftType
from peft.tuners.lora import LoraLayer, LoraModel
from torch import nn
from transformers import PreTrainedModel

from megatier.adapters.first_weights import base_name
from megatier.adapters.given_adapters import without_adapters
from megatier.adapters.lora import ADAPTER, adapter_config
from megatier.adapters.peft_methods import refuse_unknown
from megatier.compute.adapted_parameter import is_wrapper, wrappers_in
from megatier.errors import ConfigError

KIND = "STREAMED"
"""The task type for which PEFT's `get_peft_model` makes a `StreamedPeftModel`."""


class _AroundStreamed:
    """The common part of PEFT models around a streamed one, which delegate to it."""

    get_base_model: Callable[[], PreTrainedModel]

    def to(self, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401 - torch's
        """Call the model's `to`, which refuses another device."""
        self.get_base_model().to(*args, **kwargs)
        return self

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's
        """Drop the step's gradients, as the model does."""
        self.get_base_model().zero_grad(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        """Run the model's own forward."""
        return self.get_base_model()(*args, **kwargs)

    def set_adapter(self, adapter_name: str | list[str], *_: Never, **__: Never) -> None:
        """Refuse any adapter but the existing one.

        Raises:
            ConfigError: another one is asked for.
        """
        if adapter_name not in (ADAPTER, [ADAPTER]):
            _refuse_second(adapter_name)


@refuse_unknown
class StreamedLoraModel(_AroundStreamed, LoraModel):  # type: ignore[misc]
    """PEFT's adapter-holding model around a streamed model. It gives parameters the names that PEFT uses.

    Attributes:
        model: the model.
        active_adapter: the name of the adapter.
        targeted_module_names: the modules that have an adapter.
        targeted_parameter_names: the single parameters that have one.
    """

    model: Any

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a streamed model. Nothing is added to it."""
        # Not PEFT's own constructor, which puts adapters into a model.
        nn.Module.__init__(self)
        self.model = model
        self.active_adapter = ADAPTER
        self.targeted_parameter_names = [base_name(name) for name in wrappers_in(model)]
        self.targeted_module_names = list[str]()
        for name, module in model.named_modules():
            # Wrappers are listed above by their parameters.
            if isinstance(module, LoraLayer) and not is_wrapper(module):
                self.targeted_module_names.append(name)

    def get_base_model(self) -> PreTrainedModel:
        """Return the model itself, with its adapters."""
        model: PreTrainedModel = self.model
        return model


@refuse_unknown
class StreamedPeftModel(_AroundStreamed, PeftModel):  # type: ignore[misc]
    """A `PeftModel` around a model whose one adapter is a part of its units. Parameters have PEFT's names.

    Attributes:
        base_model: the model of PEFT's around the model.
        active_adapter: the name of the adapter.
    """

    base_model: Any

    def __init__(self, model: PreTrainedModel, *_: object, **__: object) -> None:
        """Take a streamed model, and nothing of what else PEFT gives to those who put adapters into one."""
        # Not PEFT's own constructor, which puts adapters into a model.
        nn.Module.__init__(self)
        self.base_model = StreamedLoraModel(model)
        self.active_adapter = ADAPTER
        self.peft_type = PeftType.LORA
        self.special_peft_forward_args: set[str] = set()
        self._is_prompt_learning = False
        """Says to PEFT that `peft_config` is the model's."""

    @property
    def _adapters_disabled(self) -> bool:
        """Says to PEFT whether the adapters are off now."""
        return any(module._disable_adapters for module in self.modules() if isinstance(module, LoraLayer))

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        """Generate as the model itself does."""
        return self.base_model.model.generate(*args, **kwargs)

    def get_base_model(self) -> PreTrainedModel:
        """Return the model itself, with its adapters."""
        model: PreTrainedModel = self.base_model.model
        return model

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Let forwards be those of the base for a while. Use it under `torch.no_grad`."""
        return without_adapters(self.get_base_model())

    def enable_input_require_grads(self) -> None:
        """Do nothing: how activations are computed again needs no gradient of the first layer's input here."""

    def add_adapter(self, adapter_name: str, *_: Never, **__: Never) -> NoReturn:
        """Refuse a second adapter.

        Raises:
            ConfigError: always.
        """
        _refuse_second(adapter_name)

    load_adapter = add_adapter


def _refuse_second(name: object) -> NoReturn:
    raise ConfigError(
        f"a streamed model has one adapter, and another one, {name!r}, is asked for. TRL does so to keep adapters that "
        "were trained before as the reference: give ref_model. The reference of new ones, from peft_config, is the "
        "base, which needs no second model."
    )


# PEFT's own table: `get_peft_model` makes what it has for the task that a config names.
MODEL_TYPE_TO_PEFT_MODEL_MAPPING[KIND] = StreamedPeftModel


def wrapping_config(model: PreTrainedModel) -> Any:  # noqa: ANN401 - PEFT's, which has no types
    """Return the config of a model's adapters, with which `get_peft_model` wraps it in a `StreamedPeftModel`."""
    config: Any = copy.copy(adapter_config(model))
    config.task_type = KIND

    # Else PEFT warns that it changes the name.
    config.base_model_name_or_path = None
    return config
