"""Replaces the forward of each module of a unit by an autograd node, underneath Hugging Face's own forward.

A unit's modules lie on meta. Each module's `forward` is replaced on the instance. The node asks for the unit's weights,
binds views of their GPU slot, runs the original forward, and unbinds. Its backward asks for the weights again, runs the
unit's backward, and hands the gradients over (`unit_function`). Masks, rotary tables, auxiliary losses and scales
remain Hugging Face's business, which is why one node serves every model family. `UnitModel` makes the nodes, and the
thread that computes runs them.

A group's batch is cut into slices along the batch dimension of its batched arguments (`Rows`). The slices share one
binding.

Source: activation checkpointing (torch.utils.checkpoint), with the weights taken out as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatier.engine.backward import sever
from megatier.engine.bound_module import BoundModule
from megatier.engine.call import Call
from megatier.engine.call_arguments import Arguments
from megatier.engine.captures import requested_keys
from megatier.engine.lent_weights import LentWeights
from megatier.engine.unit_function import UnitFunction
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.guards.crossing import FORWARDS_CHECKED
from megatier.guards.prefix import without_caches
from megatier.guards.transforms import check_transforms
from megatier.tier import Phase


class Node(BoundModule):
    """One module of one unit, which asks for its weights in each call."""

    def _install(self) -> None:
        self.module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """Run the module's forward, with weights that are loaded for it."""
        stage = self.stage
        if self.stays_bound:
            return self._run_bound(args, kwargs)
        if stage.alone and not stage.is_running:
            return self._run_alone(args, kwargs)
        self._check_running()
        # With resident weights nothing is loaded, so after the first checked forwards the module runs on its arguments
        # directly.
        if stage.is_resident and self._forwards[False] >= FORWARDS_CHECKED:
            return self._run_resident(args, kwargs)
        training = torch.is_grad_enabled()

        # A recomputed forward would append keys and values to a cache twice: the same loss, but wrong gradients.
        if training:
            args, kwargs = without_caches(args, kwargs, self.module_name)

        self._forwards[training] += 1
        self.is_new = self._forwards[training] <= FORWARDS_CHECKED

        arguments = Arguments(args, kwargs)
        flat = [*arguments.leaves, *self._copies()]
        # Torch computes with meta tensors without an error, and the result has no numbers.
        if any(torch.is_tensor(x) and x.is_meta for x in flat):
            raise UnsupportedModelError(f"{self.module_name} was given a tensor on meta, made from an unbound weight.")
        if stage.is_learning:
            self.rows.learn(arguments.leaves)

        differentiable = [i for i, x in enumerate(flat) if torch.is_tensor(x) and x.requires_grad]
        call = Call(
            node=self,
            arguments=arguments,
            flat=flat,
            differentiable=differentiable,
            # Hugging Face captures hidden states by hooks on whole layers, which run outside the node as in any model.
            # Only what hooks capture inside the module has to be handed out.
            collected=tuple(key for key in requested_keys() if key != "hidden_states"),
        )

        # On the whole batch, since how to cut it is not known yet.
        if stage.is_learning:
            return call.run_plain(is_cut=False)
        if not training:
            return call.evaluate(args, kwargs)
        # No gradient passes through, so no backward will follow.
        if not (self.trained or call.differentiable):
            return call.run_plain(is_cut=True)

        return self._run_trained(call)

    def _run_trained(self, call: Call) -> Any:  # noqa: ANN401
        """Run the module's forward, which a backward will follow."""
        stage = self.stage
        check_transforms(self.module_name)
        if self._compiled is not None:
            self._compiled.check_refused(call.arguments.leaves)
        inputs = call.take_inputs()

        # The backward counts these uses down, so they are expected before autograd knows of the call.
        if self.trained:
            stage.gradients.expect_use(self.unit, call.num_slices)
        results = UnitFunction.apply(call, stage.anchor, *inputs)  # type: ignore[no-untyped-call]
        return call.unpack(list(results))

    def _run_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module's own forward with weights that are bound already; see `resident_modules`."""
        if self._lent:
            self._copies()  # refuses a call outside of the module that lends
        # Not around the model's whole forward, since code between modules is not part of a unit.
        with self.stage.arithmetic():
            return self._forward(*args, **kwargs)

    def _run_resident(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module's own forward with resident weights."""
        stage = self.stage
        use = stage.source.enter(self.unit, Phase.FORWARD, stage.gradients.group)
        self.is_new = False

        weights = [*self.leaves(use.bytes), *self._copies()]
        return self.run(weights, args, kwargs)

    def _copies(self) -> list[Tensor]:
        """Return the copies of weights that are lent to the module.

        Raises:
            UnsupportedModelError: none are lent now.
        """
        copies = []
        for name, (parameters, attribute) in self._lent.items():
            copy = parameters[attribute]
            if copy is None or copy.is_meta:
                raise UnsupportedModelError(
                    f"{self.module_name} was called by itself, outside of the forward that lends it {name}. Call the "
                    "whole model."
                )
            copies.append(copy)

        return copies

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module outside of the model's forward, as an evaluation of its own.

        It is not known which group such a call belongs to, so no gradient passes through its result, and a backward
        that reaches it is refused.
        """
        assert self.stage.alone is not None
        with torch.no_grad(), self.stage.alone(f"{self.module_name} by itself"):
            result = self(*args, **kwargs)

        if not torch.is_grad_enabled():
            return result
        given = Arguments(args, kwargs).leaves
        if not (self.trained or any(torch.is_tensor(x) and x.requires_grad for x in given)):
            return result

        def severed(tensor: Tensor) -> Tensor:
            return sever(tensor, self.stage.anchor, self.module_name)

        return tree_map_only(Tensor, severed, result)

    def _check_running(self) -> None:
        """Check that a forward of the model is running.

        Raises:
            StreamedModelError: none is. The weights may be older than the last step, and no backward would find the
                group of the call.
        """
        if not self.stage.is_running:
            raise StreamedModelError(
                f"{self.module_name} was called outside of the model's forward, where its weights do not come. Call it "
                "in `with streamed.one_forward():`, together with the model's own forward and before the backward; or, "
                'under torch.no_grad(), in `with streamed.one_forward("NAME"):`, with a name for what is called there.'
            )

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the module copies of its weights, for code that computes with them outside its forward.

        They live until the backward, in addition to the slots.
        """
        self._check_running()

        # The backward counts this use down, so it is expected before autograd knows of the copies.
        if self.trained and torch.is_grad_enabled():
            self.stage.gradients.expect_use(self.unit, 1)
        with torch.set_grad_enabled(bool(self.trained) and torch.is_grad_enabled()):
            copies = LentWeights.apply(self, self.stage.anchor)  # type: ignore[no-untyped-call]
        with self._bound([*copies, *self._copies()]):
            yield


class Lender(Node):
    """A module that runs layers and lends its own unit to everything that it runs.

    The unit holds the parameters that the module owns itself, such as LLaVA-NeXT's `image_newline`, or those that stay
    in fp32 inside the layers. No slot can stay bound for so long. So copies are bound in the places of its weights, in
    layers too, and live until the backward. A node takes the copies in its module as further inputs, and their
    gradients are the unit's.
    """

    compiles = False

    def _install(self) -> None:
        # The forward keeps its signature, which trainers inspect.
        forward = self._forward

        @functools.wraps(forward)
        def lending(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
            with self.lent():
                return forward(*args, **kwargs)

        self.module.forward = lending
