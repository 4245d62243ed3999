"""What a module round the layers owns, such as LLaVA-NeXT's `image_newline`: lent to its forward, which runs them all.

No slot stays bound for so long. So the module computes with copies, which live until the backward; their gradient is
the unit's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from megatier.engine.node import Node
from megatier.engine.stage import Stage
from megatier.models.decoder import Binding
from megatier.tier import Activations


class Lender(Node):
    """A module round the layers, with copies of its own parameters while it runs."""

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
        """Replace the module's forward on the instance; it keeps its signature, which trainers ask for."""
        super().__init__(stage, unit, module_name, module, bindings, activations=activations, compiles=False)
        forward = self._forward

        @functools.wraps(forward)
        def lending(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
            with self.lent():
                return forward(*args, **kwargs)

        module.forward = lending
