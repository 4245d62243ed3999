"""The weights of a session by the names and in the layout of its model's folder, one after the other.

An engine that generates text takes them so. They come as for a forward: a pass visits the units in the order of layers,
and the lanes load ahead of it. So the model is whole nowhere. What is given out is a copy of each tensor: vLLM's
senders, for one, keep several until they have filled a buffer, and a slot is another unit's by then.

Threads: one at a time. A sender may take the weights in a thread of its own while the training thread waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatier.engine.stage import WeightUse
from megatier.errors import StreamedModelError
from megatier.models.visits import HubTensor, Piece, Visit, hub_visits, layer_groups
from megatier.models.weights import by_columns
from megatier.optim.masters import weight_dtype
from megatier.session.session import Session
from megatier.tier import Phase

PASS = "weights"
"""The name of the pass that visits all units."""


class HubWeights:
    """The weights of a model by the names of its folder on the hub, each time as they are then.

    Iterating gives pairs of a name and a tensor in the dtype in which the model computes, on the device, as often as
    asked; it has the methods of vLLM's `WeightSource`. Several ranks iterate together, and each gets all tensors.
    """

    def __init__(self, session: Session, settle: Callable[[], None]) -> None:
        """Find out which tensors there are. Nothing is loaded.

        Args:
            session: the session.
            settle: finishes all updates, or refuses; it is called before the weights are given out.

        Raises:
            UnsupportedModelError: no layout of the model's folder is known that loads back.
        """
        self._session = session
        self._settle = settle
        self._visits = hub_visits(session.model, session.whole_units)
        self._giving: _Giving | None = None

    def metadata(self) -> list[HubTensor]:
        """Return name, dtype and shape of each tensor, in the order in which iterating gives them."""
        return [piece.tensor for visit in self._visits for piece in visit.pieces if piece.is_last]

    def groups(self) -> list[list[str]]:
        """Return the names by layer, in the same order."""
        return layer_groups(tensor.name for tensor in self.metadata())

    def held_names(self) -> None:
        """Say, by None, that each rank gives all tensors."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give each tensor with its name. It is the caller's own.

        Raises:
            StreamedModelError: a step is open, or the model was used in another way before all tensors were taken.
            TransferError, IntegrityError: weights could not be brought.
        """
        self._settle()
        giving = self._giving = _Giving(self._session, self._visits)
        try:
            while (pair := giving.take()) is not None:
                yield pair
        finally:
            # Whoever breaks off the loop comes here too.
            giving.end()

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Give the tensors of one layer after the other, with their names. They are the caller's own."""
        pairs = iter(self)
        for names in self.groups():
            yield names, [tensor for _, (_, tensor) in zip(names, pairs, strict=False)]

    def stop(self) -> None:
        """Give no more to whoever takes weights now: something else uses the model, or it closes."""
        if self._giving is not None:
            self._giving.end()

    def drop(self) -> None:
        """Do so where an error closes the session. The pass is not ended, since other ranks may be gone."""
        if self._giving is not None:
            self._giving.is_open = False


class _Giving:
    """One time of giving all weights out."""

    def __init__(self, session: Session, visits: Sequence[Visit]) -> None:
        """Begin the pass."""
        self._player = session.player
        self._is_alone = session.ranks is None
        self._device = session.engine.options.device
        self._buffers = dict(session.model.named_buffers(remove_duplicate=False))
        self._lock = threading.Lock()
        self._visits = deque(visits)
        self._pairs = self._all_pairs()
        self._use: WeightUse | None = None
        self.is_open = True
        """Whether the pass is under way."""
        self._is_whole = False

        # Those who take weights may do so on several streams. All work of the pass is on one.
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._computing():
            self._player.begin(PASS)

    def take(self) -> tuple[str, Tensor] | None:
        """Return the next tensor with its name; None: that was all."""
        with self._lock:
            if self._is_whole:
                return None
            if not self.is_open:
                raise StreamedModelError(
                    "the streamed model was used, or closed, while its weights were given out. Take all of them first."
                )
            try:
                with self._computing():
                    pair = next(self._pairs, None)
            except BaseException:
                self.is_open = False
                self._player.cancel()
                raise
            if pair is None:
                self.is_open, self._is_whole = False, True
                return None
            self._hand_over(pair[1])
            return pair

    def end(self) -> None:
        """Give the weights that are in use back, and end the pass, if that was not done."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            with self._computing():
                if self._is_alone:
                    self._player.cancel()
                else:
                    self._pass_over()

    def _all_pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Visit all units, and yield each tensor once it is whole."""
        begun = dict[str, Tensor]()
        while self._visits:
            visit = self._visits.popleft()
            plane = self._enter(visit)
            for piece in visit.pieces:
                tensor = self._taken(piece, plane, begun)
                if piece.is_last:
                    yield piece.tensor.name, tensor.view(piece.tensor.shape)
            self._leave()
        self._end()

    def _taken(self, piece: Piece, plane: Tensor | None, begun: dict[str, Tensor]) -> Tensor:
        """Return a tensor, flat, with what a piece adds to it."""
        name = piece.tensor.name
        if name not in begun:
            num_elements = torch.Size(piece.tensor.shape).numel()
            begun[name] = torch.empty(num_elements, dtype=piece.tensor.dtype, device=self._device)
        tensor = begun[name]
        for part in piece.parts:
            own = self._buffers[part.source].flatten() if plane is None else plane
            first, stop = part.elements
            elements = own[first:stop]
            if part.num_columns:
                elements = by_columns(elements, part.num_columns)
            tensor[part.at : part.at + stop - first] = elements
        if piece.is_last:
            del begun[name]
        return tensor

    def _enter(self, visit: Visit) -> Tensor | None:
        """Return the weights of a visit's unit, flat."""
        if visit.unit is None:
            return None
        self._use = self._player.weights.enter(visit.unit.name, Phase.FORWARD, 0)
        return self._use.bytes.view(weight_dtype(visit.unit.layout.schema))

    def _leave(self) -> None:
        """Give back the weights that are in use."""
        if self._use is not None:
            self._use.leave()
            self._use = None

    def _pass_over(self) -> None:
        """Visit what is left, since other ranks need this one's shards of it."""
        self._leave()
        for visit in self._visits:
            self._enter(visit)
            self._leave()
        self._end()

    def _end(self) -> None:
        self._player.end()
        self._player.take_events()  # nobody asks what happened in it

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, compute on the stream of the pass, without gradients.

        Inference mode is left, as for an evaluation: views of homes stay cached.
        """
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(mode=False), torch.no_grad(), stream:
            yield

    def _hand_over(self, tensor: Tensor) -> None:
        """Let whoever takes a tensor use it on the stream that is current there."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)
            tensor.record_stream(current)
