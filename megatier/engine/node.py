"""One autograd node per unit, under Hugging Face's own forward.

The modules of a unit lie on meta. Each one's `forward` is replaced, on the instance, by a call of this node: it asks
for the unit's weights, binds views of their GPU slot, runs the original forward, and unbinds; its backward asks again,
runs the unit's backward, and hands the gradients over. Masks, rotary tables, auxiliary losses and scales stay Hugging
Face's business, which is why one node serves every family.

A group's batch is cut into slices along the batch dimension of its batched arguments (`Rows`); they share one binding.

Source: the mechanism of gradient checkpointing (torch.utils.checkpoint) with the weights taken out as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatier.engine.call import Call, collector
from megatier.engine.carried import Arguments
from megatier.engine.rows import Rows
from megatier.engine.stage import Stage
from megatier.engine.unit_function import lend_weights, run_unit
from megatier.errors import UnsupportedModelError
from megatier.guards.crossing import CHECKED, claim
from megatier.guards.unbound import make_unbound
from megatier.guards.unchanged import REMEDY, Unchanged, refused
from megatier.layout import TensorSlice
from megatier.numerics.compilation import Compiled
from megatier.tier import Activations

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class Node:
    """One module of one unit, whose weights are bound only while it runs.

    Attributes:
        stage: what all nodes of the model share.
        unit: name of the unit that brings the weights.
        module_name: name of the module in the model, for messages.
        module: the module itself; its `forward` on the instance is this node.
        bindings: for each place of a weight in the module, the dictionary, the key and the slice of the unit's layout.
        activations: policy between forward and backward.
        rows: which arguments and results of the module have the batch in front.
        is_trained: by parameter name, in the order of `leaves`, whether the parameter is trained.
        is_new: whether this is one of the module's first forwards, which are looked at closely.
        is_written: whether a forward of the module has written a weight's own bits into it.
    """

    def __init__(
        self,
        stage: Stage,
        unit: str,
        module_name: str,
        module: nn.Module,
        bindings: Sequence[tuple[dict[str, Tensor | None], str, TensorSlice]],
        *,
        activations: Activations,
        compiles: bool = True,
    ) -> None:
        """Replace the module's forward on the instance."""
        self.stage = stage
        self.unit = unit
        self.module_name = module_name
        self.module = module
        self.activations = activations
        self.bindings = bindings
        self._forward: Callable[..., Any] = module.forward
        self._compiled: Compiled[..., Any] | None = None
        if compiles and stage.compilation is not None and not isinstance(module, nn.Embedding):
            self._compiled = stage.compilation(module.forward, type(module).__name__)
        self._leaves: dict[int, list[Tensor]] = {}
        """Views of the weights, by the address of the slot that they lie in."""
        self._held: list[Tensor] = []
        """The tensors that lie in the module now, one per binding: its unbound parameters, or weights."""
        self._forwards: Counter[bool] = Counter()
        """Number of forwards, with a gradient (True) and without."""
        self.is_new = True
        self.is_written = False

        # A tied weight may have several bindings in one module; it has one slice.
        self._slices = {tensor.name: tensor for _, _, tensor in bindings}
        self.is_trained = {name: stage.gradients.takes(unit, name) for name in self._slices}
        self.rows = Rows(module_name)

        for parameters, leaf, tensor in bindings:
            unbound = parameters[leaf]
            assert unbound is not None
            is_in_fp32 = tensor.name in stage.in_fp32
            make_unbound(unbound, stage.device, torch.float32 if is_in_fp32 else stage.dtype, tensor.name)
            self._held.append(unbound)

        module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """The module's forward, with streamed weights."""
        stage = self.stage
        training = torch.is_grad_enabled()
        if training:
            # A replay would append keys and values a second time: the same loss, wrong gradients.
            kwargs = {k: None if k in CACHE_ARGUMENTS else v for k, v in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False

        self._forwards[training] += 1
        self.is_new = self._forwards[training] <= CHECKED
        arguments = Arguments(args, kwargs)
        flat = arguments.leaves
        if any(torch.is_tensor(x) and x.is_meta for x in flat):
            raise UnsupportedModelError(f"{self.module_name} was given a tensor on meta, made from an unbound weight.")
        if stage.learnt is not None:
            self.rows.learn(stage.learnt, flat)

        # Hugging Face takes hidden states by hooks on whole layers, which run outside of the node, as in any model.
        # Only what hooks take inside of the module has to be handed out.
        collected = tuple(key for key, value in (collector.get() or {}).items() if isinstance(value, list))
        differentiable = [i for i, x in enumerate(flat) if torch.is_tensor(x) and x.requires_grad]
        call = Call(
            node=self,
            arguments=arguments,
            flat=flat,
            differentiable=differentiable,
            collected=tuple(key for key in collected if key != "hidden_states"),
        )
        if stage.learnt is not None:
            return call.run_plain(is_cut=False)
        if not training:
            return call.evaluate(args, kwargs)
        if not (self.trains or call.differentiable):  # no gradient passes: no backward
            return call.run_plain(is_cut=True)

        # The call lives until the backward. An input that it held would live as long, though a policy drops it.
        inputs = [flat[i] for i in call.differentiable]
        for i in call.differentiable:
            call.flat[i] = None

        # The backward counts down what is announced here, so it is announced before autograd knows of the call.
        if self.trains:
            stage.gradients.expect(self.unit, call.num_slices)
        return call.unpack(run_unit(call, inputs))

    # HOP 3/6: GPU slot -> weights: views, no copy
    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Views of the unit's parameters in a slot, one per tensor, each an autograd leaf; cached by address.

        Those that are frozen require no gradient.

        Args:
            weights: uint8 [block], the slot or the home in which the unit's weights lie on the GPU.
        """
        # Slots are pieces of one arena that lives as long as the run, so an address never comes to mean other memory.
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data`, for a version counter of its own: all slots of an arena share one, and a load into a neighbour
            # must not look like a change of weights that autograd has saved. Nor must one weight look like another.
            plane = weights.data.view(self.stage.dtype)
            name = self.module_name
            self._leaves[key] = [
                claim(plane[t.start : t.stop].view(t.shape).data, name).requires_grad_(self.is_trained[t.name])
                for t in self._slices.values()
            ]

        return self._leaves[key]

    def forget_leaves(self) -> None:
        """Drop the views that `leaves` made."""
        self._leaves.clear()

    def run(self, leaves: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """The module's own forward with these weights bound.

        Raises:
            UnsupportedModelError: it changes one of them.
        """
        # Autograd knows this cast: the gradient comes back in the compute copy's dtype, rounded once, as all others.
        in_fp32 = self.stage.in_fp32
        weights = [leaf.float() if name in in_fp32 else leaf for name, leaf in zip(self._slices, leaves, strict=True)]
        unchanged = Unchanged(self.names, weights, by_bits=self.is_new or self.is_written)

        with self._bound(weights), self.stage.arithmetic():
            # Evaluation runs uncompiled: the training graph alone is compiled, so no second one has to agree with it.
            forward = self._compiled if self._compiled is not None and torch.is_grad_enabled() else self._forward
            try:
                result = forward(*args, **kwargs)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise UnsupportedModelError(
                    f"{self.module_name} changes a weight or an argument in place in its forward. {REMEDY}"
                ) from error

        self.is_written = unchanged.check(self.module_name) or self.is_written
        return result

    @contextlib.contextmanager
    def _bound(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        by_name = dict(zip(self._slices, leaves, strict=True))
        before = self._held

        # Looked at before and after: a parameter that somebody put here would be lost when ours take its place.
        self._check_held()
        self._hold([by_name[tensor.name] for _, _, tensor in self.bindings])

        try:
            yield
            self._check_held()
        finally:
            self._hold(before)

    def _hold(self, tensors: list[Tensor]) -> None:
        self._held = tensors
        for (parameters, leaf, _), tensor in zip(self.bindings, tensors, strict=True):
            parameters[leaf] = tensor

    def _check_held(self) -> None:
        """Check that nobody has put another parameter in the place of one.

        Raises:
            UnsupportedModelError: somebody has.
        """
        for (parameters, leaf, tensor), held in zip(self.bindings, self._held, strict=True):
            if parameters.get(leaf) is not held:
                raise refused(self.module_name, tensor.name)

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph stays for the backward, rather than being made again there."""
        # A compiled forward that saves its inputs alone computes again by itself, inside its own backward.
        lean = self._compiled is not None and self._compiled.saves_inputs_alone
        return lean or self.activations.keeps_graph

    @property
    def names(self) -> list[str]:
        """Parameter names, in the order of `leaves`."""
        return list(self._slices)

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained, in the order of `leaves`."""
        return [name for name in self._slices if self.is_trained[name]]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters is trained; else a backward has gradients of inputs alone."""
        return any(self.is_trained.values())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, copies of the weights lie in the module, for code that computes with them past its forward.

        They live until the backward, in addition to the slots.
        """
        if self.trains and torch.is_grad_enabled():
            self.stage.gradients.expect(self.unit, 1)
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            copies = lend_weights(self)
        with self._bound(copies):
            yield
