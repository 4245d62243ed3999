"""TRL's trainers over a streamed model: `class StreamedSFT(StreamedTrl, SFTTrainer)`, and so with the others.

TRL replaces the model's forward by its own, which fuses head and loss and multiplies by the head's weight itself. So a
copy of that weight is lent to it, from the forward to its backward.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import RewardTrainer, SFTTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed
from megatier.integrations.transformers_trainer import StreamedTraining
from megatier.models.model_class import is_classifier
from megatier.trainer_guards.arguments import refuse_any
from megatier.trainer_guards.fields import check_fields
from megatier.trainer_guards.init_kwargs import read_init_kwargs

OF_LANGUAGE = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer")
"""Trainers that need a language model head."""

WITH_VLLM = ("GRPOTrainer", "RLOOTrainer")
"""Trainers whose vLLM gets the weights from TRL's `VLLMGeneration`."""

WITHOUT_WEIGHTS = {
    "DistillationTrainer": "it computes with the head's weight outside of the model. Use GKDTrainer, which does not",
    "AsyncGRPOTrainer": "it sends the model's own parameters. Use GRPOTrainer with use_vllm, or a loop that gives an "
    "engine what Streamed.weights() gives",
}
"""Trainers that cannot get a streamed model's weights, and what to use instead."""


