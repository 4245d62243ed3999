"""Runs modules of a layer in tiles of tokens, so that their memory does not grow with the sequence.

Norms, MLPs and experts treat each token by itself. So they can run on some tokens at a time, and save only their
inputs. The backward runs each tile again, in the order of the forward. Gradients of inputs go to their rows, and those
of weights are summed in fp32 over the tiles in order and rounded once. A trial finds out beforehand whether a module
treats each token by itself (`guards.token_rows`).

In a compiled layer such a module is one opaque operator. The tile inside is compiled by itself, once for all layers of
a kind. An operator cannot hold a module, so it gets a name, which it looks up among the modules of the running node
(`running`). Modules without matrix products, such as norms, are left to the compiler, which makes one kernel of them
that stores nothing in between.

Source: the tiled compute of Arctic Long Sequence Training (arXiv 2506.13996).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatier.compute.attention_kernels import LastModule
from megatier.compute.compilation import Compilation
from megatier.errors import UnsupportedModelError
from megatier.foreign import reading

BACKWARDS_WATCHED = 2
"""The number of backwards of a module whose graph is checked."""

Run = Callable[..., Any]
"""Runs a module on the arguments of some tokens."""
TileTrial = Callable[[nn.Module, Run, Sequence[Tensor]], str | None]
"""Returns why a module cannot run in tiles, given a function that runs it and its arguments; None: it can."""

_running: Mapping[str, TiledModule] = {}
# Inside an operator, autograd is disabled at the dispatcher. These are the dispatch keys outside of one.
_SWITCHED_OFF = torch._C._dispatch_tls_local_exclude_set()


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a module's trial."""

    why_whole: str | None
    """Why it cannot run in tiles; None: it can."""
    keywords: tuple[str, ...]
    """The names of those arguments that have one."""


