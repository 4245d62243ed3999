"""Modules that have their weights for a whole forward: what a call of one does, and what is there afterwards."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from interrupts import interrupted
from streamed_loops import streamed_on, train_config

import megatier
from megatier.errors import UnsupportedModelError
from megatier.guards.unbound_weights import Unbound
from megatier.integrations.streamed import Streamed

OURS = str(Path(megatier.__file__).parent)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Streamed]:
    """A model in fp32 whose weights are held, and whose first forwards have been looked at."""
    options: dict[str, Any] = {"compile": False, "fused_loss": False, "compute_dtype": "fp32"}
    with streamed_on("ram", tmp_path, train_config("tied", groups=1), held=1.0, **options) as (_, streamed):
        streamed.model.eval()
        with streamed.held_weights():
            forward(streamed)
            forward(streamed)
            yield streamed
        check_is_unbound(streamed)


def forward(streamed: Streamed) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = streamed.model(torch.arange(3, 9).view(2, 3)).logits
    return found


def check_is_unbound(streamed: Streamed) -> None:
    assert all(isinstance(parameter, Unbound) for parameter in streamed.model.parameters())
    for node in streamed._engine.model.nodes:
        assert not node.stays_bound
        assert all(isinstance(tensor, Unbound) for tensor in node.placed)


def layer_of(streamed: Streamed) -> Any:
    made: Any = streamed.model
    return made.model.layers[1]


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Count the calls of the package's own functions, by the names of file and function."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_call_of_a_module_that_has_its_weights_runs_two_functions_and_a_forward_binds_once(held: Streamed) -> None:
    forward(held)
    nodes = held._engine.model.nodes
    with calls_counted() as calls:
        forward(held)
    assert calls.pop("node.__call__") == calls.pop("node._run_bound") == len(nodes)
    assert calls["bound_module.assignment"] == 2
    of_each_node = {name for name, number in calls.items() if number >= len(nodes)}
    assert of_each_node == {"bound_module.can_stay_bound"}


def test_parameters_are_unbound_between_forwards(held: Streamed) -> None:
    inside = []
    hook = layer_of(held).mlp.register_forward_hook(lambda module, *_: inside.append(module.up_proj.weight.sum()))
    forward(held)
    hook.remove()
    assert inside[0].isfinite()
    check_is_unbound(held)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("of a hook")])
def test_error_in_a_forward_leaves_parameters_unbound_and_the_next_forward_is_as_ever(
    error: BaseException, held: Streamed
) -> None:
    expected = forward(held)

    def stop(*_: object) -> None:
        raise error

    hook = layer_of(held).mlp.register_forward_hook(stop)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        forward(held)
    hook.remove()
    check_is_unbound(held)
    assert torch.equal(forward(held), expected)


def put_another(module: Any, *_: object) -> None:
    module._parameters["weight"] = module.weight.clone()


def write(module: Any, *_: object) -> None:
    module.weight.mul_(2)


@pytest.mark.parametrize("change", [put_another, write])
def test_forward_that_changes_a_weight_is_refused_by_name(change: Callable[..., None], held: Streamed) -> None:
    hook = layer_of(held).mlp.up_proj.register_forward_hook(change)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 changes the weight .*up_proj\.weight in its forward"):
        forward(held)
    hook.remove()
    check_is_unbound(held)


def test_module_by_itself_has_the_numbers_of_one_in_a_forward(held: Streamed) -> None:
    made: Any = held.model
    embedding = made.get_input_embeddings()
    ids = torch.arange(3, 9).view(2, 3)
    inside = []
    hook = embedding.register_forward_hook(lambda *given: inside.append(given[-1].clone()))
    forward(held)
    hook.remove()
    alone = embedding(ids)
    assert torch.equal(alone, inside[0])
    check_is_unbound(held)


def bound_in_forward(streamed: Streamed) -> tuple[torch.Tensor, bool]:
    """The logits of a forward, and whether a layer had its weights from its beginning to its end."""
    inside: list[bool] = []
    layer = layer_of(streamed)
    (node,) = [node for node in streamed._engine.model.nodes if node.module is layer.mlp or node.module is layer]
    hook = layer.register_forward_hook(lambda *_: inside.append(node.stays_bound))
    logits = forward(streamed)
    hook.remove()
    return logits, inside == [True]


@pytest.mark.parametrize("takes", [False, True])
def test_interrupt_at_any_line_while_modules_are_noted_leaves_a_forward_that_binds_all(
    takes: bool, held: Streamed
) -> None:
    expected = forward(held)
    modules = held._resident._modules
    nodes = list(held._engine.model.nodes) if takes else []
    with interrupted(("engine/resident_modules",)) as lines:
        modules._take(nodes)
    assert lines.count > 5
    for at in range(0, lines.count, max(1, lines.count // 30)):
        assert bound_in_forward(held)[1]
        with pytest.raises(KeyboardInterrupt), interrupted(("engine/resident_modules",), at):
            modules._take(nodes)
        logits, is_bound = bound_in_forward(held)
        assert is_bound
        assert torch.equal(logits, expected)
        check_is_unbound(held)


def test_weights_that_are_held_again_after_an_interrupt_are_bound_and_not_those_of_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compile": False, "fused_loss": False, "compute_dtype": "fp32"}
    with streamed_on("ram", tmp_path, train_config("tied", groups=1), held=1.0, **options) as (_, streamed):
        streamed.model.eval()
        resident = streamed._resident
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch, streamed.held_weights():
            expected = [forward(streamed) for _ in range(4)][-1]
            before = [use.bytes for use in resident._uses.values()]
            patch.setattr(resident, "_drop", interrupt)
        with streamed.held_weights():
            for memory in before:
                memory.fill_(255)
            assert torch.equal(forward(streamed), expected)


def interrupt() -> None:
    raise KeyboardInterrupt