class StreamedTrl(StreamedTraining):
    """Mixin for TRL's trainers; see `StreamedTraining`."""

    # TRL computes losses itself, from logits or with the head's weight, so head and loss are not fused.
    fuses_loss = False

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the trainer's
        """Take a streamed model or a folder instead of the trainer's model, and all other arguments.

        Raises:
            ConfigError: an argument needs something that a streamed model does not have.
        """
        if isinstance(model, Streamed) and not model.has_logits:
            raise ConfigError("TRL computes the loss itself: call megatier.stream with fused_loss=False.")
        given = self.given(model, *args, **kwargs)
        check_fields(given.get("args"))
        self._check_given_to_trl(model, given)
        # `megatier.stream` makes the adapters. `model_for_trainer` decides whether TRL learns of them.
        peft_config = given.pop("peft_config", None)
        if kwargs_of_trl := self._own_kwargs(model, given, peft_config):
            # The user's own settings take precedence.
            given["stream_kwargs"] = {**kwargs_of_trl, **(given.get("stream_kwargs") or {})}
        with warnings.catch_warnings():
            # New adapters are in the model before `model_for_trainer` lets TRL call `get_peft_model`, and PEFT would
            # warn about that.
            warnings.filterwarnings("ignore", message="You are trying to modify a model with PEFT for a second time")
            super().__init__(**given)
        model = self.streamed
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            _feed(model, generation)
            if generation.mode == "colocate":
                turn = self._generate_single_turn  # type: ignore[has-type]
                self._generate_single_turn = _lending(model, generation, turn)

        # TRL's constructor has replaced the forward, so this wraps TRL's.
        forward = model.model.forward

        @functools.wraps(forward)
        def entering(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            # TRL's forward multiplies by the head's weight itself only with this argument.
            if not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)

            def lent(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                with model.lent_head():
                    return forward(*args, **kwargs)

            # The head is used outside its module, so this forward uses the units in another order than the model's own.
            model.try_tiles(lent, *args, **kwargs)
            with model.one_forward("evaluate with a lent head"):
                return lent(*args, **kwargs)

        model.model.forward = entering

        # TRL would mix in the model's own parameters, which are on meta.
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncRefModelCallback):
                callback.sync_target_model = functools.partial(_mix, model)

    def _own_kwargs(self, model: Any, given: dict[str, Any], peft_config: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the arguments of `megatier.stream` that follow from TRL's arguments."""
        args = given.get("args")
        stream_kwargs: dict[str, Any] = {}
        if peft_config is not None:
            stream_kwargs["peft_config"] = peft_config
        is_folder = not isinstance(model, Streamed | nn.Module)
        if isinstance(self, RewardTrainer) and is_folder:
            stream_kwargs["num_labels"] = 1  # as TRL itself opens a folder
        if stream_kwargs:
            # Adapters and a score are initialised from TRL's seed.
            stream_kwargs["seed"] = getattr(args, "seed", 42)
        if is_folder:
            init_kwargs = getattr(args, "model_init_kwargs", None) or {}
            stream_kwargs |= read_init_kwargs(init_kwargs, given.get("stream_kwargs") or {})
        return stream_kwargs

    def feeds_vllm(self) -> bool:
        """Return whether the trainer uses vLLM through TRL's `VLLMGeneration`."""
        return any(base.__name__ in WITH_VLLM for base in type(self).__mro__)

    def model_for_trainer(self, given: dict[str, Any]) -> nn.Module:
        """Return the model, as a `PeftModel` if it has adapters.

        For new adapters TRL must create it by PEFT's `get_peft_model`. To an existing `PeftModel` it would add a copy
        as the reference.

        Raises:
            ConfigError: the trainer needs a language model and this is a classifier, or vLLM cannot open the model.
            UnsupportedModelError: no inference engine can load its weights.
        """
        model = self.streamed
        kinds = [base.__name__ for base in type(self).__mro__ if base.__name__ in OF_LANGUAGE]
        if kinds and is_classifier(model.model.config):
            raise ConfigError(f"{kinds[0]} trains a language model, and {type(model.model).__name__} is a classifier.")
        if getattr(given.get("args"), "use_vllm", False):
            _check_engine(model, given["args"])
        batching = "use_transformers_continuous_batching"
        if getattr(given.get("args"), batching, False):
            refuse_any(_within_a_step(batching, given["args"]))
        if not model.has_adapters:
            return model.model

        # Imported here, since it needs PEFT, which is installed if there are adapters.
        wrapper = importlib.import_module("megatier.adapters.peft_model")
        if model.has_new_adapters and "peft_config" in self.parameters():
            given["peft_config"] = wrapper.wrapping_config(model.model)
            return model.model
        peft_model: nn.Module = wrapper.StreamedPeftModel(model.model)
        return peft_model

    def _check_given_to_trl(self, model: Any, given: dict[str, Any]) -> None:  # noqa: ANN401 - the trainer's
        """Refuse arguments with which TRL would do something that a streamed model does not support.

        Raises:
            ConfigError: names the argument, and what to do instead.
        """
        self._check_kind(model, given)
        self._check_options(model, given)
        self._check_reference(model, given)

    def _check_kind(self, model: Any, given: dict[str, Any]) -> None:  # noqa: ANN401 - the trainer's
        """Refuse a trainer that would need the model's own weights, or another sort of model."""
        kinds = {base.__name__ for base in type(self).__mro__}
        needs_classifier = isinstance(self, RewardTrainer)
        copies_model = "OnlineDPOTrainer" in kinds and given.get("ref_model") is None
        refuse_any(
            *((kind in kinds, f"{kind} over a streamed model: {why}.") for kind, why in WITHOUT_WEIGHTS.items()),
            (
                copies_model and not _gets_adapters(model, given),
                "OnlineDPOTrainer would copy the model for its reference, and its weights are on megatier's tiers. "
                "Give ref_model.",
            ),
            (
                needs_classifier and isinstance(model, Streamed) and not is_classifier(model.model.config),
                "RewardTrainer: a reward model is a classifier, and this is a language model. Give the trainer its "
                "folder, or open it by megatier.stream(folder, num_labels=1).",
            ),
        )

    def _check_options(self, model: Any, given: dict[str, Any]) -> None:  # noqa: ANN401 - the trainer's
        """Refuse options that TRL would follow by a second forward, or by changing the model itself."""
        args = given.get("args")
        template = getattr(args, "chat_template_path", None)
        chosen = given.get("stream_kwargs") or {}
        peft_config = given.get("peft_config")
        is_streamed = isinstance(model, Streamed)
        smooths = getattr(args, "label_smoothing_factor", 0) and getattr(args, "loss_type", "") == "nll"
        refuse_any(
            (
                is_streamed and peft_config is not None,
                "peft_config: megatier.stream has opened this model already. Give it peft_config, or give the "
                "trainer the model's folder.",
            ),
            (
                peft_config is not None and "peft_config" in chosen,
                "peft_config comes twice: leave it out of stream_kwargs.",
            ),
            (
                isinstance(self, SFTTrainer) and smooths,
                "label_smoothing_factor: TRL makes a second forward within the step for it, and a streamed model "
                "takes one for each backward. Leave it out.",
            ),
            (
                isinstance(self, SFTTrainer) and given.get("compute_loss_func") is not None,
                "compute_loss_func: TRL makes a second forward within the step for it, and a streamed model takes "
                "one for each backward. Leave it out, or use MegatierTrainer.",
            ),
            (
                chosen.get("fused_loss"),
                "stream_kwargs has fused_loss, and TRL computes the loss itself: leave it out.",
            ),
            (
                getattr(args, "trust_remote_code", False) and not is_streamed,
                "trust_remote_code: megatier opens the model by the code of transformers, and runs none of a "
                "folder. Leave it out, and give the trainer a tokenizer as processing_class.",
            ),
            (
                isinstance(self, SFTTrainer | RewardTrainer) and _is_tokenizer(template),
                f"chat_template_path {template!r} is a tokenizer, whose tokens TRL would add to the model's "
                "weights, which are on megatier's tiers. Give the path of a Jinja file, or a tokenizer with the "
                "template as processing_class.",
            ),
            (
                given.get("quantization_config") is not None,
                "quantization_config: TRL would quantise the model while it loads it. Give the folder of a "
                "quantised model.",
            ),
        )

    def _check_reference(self, model: Any, given: dict[str, Any]) -> None:  # noqa: ANN401 - the trainer's
        """Refuse a reference model that TRL would have to make from the streamed one."""
        args = given.get("args")
        reference = given.get("ref_model")
        is_changed = isinstance(model, nn.Module) or (isinstance(model, Streamed) and not model.is_as_in_its_folder)
        loads_other = is_changed and not _gets_adapters(model, given)
        lacks_reference = "ref_model" in self.parameters() and reference is None
        refuse_any(
            (
                isinstance(reference, str),
                f"ref_model is {reference!r}: give a model, AutoModelForCausalLM.from_pretrained({reference!r}).",
            ),
            (
                lacks_reference and getattr(args, "precompute_ref_log_probs", False),
                "precompute_ref_log_probs without ref_model: TRL would take a checksum over the model's weights, "
                "which are on megatier's tiers. Give ref_model.",
            ),
            (
                hasattr(args, "num_generations") and getattr(args, "beta", 0) and loads_other,
                "beta: TRL would load the reference from the folder that the model's config names, and this model "
                "does not come from there as it is now. Set it to 0, or open the model by its folder.",
            ),
            (
                lacks_reference and loads_other,
                "TRL would load the reference from the folder that the model's config names, and this model does "
                "not come from there as it is now. Give ref_model.",
            ),
        )


def _check_engine(streamed: Streamed, args: Any) -> None:  # noqa: ANN401 - TRL's
    """Refuse a model and arguments with which vLLM could not be kept up to date, before vLLM is loaded.

    Raises:
        ConfigError, UnsupportedModelError: vLLM could not follow the model.
    """
    # Only for its error: an unknown layout would otherwise be found after vLLM is loaded.
    streamed.weights()
    refuse_any(
        (
            args.vllm_mode == "colocate" and not streamed.model.name_or_path,
            "vllm_mode colocate: vLLM opens the folder that the model's config names, and this one names none. Open "
            "the model by its folder, or start a server and set vllm_mode to server.",
        ),
        _within_a_step("use_vllm", args),
    )


def _within_a_step(name: str, args: Any) -> tuple[bool, str]:  # noqa: ANN401 - TRL's
    """Return whether completions would begin within a step, and the message that refuses it."""
    every = args.steps_per_generation * args.num_iterations
    return bool(every % args.gradient_accumulation_steps), (
        f"{name}: completions are made every {every} backwards (steps_per_generation x num_iterations), which is no "
        f"multiple of gradient_accumulation_steps ({args.gradient_accumulation_steps}), so weights would be asked for "
        "within a step. Make it one."
    )


def _feed(streamed: Streamed, generation: Any) -> None:  # noqa: ANN401 - TRL's
    """Let TRL take vLLM's weights from the streamed model, instead of from the model's parameters.

    Args:
        streamed: the model.
        generation: TRL's `VLLMGeneration`, which has started vLLM.
    """
    weights = streamed.weights()
    generation._iter_named_params = weights.__iter__

    # TRL would load all weights once to find this out.
    tensors = weights.metadata()
    generation._weight_metadata = [
        (tensor.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors
    ]


def _lending(streamed: Streamed, generation: Any, turn: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401
    """Let an engine in this process load its weights and generate in lent memory, if `lends_memory` is set.

    Args:
        streamed: the model.
        generation: TRL's `VLLMGeneration`.
        turn: the trainer's `_generate_single_turn`.
    """

    @functools.wraps(turn)
    def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - TRL's
        if not streamed.lends_memory:
            return turn(*args, **kwargs)
        with streamed.lent_memory():
            try:
                return turn(*args, **kwargs)
            except BaseException:
                # TRL puts the engine to sleep only after a success, but the memory is needed again.
                if generation.enable_sleep_mode:
                    generation.llm.sleep(level=2)
                    generation._llm_weights_sleeping = True
                raise

    return generating


def _is_tokenizer(template: str | None) -> bool:
    """Return whether TRL would take this chat template from a tokenizer rather than a file."""
    return template is not None and not (template.endswith((".jinja", ".j2")) and Path(template).is_file())


def _gets_adapters(model: Any, given: dict[str, Any]) -> bool:  # noqa: ANN401 - the trainer's
    """Return whether the trainer is to train adapters: of its arguments, or of a model that has them already."""
    inside = model.model if isinstance(model, Streamed) else model
    return given.get("peft_config") is not None or getattr(inside, "peft_config", None) is not None


def _mix(streamed: Streamed, _: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Replace `SyncRefModelCallback.sync_target_model`: mix the masters into the reference, one at a time.

    Args:
        streamed: the model that is trained, between two steps.
        _: its model, as TRL passes it.
        reference: a model of the same parameters.
        alpha: share of the trained model.
    """
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Freed before the next one is read, since all masters together need not fit RAM.
            master = streamed.read(name).to(parameter.device)
            mixed = parameter.data.mul_(1.0 - alpha)
            mixed.add_(master, alpha=alpha)