class TiledModule:
    """The forward of a module, which runs in tiles of tokens once a trial has shown that it can."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        tokens: int,
        compilation: Compilation | None,
        apart: Callable[[], contextlib.AbstractContextManager[None]],
        look_at: Callable[[Tensor, Sequence[Tensor]], None],
    ) -> None:
        """Replace the module's forward on the instance.

        Args:
            module: the module, whose parameters are bound while it runs.
            name: its name in the module of its node, the same in all layers that share a compilation.
            tokens: the most tokens of a tile.
            compilation: how to compile the tiles of a compiled layer; None: layers are not compiled.
            apart: a context for each tile, in which hooks must not capture tensors of the module.
            look_at: called in the first backwards, with the output of a tile and the leaves of its graph.
        """
        self.module = module
        """The module itself."""
        self.why_whole: str | None = None
        """Why it cannot run in tiles, if a trial has shown that."""
        self.is_cut = False
        """Whether a trial has shown that it can run in tiles."""
        self.last: LastModule | None = None
        """Notified of each run in an uncompiled forward that will be recomputed; None: nothing is."""
        self._trial: TileTrial | None = None
        self._name = name
        self._tokens = tokens
        self._apart = apart
        self._look_at = look_at
        self._looks = BACKWARDS_WATCHED
        self._forward: Run = module.forward
        self._keywords: tuple[str, ...] = ()
        """The names of those arguments that have one."""
        self._places = [
            (part, leaf) for part in module.modules() for leaf, weight in part._parameters.items() if weight is not None
        ]
        self._has_products = any(weight.dim() > 1 for weight in module.parameters())
        self._compiled: Run = self._forward
        if compilation is not None and self._has_products:
            self._compiled = compilation.compile_tile(self._forward, f"a tile of {type(module).__name__}")
        module.forward = self.__call__

    def try_next(self, trial: TileTrial) -> None:
        """Try with the arguments of the next call whether the module can run in tiles."""
        self._trial = trial

    @property
    def decision(self) -> Decision | None:
        """The result of the trial; None: none was made yet."""
        is_known = self.is_cut or self.why_whole is not None
        return Decision(self.why_whole, self._keywords) if is_known else None

    def decide(self, decision: Decision) -> None:
        """Use the result of another trial: of another rank, or of the run that is resumed."""
        self._trial = None
        self.why_whole = decision.why_whole
        self.is_cut = decision.why_whole is None
        self._keywords = decision.keywords

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """Run the module's forward. In tiles, only its arguments and its result exist whole."""
        if self._trial is not None:
            self._try(args, kwargs)

        # The compiler traces this too. All conditions here are constant for it.
        rows = [*args, *kwargs.values()]
        is_compiling = torch.compiler.is_compiling()
        can_cut = self.is_cut and tuple(kwargs) == self._keywords and _are_rows(rows)
        if not can_cut or rows[0].shape[:-1].numel() <= self._tokens or (is_compiling and not self._has_products):
            return self._forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.fill(rows)

        weights = [getattr(part, leaf) for part, leaf in self._places]
        wanted = [x.requires_grad for x in [*rows, *weights]]
        if is_compiling:
            return torch.ops.megatier.tiles(self._name, rows, weights, wanted)
        result = _Tiles.apply(self, wanted, len(rows), *rows, *weights)  # type: ignore[no-untyped-call]
        if self.last is not None:
            self.last.note_run()
        return result

    def fill(self, rows: Sequence[Tensor]) -> Tensor:
        """Run the tiles of an uncompiled layer with the bound weights. Return zeros if the result is not needed."""
        can_skip = self.last is not None and self.last.can_skip()
        if can_skip:
            first = rows[0]
            return first.new_zeros(first.shape)
        return self._fill(rows, self._run_plain)

    def forward(self, rows: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[bool]) -> Tensor:
        """Run the tiles of a compiled layer.

        Args:
            rows: the arguments, each [tokens, W] or [B, T, W].
            weights: the module's weights.
            wanted: for each of both, whether a gradient is wanted.
        """
        count = len(rows)

        def run(*tile: Tensor) -> Tensor:
            # The graph is dropped. Without a graph the forward would be compiled separately, with other bits.
            leaves = _leaves([*tile, *weights], wanted)
            with torch.enable_grad(), self._bound(leaves[count:]):
                result: Tensor = self._run(self._compiled, leaves[:count])
            return result.detach()

        with _outside_of_operators():
            return self._fill(rows, run)

    def backward(
        self,
        rows: Sequence[Tensor],
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        grad: Tensor,
        *,
        is_compiled: bool = False,
    ) -> list[Tensor]:
        """Run the tiles again, and return the wanted gradients in order.

        Args:
            rows: the arguments, as the forward had them.
            weights: the module's weights.
            wanted: for each of both, whether a gradient is wanted.
            grad: the gradient of the result.
            is_compiled: whether the forward was that of a compiled layer.
        """
        count = len(rows)
        forward = self._compiled if is_compiled else self._forward
        trained = _chosen(weights, wanted[count:])
        row_grads = list[Tensor]()
        for x in _chosen(rows, wanted):
            row_grads.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        sums = list[Tensor]()
        for weight in trained:
            # In fp32, since bf16 would round after each of many tiles.
            sums.append(torch.zeros(weight.shape, dtype=torch.float32, device=weight.device))

        tiles = self._cut(rows)
        grad_tiles = self._cut(row_grads)
        for index, [tile_grad] in enumerate(self._cut([grad])):
            leaves = _leaves([*tiles[index], *weights], wanted)
            with torch.enable_grad(), self._bound(leaves[count:]):
                result: Tensor = self._run(forward, leaves[:count])
            # A check takes host time, so only the first backwards are checked.
            if self._looks:
                self._looks -= 1
                self._look_at(result, leaves)

            asked = _chosen(leaves, wanted)
            grads: Sequence[Tensor | None] = torch.autograd.grad(result, asked, tile_grad, allow_unused=True)
            of_rows = grads[: len(row_grads)]
            of_weights = grads[len(row_grads) :]

            # An unused input has no gradient, and its memory is not initialised.
            for place, part in zip(grad_tiles[index] if row_grads else (), of_rows, strict=True):
                place.zero_() if part is None else place.copy_(part)

            # Always in the order of the tiles, since the order changes the bits of a sum.
            for total, part in zip(sums, of_weights, strict=True):
                if part is not None:
                    total.add_(part)

        # Rounded once, after all tiles.
        weight_grads = [total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True)]
        return [*row_grads, *weight_grads]

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the trial."""
        trial = self._trial
        self._trial = None
        assert trial is not None
        rows = [*args, *kwargs.values()]
        self._keywords = tuple(kwargs)
        if not _are_rows(rows):
            self.why_whole = "it takes more than tensors with a row for each token"
            return

        try:
            with reading("its forward fails on some of its tokens", UnsupportedModelError):
                self.why_whole = trial(self.module, self._run_plain, [_flat(x) for x in rows])
        except UnsupportedModelError as error:
            self.why_whole = str(error)
        self.is_cut = self.why_whole is None

    def _fill(self, rows: Sequence[Tensor], run: Run) -> Tensor:
        """Run all tiles, and concatenate their results."""
        first = rows[0]
        result = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        places = self._cut([result])
        for tile, [place] in zip(self._cut(rows), places, strict=True):
            place.copy_(run(*tile))
        return result

    def _cut(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Split the rows of tensors into tiles."""
        by_tensor = [_flat(x).split(self._tokens, dim=-2) for x in tensors]
        return list(zip(*by_tensor, strict=True))

    def _run_plain(self, *tile: Tensor) -> Any:  # noqa: ANN401
        """Run the module on one tile, uncompiled."""
        return self._run(self._forward, tile)

    def _run(self, forward: Run, tile: Sequence[Tensor]) -> Any:  # noqa: ANN401 - before the trial: whatever it gives
        """Run the module on one tile."""
        # Keyword arguments come last.
        count = len(tile) - len(self._keywords)
        by_name = dict(zip(self._keywords, tile[count:], strict=True))
        with self._apart():
            return forward(*tile[:count], **by_name)

    @contextlib.contextmanager
    def _bound(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Make these tensors the module's parameters inside."""
        before = [part._parameters[leaf] for part, leaf in self._places]
        self._put(weights)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Any]) -> None:
        """Put tensors in the places of the module's parameters."""
        for (part, leaf), tensor in zip(self._places, tensors, strict=True):
            part._parameters[leaf] = tensor


