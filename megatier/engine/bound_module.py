"""Binds weights to a module of a unit while it runs.

Its parameters lie on meta. For each forward views of the slot in which the unit's weights lie take their places, and
then the parameters come back.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn

from megatier.compute.adapted_parameter import adapted, take_over, wrappers_in
from megatier.compute.compilation import Compiled
from megatier.compute.token_tiles import TiledModule, running
from megatier.engine.captures import refusing_captures
from megatier.engine.carried_tensors import copy_attributes
from megatier.engine.rows import Rows
from megatier.engine.stage import Stage
from megatier.errors import NonFiniteError, UnsupportedModelError
from megatier.guards.crossing import FORWARDS_CHECKED, check_inside, note_owner
from megatier.guards.unbound_weights import make_unbound
from megatier.guards.weight_changes import WEIGHT_CHANGE_REMEDY, Unchanged, changed_weight_error
from megatier.models.decoder import Binding
from megatier.models.tower_attention import longest_as_tensor
from megatier.tier import Activations


class BoundModule:
    """One module of one unit, whose weights are bound only while it runs."""

    compiles = True
    """Whether the forward is compiled, if the stage compiles."""

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
        experts: tuple[int, int] | None = None,
    ) -> None:
        """Make the module's parameters unbound ones.

        Args:
            stage: what all nodes of the model share.
            unit: the name of the unit that brings the weights.
            module_name: the name of the module in the model.
            module: the module, whose parameters lie on meta.
            bindings: the places of the unit's weights in the module.
            activations: the policy between forward and backward.
            lent: the places in the module in which a module around it puts copies of its own unit's weights.
            tiled: the modules that may run in tiles of tokens, by their names in the module; "" is the module itself.
            experts: the range of the module's experts that the unit has; None: it has the whole module.
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
        """The places in `bindings`, and then those of weights that are lent to the module."""
        self.rows = Rows(module_name)
        """Which arguments and results of the module have the batch in front."""
        self.tiled = {name: self._tiled(name) for name in tiled}
        """The modules that may run in tiles of tokens, by their names in the module."""
        self._adapters = wrappers_in(module)
        """PEFT's wrappers of those parameters that have an adapter of their own."""
        # `run` adapts them before the forward: inside of it, PEFT would take a bound view out of its module.
        take_over(self._adapters)
        self._has_images = stage.tower_attention.serves(module)
        """Whether it computes attention over images of any sizes."""
        self._forward: Callable[..., Any] = module.forward
        self._compiled: Compiled[..., Any] | None = None
        # An embedding only looks rows up, so compiling it gains nothing.
        if self.compiles and stage.compilation is not None and not isinstance(module, nn.Embedding):
            self._compiled = stage.compilation(module.forward, type(module).__name__)

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
        self.is_trained = {name: stage.gradients.is_trained(unit, name) for name in self._slices}
        """Whether each parameter is trained, by its name, in the order of `leaves`."""
        self.names = list(self._slices)
        """The names of the parameters, in the order of `leaves`."""
        self.trained = [name for name in self.names if self.is_trained[name]]
        """The names of the parameters that are trained, in the order of `leaves`. If there are none, a backward has
        gradients of inputs alone."""
        self.dtype = stage.dtypes[unit]
        """The dtype of the compute copy of its weights."""
        self.carriers = frozenset(tensor.name for tensor in self._slices.values() if tensor.stands_for != 1)
        """Names of the parameters whose elements carry the codes and scales of a quantised matrix."""
        self._leaves: dict[int, list[Tensor]] = {}
        """Views of the weights, by the address of the slot that they lie in."""
        self.held = self._unbound()
        """The tensors that lie in the module now, one for each binding: its unbound parameters, or weights."""
        self.stays_bound = False
        """Whether these are weights that stay there for a whole forward (`resident_modules`)."""
        self.experts = experts
        """The range of the module's experts that the unit has; None: it has the whole module."""
        # Last, since a call of the module needs all of the above from now on.
        self._install()

    def _install(self) -> None:
        """Take the place of the module's forward on the instance."""

    # HOP 3/6: GPU slot -> weights: views, no copy
    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Return views of the unit's parameters in a slot: an autograd leaf for each tensor, cached by address.

        Frozen parameters require no gradient.

        Args:
            weights: uint8 [block]: the slot, the home or the other memory in which the unit's weights lie on the GPU.
        """
        # Slots are pieces of one arena that lives as long as the run, so an address never comes to mean other memory.
        # Code that gives other memory away calls `forget_leaves`.
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data`, for a version counter of its own: all slots of an arena share one, and a load into a neighbour
            # must not look like a change of weights that autograd has saved. Nor must one weight look like another.
            plane = weights.data.view(self.dtype)
            name = self.module_name
            self._leaves[key] = [
                note_owner(plane[t.start : t.stop].view(t.shape).data, name).requires_grad_(self.is_trained[t.name])
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
        # The host cannot read a sum while a CUDA graph is captured.
        is_captured = self.stage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        by_bits = (self.is_new or self.is_written) and not is_captured
        unchanged = Unchanged([*self._slices, *self._lent], weights, by_bits=by_bits)

        images: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._has_images:
            images = self.stage.tower_attention.applied()
            kwargs = longest_as_tensor(kwargs)

        with images, self._bound(weights), self.stage.arithmetic(), adapted(self._adapters), running(self.tiled):
            # Evaluation runs uncompiled: the training graph alone is compiled, so no second one has to agree with it.
            forward = self._compiled if self._compiled is not None and torch.is_grad_enabled() else self._forward
            try:
                result = forward(*args, **kwargs)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise UnsupportedModelError(
                    f"{self.module_name} changes a weight or an argument in place in its forward. "
                    f"{WEIGHT_CHANGE_REMEDY}"
                ) from error

        self.is_written = unchanged.check(self.module_name) or self.is_written

        # The slot is soon another unit's, and nobody knows who reads an attribute then.
        if self.is_new or self._keeps_views:
            self._keeps_views = copy_attributes(self.module, weights) or self._keeps_views
        return result

    def resumed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a graph of the module: all but its weights is as in the forward."""
        return running(self.tiled)

    def _tiled(self, name: str) -> TiledModule:
        """Let a module in the module run in tiles of tokens, once that was tried."""
        stage = self.stage
        path = f"{self.module_name}.{name}".rstrip(".")
        return TiledModule(
            self.module.get_submodule(name),
            name,
            stage.tile_tokens or 0,
            stage.compilation,
            functools.partial(refusing_captures, path),
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

    @contextlib.contextmanager
    def _bound(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Make these tensors the module's parameters for a while."""
        by_name = dict(zip((*self._slices, *self._lent), weights, strict=True))
        inside = [by_name[tensor.name] for _, _, tensor in self._places]

        # Looked at before and after: if somebody put another parameter here, it would be lost when ours take its place.
        self._check_held(self.held)
        held = self.held
        owners = [owner for owner, _, _ in self._places]
        leaves = [leaf for _, leaf, _ in self._places]
        before = [owner[leaf] for owner, leaf in zip(owners, leaves, strict=True)]

        # Both functions are made before either is called: nothing may fail between binding weights and putting
        # parameters back.
        bind = assignment(owners, leaves, inside)
        unbind = assignment(owners, leaves, before)
        try:
            self.held = inside
            bind()
            yield
            self._check_held(inside)
        finally:
            self.held = held
            unbind()

    def _check_held(self, tensors: Sequence[Tensor]) -> None:
        """Check that nobody has put another parameter in the place of one.

        Args:
            tensors: what the places hold, from the first one on. Nobody knows what those of lent weights hold outside.

        Raises:
            UnsupportedModelError: somebody has.
        """
        places = self._places[: len(tensors)]
        for place, held in zip(places, tensors, strict=True):
            owner, leaf, tensor = place
            if owner.get(leaf) is not held:
                raise changed_weight_error(self.module_name, tensor.name)

    def check_finite(self, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Refuse a weight or an output that is not finite. The host waits for the device at each of them.

        Args:
            weights: those of the module, in the order of `names`, and then others that it was lent.
            outputs: what it made of them.

        Raises:
            NonFiniteError: one of them is not. It names the module.
        """
        num_own = len(self.names)
        numbers = list(weights[num_own:])
        for name, weight in zip(self.names, weights[:num_own], strict=True):
            # The bits of a carrier are codes and scales of a quantised matrix, which may read as NaN.
            if name not in self.carriers:
                numbers.append(weight)

        for what, tensors in (("a weight", numbers), ("an output", outputs)):
            if not all(map(_is_finite, tensors)):
                raise NonFiniteError(f"{what} of unit {self.unit} ({self.module_name}) is not finite")

    @property
    def can_stay_bound(self) -> bool:
        """Whether weights that stay where they are may be bound for a whole forward: no call needs more than they."""
        is_known = self._forwards[False] >= FORWARDS_CHECKED
        return is_known and not (self.is_written or self._keeps_views or self._adapters)

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


def _is_finite(tensor: Tensor | None) -> bool:
    """Return whether all numbers of a tensor are finite. The host waits for the device."""
    if tensor is None or not tensor.is_floating_point():
        return True
    return bool(tensor.isfinite().all())


def assignment(owners: Sequence[Any], leaves: Sequence[str], tensors: Sequence[Any]) -> Callable[[], object]:
    """Return a call that puts each tensor into its owner's dictionary, and that no interrupt can come into."""
    # One call past Python's interpreter, which looks for interrupts after a call: one that came between two parameters,
    # or before they are put back, would leave a slot's bytes in the module for good.
    return functools.partial(deque, map(setitem, owners, leaves, tensors), 0)
