"""Binds weights to a module of a unit while it runs.

A module's parameters lie on meta. For each forward, views of the slot that holds the unit's weights take their places,
and afterwards the parameters come back. `node.Node` derives from `BoundModule` and adds where the weights come from.
All of this runs on the thread that computes.
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
from megatier.engine.call_arguments import copy_attributes
from megatier.engine.captures import refusing_captures
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
        """Take the module over: its parameters become unbound ones.

        Args:
            stage: the state that all nodes of the model share.
            unit: the name of the unit that holds the weights.
            module_name: the name of the module in the model.
            module: the module, whose parameters lie on meta.
            bindings: the places of the unit's weights in the module.
            activations: the policy between forward and backward.
            lent: the places where an enclosing module puts copies of its own unit's weights.
            tiled: the modules that may run in tiles of tokens, by their names in the module; "" is the module itself.
            experts: the range of the module's experts in the unit; None: the unit holds the whole module.
        """
        self.stage = stage
        """The state that all nodes of the model share."""
        self.unit = unit
        """The name of the unit that holds the weights."""
        self.module_name = module_name
        """The name of the module in the model, for messages."""
        self.module = module
        """The module, whose `forward` on the instance is this node."""
        self.activations = activations
        """The policy between forward and backward."""
        self.bindings = bindings
        """For each place of a weight in the module, the dictionary, the key and the slice of the unit's layout."""
        self._places = [*bindings, *lent]
        """The places in `bindings`, followed by those of weights that are lent to the module."""
        self.rows = Rows(module_name)
        """Which arguments and results of the module have a batch dimension."""
        self.tiled = {name: self._tiled(name) for name in tiled}
        """The modules that may run in tiles of tokens, by their names in the module."""
        self._adapters = wrappers_in(module)
        """PEFT's wrappers of parameters that have an adapter of their own."""
        # `run` applies these adapters before the forward. Inside it, PEFT would take a bound view out of its module.
        take_over(self._adapters)
        self._has_images = stage.tower_attention.serves(module)
        """Whether it computes attention over images of any sizes."""
        self._forward: Callable[..., Any] = module.forward
        self._compiled: Compiled[..., Any] | None = None
        # An embedding is a lookup, so compiling it gains nothing.
        if self.compiles and stage.compilation is not None and not isinstance(module, nn.Embedding):
            self._compiled = stage.compilation(module.forward, type(module).__name__)

        self._forwards: Counter[bool] = Counter()
        """The number of forwards with gradients (True) and without (False)."""
        self.is_new = True
        """Whether this is one of the module's first forwards, which get additional checks."""
        self.is_written = False
        """Whether a forward has written a weight in place, with the same bits."""
        self._keeps_views = False
        """Whether a forward has left a view of a weight in an attribute."""
        # A tied weight may have several bindings in a module, but it has one slice.
        self._tensors_by_name = {tensor.name: tensor for _, _, tensor in bindings}
        self._lent = {tensor.name: (parameters, attribute) for parameters, attribute, tensor in lent}
        """For each weight that is lent to the module, one of its places, by its name."""
        self.requires_grad_by_name = {name: stage.gradients.is_trained(unit, name) for name in self._tensors_by_name}
        """Whether each parameter is trained, by its name, in the order of `leaves`."""
        self.names = list(self._tensors_by_name)
        """The names of the parameters, in the order of `leaves`."""
        self.trained = [name for name in self.names if self.requires_grad_by_name[name]]
        """The names of the trained parameters, in the order of `leaves`. If there are none, a backward only has
        gradients of inputs."""
        self.dtype = stage.dtypes[unit]
        """The dtype of the compute copy of its weights."""
        self.code_parameters = frozenset(name for name, t in self._tensors_by_name.items() if t.stands_for != 1)
        """The names of the parameters whose elements carry codes and scales of a quantised matrix."""
        self._leaves: dict[int, list[Tensor]] = {}
        """Views of the weights, by the address of the slot."""
        self.placed = self._unbound()
        """The tensors in the module's places now, one for each binding: its unbound parameters, or weights."""
        self.stays_bound = False
        """Whether these are weights that stay for a whole forward (`resident_modules`)."""
        self.experts = experts
        """The range of the module's experts that the unit has; None: it has the whole module."""
        # Last, since from now on a call of the module needs all of the above.
        self._install()

    def _install(self) -> None:
        """Take the place of the module's forward on the instance."""

    # HOP 3/6: GPU slot -> weights: views, no copy
    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Return an autograd leaf for each of the unit's parameters: views of a slot, cached by its address.

        Frozen parameters require no gradient.

        Args:
            weights: uint8 [block], the GPU memory in which the unit's weights lie.
        """
        # Slots are parts of one arena that lives as long as the run, so an address keeps its meaning. Code that gives
        # other memory away calls `forget_leaves`.
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data` gives each view a version counter of its own. All slots of the arena share one, and a load into a
            # neighbouring slot must not look like a change of saved weights. Nor may one weight look like another.
            plane = weights.data.view(self.dtype)
            name = self.module_name
            self._leaves[key] = [
                note_owner(plane[t.start : t.stop].view(t.shape).data, name).requires_grad_(
                    self.requires_grad_by_name[t.name]
                )
                for t in self._tensors_by_name.values()
            ]

        return self._leaves[key]

    def forget_leaves(self) -> None:
        """Drop the cached views."""
        self._leaves.clear()

    def run(self, weights: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module's own forward with these weights bound.

        Args:
            weights: the module's own weights in the order of `leaves`, then those that are lent to it.
            args: the arguments of the forward.
            kwargs: the keyword arguments.

        Raises:
            UnsupportedModelError: the forward changes one of the weights.
        """
        # The host cannot read a checksum while a CUDA graph is captured.
        is_captured = self.stage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        by_bits = (self.is_new or self.is_written) and not is_captured
        unchanged = Unchanged([*self._tensors_by_name, *self._lent], weights, by_bits=by_bits)

        images: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._has_images:
            images = self.stage.tower_attention.applied()
            kwargs = longest_as_tensor(kwargs)

        with images, self._bound(weights), self.stage.arithmetic(), adapted(self._adapters), running(self.tiled):
            # Evaluation runs uncompiled, so only the training graph is compiled, and no second graph has to agree with
            # it.
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

        # Another unit will use the slot, and any code may read the attribute later.
        if self.is_new or self._keeps_views:
            self._keeps_views = copy_attributes(self.module, weights) or self._keeps_views
        return result

    def resumed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of the module's graph, where all but the weights is as in the forward."""
        return running(self.tiled)

    def _tiled(self, name: str) -> TiledModule:
        """Wrap a submodule so that it may run in tiles of tokens, once a trial has shown that it can."""
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
        """Make the module's parameters unbound, and return them, one for each binding."""
        unbound: list[Tensor] = []
        for parameters, attribute, tensor in self.bindings:
            parameter = parameters[attribute]
            assert parameter is not None
            make_unbound(parameter, self.stage.device, self.dtype, tensor.name)
            unbound.append(parameter)

        return unbound

    @contextlib.contextmanager
    def _bound(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Make these tensors the module's parameters inside."""
        by_name = dict(zip((*self._tensors_by_name, *self._lent), weights, strict=True))
        inside = [by_name[tensor.name] for _, _, tensor in self._places]

        # Checked before and after: a parameter that somebody else has put here would be lost.
        self._check_placed(self.placed)
        placed = self.placed
        owners = [owner for owner, _, _ in self._places]
        attributes = [attribute for _, attribute, _ in self._places]
        before = [owner[attribute] for owner, attribute in zip(owners, attributes, strict=True)]

        # Both functions are made before either is called, since nothing may fail between binding weights and restoring
        # parameters.
        bind = assignment(owners, attributes, inside)
        unbind = assignment(owners, attributes, before)
        try:
            self.placed = inside
            bind()
            yield
            self._check_placed(inside)
        finally:
            self.placed = placed
            unbind()

    def _check_placed(self, tensors: Sequence[Tensor]) -> None:
        """Check that the module still has the parameters that were put there.

        Args:
            tensors: the expected contents of the first places. Nothing is known of those of lent weights.

        Raises:
            UnsupportedModelError: a parameter was replaced.
        """
        places = self._places[: len(tensors)]
        for place, placed in zip(places, tensors, strict=True):
            owner, attribute, tensor = place
            if owner.get(attribute) is not placed:
                raise changed_weight_error(self.module_name, tensor.name)

    def check_finite(self, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        """Check that weights and outputs are finite. The host waits for the device at each of them.

        Args:
            weights: the module's weights in the order of `names`, then those that are lent to it.
            outputs: the outputs of the module.

        Raises:
            NonFiniteError: one of them is not finite. The message names the module.
        """
        num_own = len(self.names)
        numbers = list(weights[num_own:])
        for name, weight in zip(self.names, weights[:num_own], strict=True):
            # Its bits are codes and scales of a quantised matrix, which may read as NaN.
            if name not in self.code_parameters:
                numbers.append(weight)

        for kind, tensors in (("a weight", numbers), ("an output", outputs)):
            if not all(map(_is_finite, tensors)):
                raise NonFiniteError(f"{kind} of unit {self.unit} ({self.module_name}) is not finite")

    @property
    def can_stay_bound(self) -> bool:
        """Whether resident weights may be bound for a whole forward: no single call needs special treatment."""
        is_known = self._forwards[False] >= FORWARDS_CHECKED
        return is_known and not (self.is_written or self._keeps_views or self._adapters)

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph is kept for the backward, instead of being recomputed there."""
        # A compiled forward that saves only its inputs recomputes by itself, inside its own backward.
        lean = self._compiled is not None and self._compiled.saves_inputs_alone

        # A kept graph would hold adapted parameters, which are as large as the weights.
        return (lean or self.activations.keeps_graph) and not self._adapters

    @property
    def keeps_attention(self) -> bool:
        """Whether attention's results are kept for a recomputed forward."""
        # A compiled forward recomputes as a whole, or saves attention by itself.
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


def assignment(owners: Sequence[Any], attributes: Sequence[str], tensors: Sequence[Any]) -> Callable[[], object]:
    """Return a call that puts each tensor into its owner's dictionary, and that no interrupt can cut in two."""
    # One call in C. The interpreter looks for interrupts between calls, and one that came between two parameters, or
    # before they are put back, would leave a slot's bytes in the module for good.
    return functools.partial(deque, map(setitem, owners, attributes, tensors), 0)