@contextlib.contextmanager
def running(tiled: Mapping[str, TiledModule]) -> Iterator[None]:
    """Let operators look up these modules by name inside. One thread computes at a time."""
    global _running
    before = _running
    _running = tiled
    try:
        yield
    finally:
        _running = before


class _Tiles(torch.autograd.Function):
    """A module in tiles, in an uncompiled layer."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledModule, wanted: list[bool], count: int, *inputs: Tensor) -> Tensor:  # noqa: ANN401
        ctx.tiled = tiled
        ctx.wanted = wanted
        ctx.count = count
        ctx.save_for_backward(*inputs)
        return tiled.fill(inputs[:count])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs = ctx.saved_tensors
        rows = inputs[: ctx.count]
        weights = inputs[ctx.count :]
        grads = ctx.tiled.backward(rows, weights, ctx.wanted, grad)
        return None, None, None, *_spread(grads, ctx.wanted)


# ---------------------------------------------------------------------- operators of compiled layers


def _tiles(name: str, rows: list[Tensor], weights: list[Tensor], wanted: list[bool]) -> Tensor:
    """Run a module in tiles."""
    return _running[name].forward(rows, weights, wanted)


def _tiles_like(name: str, rows: list[Tensor], weights: list[Tensor], wanted: list[bool]) -> Tensor:
    """Return a fake tensor like the result of `_tiles`."""
    return rows[0].new_empty(rows[0].shape)


def _tiles_backward(
    name: str, rows: list[Tensor], weights: list[Tensor], wanted: list[bool], grad: Tensor
) -> list[Tensor]:
    """Return the wanted gradients of a module in tiles."""
    with _outside_of_operators():
        return _running[name].backward(rows, weights, wanted, grad, is_compiled=True)


def _tiles_backward_like(
    name: str, rows: list[Tensor], weights: list[Tensor], wanted: list[bool], grad: Tensor
) -> list[Tensor]:
    """Return fake tensors like the results of `_tiles_backward`."""
    return [x.new_empty(x.shape) for x in _chosen([*rows, *weights], wanted)]


def _note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    """Save what the backward needs."""
    ctx.name, rows, weights, ctx.wanted = inputs
    ctx.count = len(rows)
    ctx.save_for_backward(*rows, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the gradients of the operator's arguments."""
    # Lists, as the operator's schema says.
    inputs = list(ctx.saved_tensors)
    rows = inputs[: ctx.count]
    weights = inputs[ctx.count :]
    wanted = list(ctx.wanted)
    wanted_grads = torch.ops.megatier.tiles_backward(ctx.name, rows, weights, wanted, grad)

    # Neither the name nor the list of wanted gradients has a gradient.
    grads = _spread(wanted_grads, wanted)
    return None, grads[: ctx.count], grads[ctx.count :], None


TILES = torch.library.custom_op(
    "megatier::tiles",
    _tiles,
    mutates_args=(),
    schema="(str name, Tensor[] rows, Tensor[] weights, bool[] wanted) -> Tensor",
)
TILES.register_fake(_tiles_like)
TILES.register_autograd(_differentiate, setup_context=_note)
torch.library.custom_op(
    "megatier::tiles_backward",
    _tiles_backward,
    mutates_args=(),
    schema="(str name, Tensor[] rows, Tensor[] weights, bool[] wanted, Tensor grad) -> Tensor[]",
).register_fake(_tiles_backward_like)


@contextlib.contextmanager
def _outside_of_operators() -> Iterator[None]:
    """Let autograd work inside an operator as it does outside."""
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, _SWITCHED_OFF):
        yield


# ---------------------------------------------------------------------- rows


def _are_rows(values: Sequence[Any]) -> bool:
    """Return whether values are tensors, all [tokens, W] or all [B, T, W], with the same tokens."""
    if not values or not all(map(torch.is_tensor, values)):
        return False
    tokens = values[0].shape[:-1]
    if len(tokens) not in (1, 2):
        return False

    # Widths may differ, but a tile takes the same tokens of each.
    return all(x.shape[:-1] == tokens for x in values)


def _flat(tensor: Tensor) -> Tensor:
    """Flatten [B, T, W] to [1, B * T, W]. [tokens, W] stays as it is."""
    return tensor.reshape(1, -1, tensor.shape[-1]) if tensor.dim() > 2 else tensor


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Return the same tensors as autograd leaves."""
    # `.data` gives each a version counter of its own. All slots of an arena share one, and a load into a neighbouring
    # slot must not look like a change of saved weights.
    return [x.data.requires_grad_(is_wanted) for x, is_wanted in zip(tensors, wanted, strict=True)]


def _chosen(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Return those of the tensors whose gradient is wanted."""
    return [x for x, is_wanted in zip(tensors, wanted, strict=False) if is_wanted]


def _spread(wanted_grads: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients in their places, with None where none is wanted."""
    remaining_grads = iter(wanted_grads)
    return [next(remaining_grads) if is_wanted else None for is_wanted in wanted]
