"""A module with one node, whose weights lie on a shelf instead of in a store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatier.engine.gradient import Gradients
from megatier.engine.node import Node
from megatier.engine.stage import Stage, learning
from megatier.layout import Layout
from megatier.state import ADAMW_FP32
from megatier.tier import Activations, Leg, Phase

SIZE = 4
LAYOUT = replace(Layout.of([("gain", (SIZE, SIZE)), ("idle", (3,)), ("shift", (SIZE,))]), schema=ADAMW_FP32)


@dataclass
class Shelf:
    """Weights of one unit, at another address for every use, poisoned when given back; and its gradients."""

    weights: Tensor
    slots: list[Tensor] = field(default_factory=list)
    shipped: list[Tensor] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    stashed: dict[str, Tensor] = field(default_factory=dict)

    def enter(self, unit: str, phase: Phase, group: int) -> Use:
        self.phases.append(phase)
        self.slots.append(self.weights.clone().view(torch.uint8))
        return Use(self.slots[-1])

    def begin_leg(self, leg: Leg) -> None:
        self.legs.append(leg)

    def stash(self, unit: str, tensor: Tensor) -> None:
        self.stashed[unit] = tensor.clone()

    def stash_beside(self, unit: str, tensor: Tensor) -> bool:
        return False

    def fetch(self, unit: str) -> list[Tensor]:
        return [self.stashed.pop(unit)]

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        self.shipped.append(torch.full((LAYOUT.num_elements,), float("nan")))
        return self.shipped[-1].view(torch.uint8)

    def submit_grad(self, unit: str, *, group: int) -> None:
        pass

    def sums_in_buffer(self, unit: str) -> bool:
        return False

    def measure(self, unit: str, grad: Tensor) -> None:
        pass

    def gradients(self) -> dict[str, Tensor]:
        """What the last backward shipped."""
        return {t.name: self.shipped[-1][t.start : t.stop].view(t.shape) for t in LAYOUT.tensors}


class Use:
    def __init__(self, slot: Tensor) -> None:
        self.bytes = slot

    def leave(self) -> None:
        self.bytes.fill_(0xFF)


class Probe(nn.Module):
    """tanh(x gain + shift), and a record of how it was called. The parameter `idle` is not used."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(SIZE, SIZE, device=device))
        self.idle = nn.Parameter(torch.empty(3, device=device))
        self.shift = nn.Parameter(torch.empty(SIZE, device=device))
        self.calls: list[dict[str, Any]] = []
        self.returns_tuple = False

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        self.calls.append({"rows": len(x), **kwargs})
        result = torch.tanh(torch.dropout(x, 0.25, self.training) @ self.gain + self.shift)
        if mask is not None:
            result = result * mask
        return (result, None, torch.arange(len(x))) if self.returns_tuple else result


def streamed(
    activations: str = "keep", slices: int = 1, kind: type[Probe] = Probe
) -> tuple[Probe, Node, Shelf, dict[str, Tensor]]:
    """A probe on meta behind a node, and its weights by name."""
    torch.manual_seed(0)
    weights = torch.randn(LAYOUT.num_elements)
    shelf = Shelf(weights)
    device = torch.device("cpu")
    gradients = Gradients({"unit": LAYOUT}, shelf, shelf, groups=1)
    gradients.begin_group(0)
    anchor = torch.zeros((), requires_grad=True)
    dtypes = {"unit": torch.float32}
    stage = Stage(source=shelf, gradients=gradients, dtypes=dtypes, device=device, slices=slices, anchor=anchor)
    probe = kind("meta")
    bindings = [(probe._parameters, tensor.name, tensor) for tensor in LAYOUT.tensors]
    node = Node(stage, "unit", "probe", probe, bindings, activations=Activations(activations))  # type: ignore[arg-type]
    return probe, node, shelf, {t.name: weights[t.start : t.stop].view(t.shape) for t in LAYOUT.tensors}


def streamed_gradients(probe: Probe, shelf: Shelf, x: Tensor, seed: int = 1, **kwargs: Any) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    output = probe(x, **kwargs)
    torch.manual_seed(99)  # a recompute must not depend on the random state of the backward
    (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    assert x.grad is not None
    return {**shelf.gradients(), "x": x.grad}


def learn(probe: Probe, node: Node, *calls: tuple[Tensor, Tensor | None]) -> None:
    with torch.no_grad(), learning(node.stage):
        for x, mask in calls:
            probe(x, mask)
    probe.calls.clear()
