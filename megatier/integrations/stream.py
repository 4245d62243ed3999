"""Opens a model for a user's own training loop: `megatier.stream`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from transformers import PreTrainedModel

from megatier.adapters.base import identity_of, note_identity
from megatier.adapters.first_weights import AdaptedWeights
from megatier.adapters.given_adapters import add_given, check_adapters, check_trained, unwrap_peft
from megatier.adapters.in_place import note_base_tensors
from megatier.adapters.quantised_base import CodesReader, is_quantised, open_quantised
from megatier.caller import warn
from megatier.config.remarks import list_remarks
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.config.values import require
from megatier.defaults import usual_defaults
from megatier.errors import UnsupportedModelError
from megatier.foreign import one_version
from megatier.guards.given_model import check_around
from megatier.guards.unbound_weights import check_gradient_hooks
from megatier.integrations.in_memory_weights import InMemoryWeights
from megatier.integrations.loop_settings import ShortArguments, loop_config
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import build_skeleton
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import NewScore, named_as_classifier
from megatier.models.location import resolve
from megatier.models.model_class import is_classifier
from megatier.models.module_copies import copied_skeleton
from megatier.models.weights import SafetensorsFolder, TensorReader
from megatier.ranks.rendezvous import joined
from megatier.session.process import share_interpreter
from megatier.session.session import Session
from megatier.setup.machine import Machine, choose_device
from megatier.setup.setup import Setup
from megatier.setup.skeleton import read_model_config
from megatier.setup.workload import COMPUTE_DTYPES

Given = str | os.PathLike[str] | nn.Module
"""The accepted kinds of models: a folder or hub id, or a model in RAM."""


def stream(
    model: str | os.PathLike[str] | nn.Module,
    *,
    tiers: TiersConfig | Mapping[str, Any] | None = None,
    train: TrainConfig | Mapping[str, Any] | None = None,
    **short: Unpack[ShortArguments],
) -> Streamed:
    """Place a model and its optimizer state on the tiers, for any training loop.

    Under `torchrun` the ranks share the state, and all of them make this call with the same arguments. Budgets of RAM
    and NVMe are those of a host, for all its ranks.

    Args:
        model: a folder in Hugging Face's format or a hub id, whose weights stream in; or a model in RAM, which is
            copied and stays as it is. What was changed on it is copied too: modules, attributes, hooks, modes, buffers,
            its loss function. Its parameters that require no gradient are frozen. It may be a `PeftModel` of PEFT: then
            its adapters alone are trained.
        tiers: budgets and mounts, as a `TiersConfig` or as the section `tiers` of a config; None: taken from the
            machine, without NVMe.
        train: the steps, as a `TrainConfig` or as the section `train` of a config, in the place of the short arguments
            that say the same. What is no loop's is refused if it is given: `steps`, `epochs`, `slices`,
            `offload_attention`, the schedule, evaluations and `stall_timeout`. `activations` may not be offload.
            `groups` are `accumulation_steps`; where the default batch of 8 is no multiple of them, give `batch` as many
            as `groups`. The rate is constant unless a scheduler changes it. The learning rate is 3e-4 by default here,
            and there is no decay.
        **short: the arguments below. Others are refused by name.
        accumulation_steps: backwards per `optimizer.step`, at least 1 (default: 1). Each is one pass over the units.
            Under `torchrun` each rank makes as many, and their gradients are all added.
        lr: learning rate (default: 1e-3); schedulers drive it, and the next three, in `optimizer.param_groups`.
        betas: decay of the moments (default: 0.9 and 0.999).
        eps: added to the root of the second moment (default: 1e-8).
        weight_decay: decoupled, of matrices, not of biases and norms (default: 1e-2).
        optimizer: adamw (the default), or another one of `train.optimizer` (docs/guide.md), such as muon, which trains
            the matrices of decoder layers, and AdamW the rest. It takes 8 bytes of state a parameter instead of 12.
        momentum: decay of Muon's momentum (default: 0.95); schedulers drive it too. AdamW does not read it.
        clip: global gradient norm to clip to (default: 1.0); None: off. `Streamed.clip` changes it.
        compute_dtype: type of weights and activations, by its name or torch's: bf16 (the default) or fp32; masters are
            fp32.
        moments: type in which both moments of AdamW are stored: fp32 (the default), or a narrower one of
            `train.moments`. bf16 takes 8 bytes of state a parameter instead of 12. It is rounded stochastically.
        seed: of the random numbers by which moments are rounded, and with which the adapters of peft_config and the
            score of num_labels begin, at least 0 (default: 0); of nothing else.
        activations: whether activations are kept between forward and backward (keep, the default), or computed again
            (recompute).
        fused_loss: whether head and loss are one chunked node (default: yes). The model then takes labels and gives a
            loss, but no logits. A model that does more between the two than scale and cap logits once runs without it,
            with a warning.
        compile: whether layers and loss are compiled; None, the default: on a GPU.
        attention: the attention implementation of transformers; None, the default: that of a model in RAM, or sdpa.
        frozen: names or patterns of parameters that are not trained, or, after "!", that are trained all the same
            (`models.frozen_parameters`). A single one may be given as text.
        peft_config: a `LoraConfig` of PEFT: adapters that are trained over the model, which is frozen.
        num_labels: opens the folder of a language model as a classifier of sequences with so many labels, whose score
            begins anew; of a classifier it is the number that it has. None, the default: the model is the one that its
            folder names.
        expert_parts: number of units that the experts of a layer are cut into, so that slots need not take all of them
            at once (default: 1).
        tile_tokens: most tokens on which a norm, an MLP or the experts of a layer work at once, so that what they hold
            does not grow with the sequence; None, the default: on all. The first forward is preceded by one of a few
            tokens, which tries whether they can. This changes the order of sums.
        products: type of the numbers that linear layers and experts of decoder layers multiply: bf16 (the default), or
            fp8 (`numerics.products`).
        products_except: names or patterns of modules that stay in bf16 under fp8.

    Raises:
        PlanError, CapacityError, ConfigError, UnsupportedModelError: the model or a setting is not supported. This is
            found before weights are read.
    """
    config = loop_config(short, tiers, train, _own_attention(model))
    rate_name = "train.learning_rate" if train else "lr"
    for remark in list_remarks(config, rate_name):
        warn(remark)

    # An empty path would mean the current directory.
    is_named = isinstance(model, str | os.PathLike) and os.fspath(model) != ""
    is_given = is_named or isinstance(model, nn.Module)
    require(is_given, "model", model, "a folder, a hub id, or a model of transformers")
    return _open(model, config, short)


@usual_defaults()
def _open(model: Given, config: RunConfig, short: ShortArguments) -> Streamed:
    """Open a session for a model and load its weights.

    Args:
        model: as for `stream`.
        config: the run's config, with the groups of one rank.
        short: the keyword arguments, of which those about the model are used.
    """
    skeleton, reader = _source(model, config, short)

    # The session owns files on the drives, which must be removed if loading fails or is interrupted.
    share_interpreter()
    with ExitStack() as opened:
        device = choose_device(config.tiers.device)
        ranks = opened.enter_context(joined(device.type, is_guest=True))
        # The caller gives the groups of one rank, and a config those of all ranks together.
        groups = config.train.groups * (1 if ranks is None else ranks.size)
        config = config.changed({"train.batch": groups, "train.groups": groups})
        setup = Setup.of(config, skeleton, Machine.here(config.tiers, device, ranks))

        # The loop pads its batches as it likes, so they may have any shape.
        session = opened.enter_context(Session(setup, ranks=ranks, any_shape=True))
        # All memory and files are allocated before the first weight is read, so a shortage shows at once.
        session.seal()
        session.load(reader)

        # From here on the `Streamed` closes what was opened.
        return Streamed(
            session,
            opened.pop_all(),
            is_from_folder=not isinstance(model, nn.Module),
            has_new_adapters=short.get("peft_config") is not None,
        )


@one_version()
def _source(model: Given, config: RunConfig, short: ShortArguments) -> tuple[PreTrainedModel, TensorReader]:
    """Return the skeleton of a model with its adapters and frozen parameters, and the reader of its weights."""
    peft_config = short.get("peft_config")
    is_adapted = peft_config is not None
    if isinstance(model, nn.Module):
        if short.get("num_labels") is not None:
            raise UnsupportedModelError("num_labels is for a folder or hub id; a model in RAM has its labels already.")
        skeleton, reader, has_own = _in_ram(model, config.model, is_new=is_adapted)
        is_adapted |= has_own
        base = str(skeleton.config._name_or_path)
    else:
        folder = resolve(os.fspath(model))
        skeleton, reader = _in_folder(folder, config, short.get("num_labels"), is_adapted=is_adapted)
        # The adapters' config stores it and may be read from another directory, so a folder gets its absolute path.
        base = str(folder.resolve()) if Path(model).is_dir() else os.fspath(model)
        if is_adapted:
            stored = reader.stored if isinstance(reader, SafetensorsFolder | CodesReader) else None
            note_identity(skeleton, identity_of(folder, stored))
            if not is_quantised(skeleton.config):
                note_base_tensors(skeleton, folder, stored)

    if peft_config is not None:
        add_given(skeleton, peft_config, base)
        # A new score is drawn before the adapters from the same generator, which the adapters continue.
        generator = reader.generator if isinstance(reader, NewScore) else None
        reader = AdaptedWeights(reader, skeleton, config.train.seed, generator=generator)

    # After the reader: a model in RAM defines which parameters are frozen, and the caller's patterns override that.
    freeze(skeleton, short.get("frozen", ()), "frozen")
    if is_adapted:
        check_trained(skeleton)
    return skeleton, reader


def _in_folder(
    folder: Path, config: RunConfig, num_labels: int | None, *, is_adapted: bool
) -> tuple[PreTrainedModel, TensorReader]:
    """Return the skeleton of a folder's model, and the reader of its weights.

    Args:
        folder: the model's folder.
        config: how the model computes, and the seed of a new score.
        num_labels: as for `stream`.
        is_adapted: whether adapters will be added. The base may then be quantised.
    """
    computing = config.model
    model_config = read_model_config(computing, folder)
    begins = num_labels is not None and not is_classifier(model_config)
    if num_labels is not None and not begins and num_labels != model_config.num_labels:
        raise UnsupportedModelError(
            f"{folder}: the classifier has {model_config.num_labels} labels, and num_labels is {num_labels}. "
            "Leave it out."
        )
    if begins and is_quantised(model_config):
        raise UnsupportedModelError(
            f"{folder} is quantised; num_labels takes a language model in bf16 or fp32, on which a classifier begins."
        )
    if is_adapted and is_quantised(model_config):
        return open_quantised(folder, model_config, computing.attention, COMPUTE_DTYPES[computing.compute_dtype])

    model = build_skeleton(model_config, computing.attention)
    reader = SafetensorsFolder(folder, model)
    if num_labels is None or not begins:
        return model, reader
    classifier = build_skeleton(named_as_classifier(model_config, num_labels), computing.attention)
    return classifier, NewScore(reader, {name for name, _ in model.named_parameters()}, classifier, config.train.seed)


def _in_ram(model: nn.Module, computing: ModelConfig, *, is_new: bool) -> tuple[PreTrainedModel, TensorReader, bool]:
    """Return the skeleton of a model in RAM, the reader of its weights, and whether it has adapters of its own.

    Args:
        model: a model of transformers, or a `PeftModel` around one.
        computing: how the model computes.
        is_new: whether new adapters will be added.
    """
    inside, config = unwrap_peft(model)
    if not isinstance(inside, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(inside).__name__} is no model of transformers. Give the model itself, and name what is not trained "
            "in frozen."
        )
    # Hooks on parameters would never be called, since parameters get no gradient here.
    check_gradient_hooks(inside)
    if is_new and config is not None:
        raise UnsupportedModelError("the model has adapters already: leave out peft_config, or give the model itself.")

    check_around(model, inside)
    skeleton = copied_skeleton(inside, computing.attention)
    if config is not None:
        check_adapters(skeleton, config)
    return skeleton, InMemoryWeights(inside), config is not None


def _own_attention(model: object) -> str:
    """Return the attention implementation of a model in RAM, or sdpa."""
    if not isinstance(model, nn.Module):
        return "sdpa"
    inside, _ = unwrap_peft(model)
    config = getattr(inside, "config", None)

    # A module of another library has no such setting, and is refused later by name.
    return getattr(config, "_attn_implementation", None) or "sdpa"
