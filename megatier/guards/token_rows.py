"""Finds modules whose result for a token depends on other tokens or their number: they have no tiles.

Found by trying, with the run's own weights and activations. First, other tokens are replaced, and what the module makes
of a token has to stay as it is. Kernels for as many tokens are the same, so nothing but roundings may differ. Then the
first tokens are left out. Kernels for fewer tokens may round differently, so a router may send a token elsewhere if two
experts are nearly equal. So a few tokens may change there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

FEW_TOKENS = 128
"""Tokens of the forward that tries which modules run in tiles. Flex attention has other kernels for fewer."""
TRIED = 64
"""The most tokens with which a module is tried."""
FEW = 1 / 8
"""The share of the tokens that may change if others are left out."""
ROUNDING_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The part of a token's norm by which roundings may change it, by the dtype of the result."""
COARSE = 0.03
"""The same for bf16, and for dtypes that are not named."""


def few_tokens(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments of a model's forward for few tokens, which do to try its modules.

    Args:
        arguments: ids, labels and whatever else there is.

    Returns:
        The first tokens of the first row. If there is more than tokens, such as images, which belong to some of them:
        all of the first row; or all rows, if not everything has one for each.
    """

    # A tensor of one element may be a number for the whole call, such as how many items a loss is divided by.
    def has_rows(argument: object) -> bool:
        return isinstance(argument, Tensor) and argument.numel() > 1

    def are_alike_in(num_dims: int) -> bool:
        return len({shape[:num_dims] for shape in shapes}) <= 1

    # Rows and tokens are the first two dimensions. What tensors do not all have alike is not cut.
    shapes = [argument.shape for argument in arguments if has_rows(argument)]
    cut: tuple[slice, ...] = (slice(1), slice(FEW_TOKENS))
    while cut and not are_alike_in(len(cut)):
        cut = cut[:-1]
    return [argument[cut] if has_rows(argument) else argument for argument in arguments]


def names_of_rows(module: nn.Module, *, is_layer: bool) -> list[str]:
    """Return the modules that might run in tiles, by their names in a module: those of a layer, or the module itself.

    They have parameters, and take nothing that they can do without: no mask, positions or cache. Such modules inside of
    them come behind them. They are given a tile already, unless the one around them has to run whole.
    """
    if not is_layer:
        return ["", *_names_inside(module, "")] if _may_have_rows(module) else []
    return _names_inside(module, "")


def _names_inside(module: nn.Module, path: str) -> list[str]:
    names = []
    for name, part in module.named_children():
        if _may_have_rows(part):
            names += [f"{path}{name}", *_names_inside(part, f"{path}{name}.")]
    return names


def _may_have_rows(module: nn.Module) -> bool:
    """Return whether a module has parameters, holds something inside, and takes nothing that it can do without."""
    # A single product gains nothing by tiles: it holds nothing between its input and its output.
    if isinstance(module, (nn.Linear, nn.Embedding, nn.ModuleList)):
        return False
    if next(module.parameters(), None) is None:
        return False

    # The first is self.
    _, *taken = inspect.signature(type(module).forward).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in taken if parameter.kind not in starred]

    # What may be left out is mostly a mask, positions or a cache, which belong to whole sequences.
    has_optional = any(parameter.default is not inspect.Parameter.empty for parameter in named)
    return bool(named) and not has_optional


def why_joined(module: nn.Module, run: Callable[..., Any], rows: Sequence[Tensor]) -> str | None:
    """Say why a module cannot run in tiles of tokens; None: it can. No state of the module or of torch changes.

    Args:
        module: the module, which is tried as it trains.
        run: runs it on the arguments of some tokens.
        rows: its arguments, each [tokens, W] or [1, tokens, W].
    """
    some = [x.narrow(-2, 0, min(TRIED, x.shape[-2])).clone() for x in rows]
    device = some[0].device
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = _random_state(device)

        # As it trains, because dropout is off in other modes and would not be found.
        module.train()
        try:
            joined = _what_joins(run, some)
            draws = not torch.equal(_random_state(device), before)
            writes = any(not torch.equal(buffer, copy) for buffer, copy in buffers)
            changes = any(x._version for x in some)
        finally:
            for part, mode in modes:
                part.training = mode
            for buffer, copy in buffers:
                buffer.copy_(copy)

    # These reasons come first: whatever draws random numbers, say, gives others the second time.
    reasons = {
        "it draws random numbers": draws,
        "it changes a buffer of its own": writes,
        "it changes its arguments": changes,
    }
    return next((reason for reason, holds in reasons.items() if holds), joined)


def _what_joins(run: Callable[..., Any], rows: Sequence[Tensor]) -> str | None:
    """Try the module; returns what is wrong."""
    result = run(*rows)
    first = rows[0]
    if not isinstance(result, Tensor) or result.shape != first.shape or result.dtype != first.dtype:
        return "it gives something else than one tensor like its first argument"

    count = first.shape[-2]
    numbers = torch.arange(count, dtype=torch.int64, device=first.device)
    for kept in (0, 1):
        # All others become the token beside the first that stays. A mere exchange would hide means over all tokens.
        is_kept = numbers % 2 == kept
        beside = min(1 - kept, count - 1)
        places = torch.where(is_kept, numbers, beside)
        mixed = run(*_taken(rows, places))
        has_changed = ~are_alike(result, mixed)
        if (is_kept & has_changed).any():
            return "what it makes of a token depends on other tokens"

    # Without the first ones, so that each token that stays has another place and fewer beside it.
    last = numbers[count // 3 :]
    fewer = run(*_taken(rows, last))
    has_changed = ~are_alike(result.index_select(-2, last), fewer)
    if has_changed.sum() > FEW * len(last):
        return "what it makes of a token depends on the place of the token, or on how many there are"

    return None


def _taken(rows: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Return the tokens at some places of each argument."""
    return [argument.index_select(-2, places) for argument in rows]


def are_alike(before: Tensor, after: Tensor, *, is_exact: bool = False) -> Tensor:
    """Return which tokens have changed by no more than roundings, bool [tokens]; the tensors are [..., tokens, W]."""
    tolerance = 0.0 if is_exact else ROUNDING_TOLERANCES.get(before.dtype, COARSE)
    old = before.flatten(0, -2).double()
    new = after.flatten(0, -2).double()
    change = (new - old).norm(dim=-1)

    # Not finite counts as changed.
    alike: Tensor = change <= tolerance * old.norm(dim=-1)
    return alike


def _random_state(device: torch.device) -> Tensor:
    """Return the state of all generators from which a module on a device may draw."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)
