"""One autograd node for each module of a unit, under Hugging Face's own forward.

The modules of a unit lie on meta. Each one's `forward` is replaced, on the instance, by a call of its node. The node
asks for the unit's weights, binds views of their GPU slot, runs the original forward, and unbinds. Its backward asks
again, runs the unit's backward, and hands the gradients over (`unit_function`). Masks, rotary tables, auxiliary losses
and scales stay Hugging Face's business, which is why one node serves every family.

A group's batch is cut into slices along the batch dimension of its batched arguments (`Rows`). They share one binding.

Source: the mechanism of gradient checkpointing (torch.utils.checkpoint) with the weights taken out as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megatier.compute.adapted import adapted, take_over, wrappers_in
from megatier.compute.compilation import Compiled
from megatier.compute.tiles import TiledModule, running
from megatier.engine.backward import sever
from megatier.engine.call import Call, collector, uncaught
from megatier.engine.carried import Arguments, copy_attributes
from megatier.engine.rows import Rows
from megatier.engine.stage import Stage
from megatier.engine.unit_function import lend_weights, run_unit
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.crossing import CHECKED, check_inside, claim
from megatier.guards.prefix import without_caches
from megatier.guards.transforms import check_transforms
from megatier.guards.unbound import make_unbound
from megatier.guards.unchanged import REMEDY, Unchanged, refused
from megatier.models.decoder import Binding
from megatier.tier import Activations


class Node:
    """One module of one unit, whose weights are bound only while it runs."""

    def __init__(
        self,
        stage: Stage,
        unit: str,
        module_name: str,
        module: nn.Module,
        bindings: Sequence[Binding],
        *,
        activations: Activations,
        lent: Sequence[Binding] = (),
        tiled: Sequence[str] = (),
        compiles: bool = True,
    ) -> None:
        """Replace the module's forward on the instance.

        Args:
            stage: what all nodes of the model share.
            unit: the name of the unit that brings the weights.
            module_name: the name of the module in the model.
            module: the module, whose parameters lie on meta.
            bindings: the places of the unit's weights in the module.
            activations: the policy between forward and backward.
            lent: the places in the module in which a module around it puts copies of its own unit's weights.
            tiled: the modules that may run in tiles of tokens, by their names in the module; "" is the module itself.
            compiles: compile the forward, if the stage compiles.
        """
        self.stage = stage
        """What all nodes of the model share."""
        self.unit = unit
        """The name of the unit that brings the weights."""
        self.module_name = module_name
        """The name of the module in the model, for messages."""
        self.module = module
        """The module itself, whose `forward` on the instance is this node."""
        self.activations = activations
        """The policy between forward and backward."""
        self.bindings = bindings
        """For each place of a weight in the module, the dictionary, the key and the slice of the unit's layout."""
        self._places = [*bindings, *lent]
        """The same, and then the places of weights that are lent to it."""
        self.rows = Rows(module_name)
        """Which arguments and results of the module have the batch in front."""
        self.tiled = {name: self._tiled(name) for name in tiled}
        """The modules that may run in tiles of tokens, by their names in the module."""
        self._adapters = wrappers_in(module)
        """PEFT's wrappers of those parameters that have an adapter of their own."""
        take_over(self._adapters)
        self._forward: Callable[..., Any] = module.forward
        self._compiled = _compiled(stage, module) if compiles else None

        self._forwards: Counter[bool] = Counter()
        """The number of forwards with a gradient (True), and without."""
        self.is_new = True
        """Whether this is one of the module's first forwards, which are looked at closely."""
        self.is_written = False
        """Whether a forward of the module has written a weight's own bits into it."""
        self._keeps_views = False
        """Whether a forward of the module has left a view of a weight in an attribute."""
        # A tied weight may have several bindings in one module; it has one slice.
        self._slices = {tensor.name: tensor for _, _, tensor in bindings}
        self._lent = {tensor.name: (parameters, leaf) for parameters, leaf, tensor in lent}
        """For each weight that is lent to the module, by its name, a place in which it lies during a forward."""
        self.is_trained = {name: stage.gradients.takes(unit, name) for name in self._slices}
        """Whether each parameter is trained, by its name, in the order of `leaves`."""
        self.carriers = frozenset(tensor.name for tensor in self._slices.values() if tensor.stands_for != 1)
        """Names of the parameters whose elements carry the codes and scales of a quantised matrix."""
        self._leaves: dict[int, list[Tensor]] = {}
        """Views of the weights, by the address of the slot that they lie in."""
        self._held = self._unbound()
        """The tensors that lie in the module now, one for each binding: its unbound parameters, or weights."""
        module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """Run the module's forward, with weights that come for it."""
        stage = self.stage
        if stage.alone and not stage.is_running:
            return self._run_alone(args, kwargs)
        self._check_running()
        training = torch.is_grad_enabled()

        # A forward that is run again would append keys and values a second time: the same loss, wrong gradients.
        if training:
            args, kwargs = without_caches(args, kwargs, self.module_name)

        self._forwards[training] += 1
        self.is_new = self._forwards[training] <= CHECKED

        arguments = Arguments(args, kwargs)
        flat = [*arguments.leaves, *self._copies()]
        if any(torch.is_tensor(x) and x.is_meta for x in flat):
            raise UnsupportedModelError(f"{self.module_name} was given a tensor on meta, made from an unbound weight.")
        if stage.learnt is not None:
            self.rows.learn(stage.learnt, arguments.leaves)

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
        # No gradient passes, so no backward will follow.
        if not (self.trains or call.differentiable):
            return call.run_plain(is_cut=True)

        self._look_at(arguments.leaves)
        inputs = call.take_inputs()

        # The backward counts down what is announced here, so it is announced before autograd knows of the call.
        if self.trains:
            stage.gradients.expect(self.unit, call.num_slices)
        return call.unpack(run_unit(call, inputs))

    # HOP 3/6: GPU slot -> weights: views, no copy
    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Views of the unit's parameters in a slot: an autograd leaf for each tensor, cached by address.

        Frozen parameters require no gradient.

        Args:
            weights: uint8 [block]: the slot, the home or the other memory in which the unit's weights lie on the GPU.
        """
        # Slots are pieces of one arena that lives as long as the run, so an address never comes to mean other memory.
        # Whoever gives other memory away calls `forget_leaves`.
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data`, for a version counter of its own: all slots of an arena share one, and a load into a neighbour
            # must not look like a change of weights that autograd has saved. Nor must one weight look like another.
            plane = weights.data.view(self.dtype)
            name = self.module_name
            self._leaves[key] = [
                claim(plane[t.start : t.stop].view(t.shape).data, name).requires_grad_(self.is_trained[t.name])
                for t in self._slices.values()
            ]

        return self._leaves[key]

    def forget_leaves(self) -> None:
        """Drop the views that `leaves` made."""
        self._leaves.clear()

    def run(self, weights: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module's own forward with these weights bound.

        Args:
            weights: its own, in the order of `leaves`, and then those that are lent to it.
            args: the arguments of the forward.
            kwargs: its named arguments.

        Raises:
            UnsupportedModelError: it changes one of the weights.
        """
        unchanged = Unchanged([*self._slices, *self._lent], weights, by_bits=self.is_new or self.is_written)

        with self._bound(weights), self.stage.arithmetic(), adapted(self._adapters), running(self.tiled):
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

        # The slot is soon another unit's, and nobody knows who reads an attribute then.
        if self.is_new or self._keeps_views:
            self._keeps_views = copy_attributes(self.module, weights) or self._keeps_views
        return result

    def resumed(self) -> contextlib.AbstractContextManager[None]:
        """A context for the backward of a graph of the module: the module is as in its forward, but for its weights."""
        return running(self.tiled)

    def _look_at(self, leaves: Sequence[Any]) -> None:
        """Find out how a training call runs, from the leaves of its arguments."""
        check_transforms(self.module_name)
        if self._compiled is not None:
            self._compiled.meet(leaves)

    def _tiled(self, name: str) -> TiledModule:
        """Let a module in the module run in tiles of tokens, once that was tried."""
        stage = self.stage
        path = f"{self.module_name}.{name}".rstrip(".")
        return TiledModule(
            self.module.get_submodule(name),
            name,
            stage.tile_tokens or 0,
            stage.compilation,
            functools.partial(uncaught, path),
            lambda result, leaves: check_inside(path, [result], leaves, stage.model),
        )

    def _unbound(self) -> list[Tensor]:
        """Make the module's parameters unbound ones, and return them, one for each binding."""
        found: list[Tensor] = []
        for parameters, leaf, tensor in self.bindings:
            parameter = parameters[leaf]
            assert parameter is not None
            make_unbound(parameter, self.stage.device, self.dtype, tensor.name)
            found.append(parameter)

        return found

    def _copies(self) -> list[Tensor]:
        """The weights that are lent to the module.

        Raises:
            UnsupportedModelError: nothing is lent now.
        """
        copies = []
        for name, (parameters, leaf) in self._lent.items():
            copy = parameters[leaf]
            if copy is None or copy.is_meta:
                raise UnsupportedModelError(
                    f"{self.module_name} was called by itself, outside of the forward that lends it {name}. Call the "
                    "whole model."
                )
            copies.append(copy)

        return copies

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module by itself, outside of a forward of the model, as an evaluation of its own.

        Nobody knows which group such a call belongs to. So no gradient passes through what it gives, and a backward
        that comes there is refused.
        """
        assert self.stage.alone is not None
        with torch.no_grad(), self.stage.alone(f"{self.module_name} by itself"):
            found = self(*args, **kwargs)

        given = (x for x in Arguments(args, kwargs).leaves if torch.is_tensor(x))
        if torch.is_grad_enabled() and (self.trains or any(x.requires_grad for x in given)):
            return tree_map_only(Tensor, lambda x: sever(x, self.stage.anchor, self.module_name), found)
        return found

    def _check_running(self) -> None:
        """Check that this is a part of a forward of the model.

        Raises:
            StreamedModelError: it is not. The weights may be those of before the last step, and no backward would find
                the group that the call belongs to.
        """
        if not self.stage.is_running:
            raise StreamedModelError(
                f"{self.module_name} was called outside of the model's forward, where its weights do not come. Call it "
                "in `with streamed.one_forward():`, together with the model's own forward and before the backward; or, "
                'under torch.no_grad(), in `with streamed.one_forward("NAME"):`, with a name for what is called there.'
            )

    @contextlib.contextmanager
    def _bound(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these tensors are the module's parameters."""
        by_name = dict(zip((*self._slices, *self._lent), weights, strict=True))
        inside = [by_name[tensor.name] for _, _, tensor in self._places]

        # Looked at before and after: if somebody put another parameter here, it would be lost when ours take its place.
        self._check_held(self._held)
        held = self._held
        before = [parameters[leaf] for parameters, leaf, _ in self._places]
        self._put(inside)
        self._held = inside

        try:
            yield
            self._check_held(inside)
        finally:
            self._put(before)
            self._held = held

    def _put(self, tensors: Sequence[Tensor | None]) -> None:
        """Put tensors in the places of the module's parameters, one for each."""
        for (parameters, leaf, _), tensor in zip(self._places, tensors, strict=True):
            parameters[leaf] = tensor

    def _check_held(self, tensors: Sequence[Tensor]) -> None:
        """Check that nobody has put another parameter in the place of one.

        Args:
            tensors: what the places hold, from the first one on. Nobody knows what those of lent weights hold outside.

        Raises:
            UnsupportedModelError: somebody has.
        """
        for (parameters, leaf, tensor), held in zip(self._places, tensors, strict=False):
            if parameters.get(leaf) is not held:
                raise refused(self.module_name, tensor.name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the compute copy of its weights."""
        return self.stage.dtypes[self.unit]

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph stays for the backward, rather than being made again there."""
        # A compiled forward that saves its inputs alone computes again by itself, inside its own backward.
        lean = self._compiled is not None and self._compiled.saves_inputs_alone

        # Adapted parameters would stay as well, and are as large as the weights.
        return (lean or self.activations.keeps_graph) and not self._adapters

    @property
    def keeps_attention(self) -> bool:
        """Whether what attention gave stays for a forward that is made again."""
        # A compiled forward runs whole, or saves attention by itself.
        return self.stage.keeps_attention and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether the forward runs uncompiled, with the arguments of the last call."""
        return self._compiled is None or self._compiled.is_refused

    @property
    def in_tiles(self) -> list[str]:
        """The names in the module of those modules that run in tiles of tokens, as beginnings of names inside them."""
        return [f"{name}.".lstrip(".") for name, tiled in self.tiled.items() if tiled.is_cut]

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of `leaves`."""
        return list(self._slices)

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that are trained, in the order of `leaves`."""
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
        self._check_running()

        # Announced before autograd knows of the copies, as in a call.
        if self.trains and torch.is_grad_enabled():
            self.stage.gradients.expect(self.unit, 1)
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            copies = lend_weights(self)
        with self._bound([*copies, *self._copies()]):
            yield


def _compiled(stage: Stage, module: nn.Module) -> Compiled[..., Any] | None:
    """Return a module's forward, compiled; None if the stage does not compile, or there is nothing to gain."""
    if stage.compilation is None or isinstance(module, nn.Embedding):
        return None
    return stage.compilation(module.forward, type(module).__name__)


class Lender(Node):
    """A module that runs layers, and lends its unit to all that it runs.

    The unit is what the module owns itself, such as LLaVA-NeXT's `image_newline`, or what stays in fp32 inside of the
    layers. No slot stays bound for so long. So copies lie in the places of its weights, in layers too, and live until
    the backward. A node takes those that lie in its module as further inputs. The gradients of the copies are the
    unit's.
    """

    def __init__(
        self,
        stage: Stage,
        unit: str,
        module_name: str,
        module: nn.Module,
        bindings: Sequence[Binding],
        *,
        activations: Activations,
    ) -> None:
        """Replace the module's forward on the instance. It keeps its signature, which trainers ask for."""
        super().__init__(stage, unit, module_name, module, bindings, activations=activations, compiles=False)
        forward = self._forward

        @functools.wraps(forward)
        def lending(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
            with self.lent():
                return forward(*args, **kwargs)

        module.forward = lending
