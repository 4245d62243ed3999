"""Turns a skeleton into a model that runs unit by unit: a node on every module that uses a unit, and the loss.

The skeleton's parameters stay on meta. Nodes bind weights while a module runs, and the loss counts the tokens of the
whole step. `Session` makes a `UnitModel` for the `Engine`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.modules import module as hooks_of_all
from transformers import PreTrainedModel

from megatier.compute.attention_kernels import without_cudnn
from megatier.compute.matmul import Fp32Products
from megatier.compute.token_tiles import Decision, TiledModule
from megatier.engine.engine_options import EngineOptions
from megatier.engine.expert_parts import ExpertsNode, guard, install_sums
from megatier.engine.grad_sink import GradMeter
from megatier.engine.gradient import Gradients
from megatier.engine.head import IGNORE_INDEX, can_fuse
from megatier.engine.loss import FusedLoss
from megatier.engine.mask_answers import answering, is_packed
from megatier.engine.node import Lender, Node
from megatier.engine.stage import Stage, UnitPlayer
from megatier.engine.step_loss import StepLoss
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.crossing import OutputCheck
from megatier.guards.documents import TOGETHER
from megatier.guards.repeated_forwards import hooks_inside, warn_of_hooks
from megatier.guards.token_rows import why_joined
from megatier.guards.unbound_weights import refused_outside
from megatier.models.decoder import Binding, Unit, bindings, tiled_names
from megatier.models.dtypes import place_buffers
from megatier.models.masks import BlockMasks
from megatier.models.products import set_products
from megatier.models.tower_attention import TowerAttention
from megatier.optim.masters import weight_dtype
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks

Batch = Mapping[str, Tensor]
"""The arguments of a model: input_ids and labels [B, T], and others."""


class UnitModel:
    """A Hugging Face model that runs unit by unit, through nodes on its modules."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        units: Sequence[Unit],
        player: UnitPlayer,
        meter: GradMeter,
        options: EngineOptions,
        all_ranks: Ranks | SingleRank,
    ) -> None:
        """Install nodes on every module that uses a unit. Buffers move to the device, in the dtype they compute in.

        If the loss cannot be fused with this model's head, a warning says so.

        Args:
            skeleton: the Hugging Face model, whose parameters lie on meta.
            units: all of the model's units.
            player: loads weights and takes gradients.
            meter: measures the gradients.
            options: numeric choices and policies.
            all_ranks: the ranks that compute the groups of a step, or the process that computes all of them.
        """
        self.skeleton = skeleton
        """The Hugging Face model."""
        self.options = options
        """Numeric choices and policies."""
        set_products(skeleton, options.fp8_products)
        self._masks = BlockMasks()
        self.stage = Stage(
            source=player.weights,
            gradients=Gradients(
                {unit.name: unit.layout.trained for unit in units if unit.layout.num_trained},
                player.grad_sink,
                meter,
                groups=options.groups // all_ranks.size,
                is_shared=all_ranks.size > 1,
            ),
            dtypes={unit.name: weight_dtype(unit.layout.schema) for unit in units},
            device=options.device,
            slices=options.slices,
            anchor=torch.zeros((), dtype=torch.float32, device=options.device, requires_grad=True),
            compilation=options.compilation,
            tile_tokens=options.tile_tokens,
            keeps_attention=options.keeps_attention,
            offloads_attention=options.offloads_attention,
            arithmetic=_arithmetic(options),
            model=skeleton,
            tower_attention=TowerAttention.of(skeleton),
            is_running=False,
        )
        """The state that its nodes share."""

        # The skeleton's forward is probed before any node is installed.
        self.fuses_loss = options.fused_loss and can_fuse(skeleton, units)
        """Whether head and loss are one node, so that the model returns no logits."""
        bound = [
            (unit, name, bindings(skeleton, unit, name), _lent(skeleton, units, unit, name))
            for unit in units
            for name in unit.module_names
        ]
        place_buffers(skeleton, options.device, options.dtype)

        self.nodes = [self._node(unit, name, places, lent) for unit, name, places, lent in bound]
        """The nodes, in the order of units. A module may have several."""
        self._hooked: set[str] = set()
        """The modules whose hooks were mentioned in a warning."""
        self.knows_tiles = not any(node.tiled for node in self.nodes)
        """Whether it is known which modules can run in tiles of tokens."""
        install_sums(self.nodes)

        # In this order, since the step's loss wraps the fused one.
        self._fused = FusedLoss(skeleton, self.head(), options.loss_chunk) if self.fuses_loss else None
        self._step_loss = StepLoss(skeleton, self.stage, self._fused)
        self.check_outputs = OutputCheck(skeleton)
        """Checks the graphs of the first losses for lost gradients."""

    def close(self) -> None:
        """Drop all references to the tiers' memory."""
        # The model is part of reference cycles, so what it holds would stay until they are collected.
        self.forget({node.unit for node in self.nodes})

    def forget(self, units: Container[str]) -> None:
        """Drop the cached views of these units' weights, before their memory is given to others."""
        for node in self.nodes:
            if node.unit in units:
                node.forget_leaves()

    def head(self) -> Node:
        """Return the node of the output embedding.

        Raises:
            UnsupportedModelError: the model has no separate one.
        """
        head = self.skeleton.get_output_embeddings()
        head_node = next((node for node in self.nodes if node.module is head), None)
        if head_node is None:
            raise UnsupportedModelError(
                f"the output embedding of {type(self.skeleton).__name__} is not a unit of its own; it cannot be lent."
            )

        return head_node

    def loss(self, batch: Batch, counted: int | None, share: float = 1.0) -> Tensor:
        """Run one forward and return its loss.

        Args:
            batch: one group, or a batch to evaluate.
            counted: the tokens that the whole step counts, if it has several groups; None: those of this batch.
            share: the batch's share of these tokens.

        Raises:
            UnsupportedModelError: the model makes its masks without the batch's position_ids.
        """
        self._step_loss.divisor = counted
        with self._taking(batch) as inputs:

            def forward() -> Tensor:
                # A key-value cache serves generation only, and would hold keys and values past their layer.
                loss: Tensor = self.skeleton(**inputs, use_cache=False).loss
                return loss

            return self._step_loss.weighed(forward, share)

    @contextmanager
    def _taking(self, batch: Batch) -> Iterator[Batch]:
        """Run one forward on a batch inside. Yield the batch as the model takes it.

        Raises:
            UnsupportedModelError: the batch packs documents, and the model never asked where they end.
        """
        with answering(batch, self._masks) as asked, self.running():
            yield self.on_device(batch)

        # Checked afterwards, when the model has made all of its masks.
        if is_packed(batch) and not asked:
            raise UnsupportedModelError(
                f"{type(self.skeleton).__name__} makes its masks without position_ids, so that documents of one "
                f"sequence see each other. {TOGETHER}"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run one forward of the model inside. Modules get weights only here.

        Raises:
            UnsupportedModelError: the forward uses a weight outside the module that owns it, where it is not bound.
        """
        was_running = self.stage.is_running
        self.stage.is_running = True
        try:
            with refused_outside(self.skeleton), self.stage.tower_attention.applied():
                yield
        finally:
            self.stage.is_running = was_running

    def logits(self, batch: Batch) -> Tensor:
        """Run one forward on rows of several documents and return its logits, or what a fused loss makes them of.

        Raises:
            UnsupportedModelError: the model makes its masks without the batch's position_ids.
        """
        with self._taking(batch) as inputs:
            outputs = self.skeleton(**inputs, use_cache=False)
        logits: Tensor = outputs.logits
        return logits

    def begin_step(self) -> None:
        """Prepare for the forwards of a step."""
        self._look_over()
        if self._fused is not None:
            self._fused.begin_step()

    def check_labels(self) -> None:
        """Check for labels that make a loss NaN, once something is known not to be finite.

        Raises:
            DataError: a label of the open step is outside of the vocabulary.
        """
        if self._fused is not None:
            self._fused.check_labels()

    def on_device(self, batch: Batch) -> Batch:
        """Move a batch to the device."""
        if self.options.device.type != "cuda":
            return batch

        return {key: self._on_gpu(value) for key, value in batch.items()}

    def _on_gpu(self, value: Tensor) -> Tensor:
        if value.is_cuda:
            return value
        # Through pinned memory, or the host would wait for this and all queued copies. Torch cannot pin a tensor whose
        # elements overlap, as in an expanded one.
        pinned = value.contiguous().pin_memory()
        return pinned.to(self.options.device, non_blocking=True)

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Put all modules into eval mode inside. Afterwards each one has its own mode again."""
        modes = [(module, module.training) for module in self.skeleton.modules()]
        self.skeleton.eval()

        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _look_over(self) -> None:
        """Check the modules before a step, since users and trainers may change them at any time.

        Hugging Face's gradient checkpointing, which would call nodes again in the backward, is switched off; see
        `activation`. A warning names hooks that a recomputation calls again.

        Raises:
            StreamedModelError: a unit's module is no longer a part of the model, or was compiled.
        """
        ids_in_model: set[int] = set()
        is_hooked = bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)
        for module in self.skeleton.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
            is_hooked = is_hooked or bool(module._forward_hooks or module._forward_pre_hooks)
            ids_in_model.add(id(module._parameters))
            # The model itself may be compiled, since its forward is excluded from that (`forward_through`).
            if module._compiled_call_impl is not None and module is not self.skeleton:
                raise StreamedModelError(
                    f"a {type(module).__name__} was compiled after the model was opened, and its weights come and go "
                    "past what was compiled. Leave that out, and set compile of megatier.stream."
                )

        for node in self.nodes:
            for parameters, _, tensor in node.bindings:
                if id(parameters) not in ids_in_model:
                    raise StreamedModelError(
                        f"the module of {tensor.name} was replaced or removed after the model was opened, so what is "
                        "trained and saved would be another model than the one that runs. Change the model before, and "
                        "open it then."
                    )

        if is_hooked:
            running_again = (node for node in self.nodes if not node.keeps_graph)
            names = [f"{node.module_name}.{name}" for node in running_again for name in hooks_inside(node.module)]
            if new := [name for name in names if name not in self._hooked]:
                self._hooked.update(new)
                warn_of_hooks(new)

    @property
    def tiles(self) -> dict[str, Decision]:
        """The decision about each module that may run in tiles of tokens, by its path. Checkpoints store it."""
        decisions = {path: tiled.decision for path, _, tiled in self._may_be_tiled()}
        return {path: decision for path, decision in decisions.items() if decision is not None}

    def take_tiles(self, decided: Mapping[str, Decision]) -> None:
        """Use the decisions of the run that is resumed. Modules without one are tried.

        Args:
            decided: the value of `tiles` then; empty in checkpoints of older versions.
        """
        for path, _, tiled in self._may_be_tiled():
            if path in decided:
                tiled.decide(decided[path])
        self._check_tiles()

    @contextmanager
    def trying_tiles(self, all_ranks: Ranks | SingleRank) -> Iterator[None]:
        """Surround one forward without gradients, in which each module tries whether it can run in tiles of tokens.

        Modules that cannot will run whole, and a warning names them.

        Args:
            all_ranks: all ranks, each of which comes here with a batch of its own.
        """
        undecided = [tiled for _, _, tiled in self._may_be_tiled() if tiled.decision is None]
        for tiled in undecided:
            tiled.try_next(why_joined)
        yield

        # Ranks have tried different tokens, but must compute alike. The first rank has those with which a single
        # process would have tried.
        decided = all_ranks.broadcast(lambda: [tiled.decision for tiled in undecided])
        for tiled, decision in zip(undecided, decided, strict=True):
            if decision is not None:
                tiled.decide(decision)
        self._check_tiles()
        self.knows_tiles = True

    def _check_tiles(self) -> None:
        """Update `knows_tiles`, and warn about modules that run whole."""
        candidates = list(self._may_be_tiled())
        self.knows_tiles = all(tiled.decision is not None for _, _, tiled in candidates)

        # Once for each class of module, since layers are alike. Modules inside one that runs in tiles see no more
        # tokens anyway.
        warned_of: set[str] = set()
        for path, is_inside, tiled in candidates:
            if tiled.why_whole is None or is_inside:
                continue
            kind = type(tiled.module).__name__
            if kind not in warned_of:
                warned_of.add(kind)
                warning = f"{path} ({kind}) runs whole, without tiles of tokens: {tiled.why_whole}"
                warnings.warn(warning, stacklevel=2)

    def _may_be_tiled(self) -> Iterator[tuple[str, bool, TiledModule]]:
        """Yield each module that may run in tiles: its path, whether one around it runs in tiles, and its wrapper."""
        for node in self.nodes:
            # The node's own module has the empty name, which is a prefix of every name.
            cut = [name for name, tiled in node.tiled.items() if tiled.is_cut]
            prefixes = tuple(f"{name}.".lstrip(".") for name in cut)
            for name, tiled in node.tiled.items():
                path = f"{node.module_name}.{name}".rstrip(".")
                is_inside = name.startswith(prefixes)
                yield path, is_inside, tiled

    def _node(self, unit: Unit, name: str, places: Sequence[Binding], lent: Sequence[Binding]) -> Node:
        """Install the node of one module of a unit."""
        module = self.skeleton.get_submodule(name)
        kind = Lender if unit.is_lent else Node if unit.experts is None else ExpertsNode
        node = kind(
            self.stage,
            unit.name,
            # Ranges of experts are nodes of one module, so the module's name would not identify them in messages.
            name if unit.experts is None else unit.name,
            module,
            places,
            activations=self.options.activations[unit.name],
            lent=lent,
            tiled=tiled_names(unit, module) if self.options.tile_tokens else [],
            experts=unit.experts,
        )

        # If a layer has several modules with nodes, the layer's own forward might use a weight of one directly.
        if unit.is_layer and len(unit.module_names) > 1:
            guard(node)

        return node


def _arithmetic(options: EngineOptions) -> Callable[[], AbstractContextManager[object]]:
    """Return the context manager for each forward and backward of a unit."""
    if options.fp32_products:
        return Fp32Products
    if options.any_shape and options.device.type == "cuda":
        return without_cudnn
    return nullcontext


def _lent(skeleton: PreTrainedModel, units: Sequence[Unit], user: Unit, name: str) -> list[Binding]:
    """Return the places in a module where an enclosing module puts copies of its own weights."""
    if user.is_lent or user.experts is not None:
        return []

    places: list[Binding] = []
    for unit in units:
        if unit.is_lent:
            places += bindings(skeleton, unit, name)
    return places


def num_counted(batch: Batch) -> int:
    """Return the number of counted tokens. Nothing predicts the first token of a row."""
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
