"""Yields the weights of a session under the names and in the layout of its model's folder on the hub.

An engine that generates text, such as vLLM, takes them from here. A pass visits the units in the order of layers, as in
a forward, and the queues load ahead of it, so the whole model is never in memory. Each tensor is yielded as a copy,
because vLLM's senders keep several until a buffer is full, and by then the slot belongs to another unit.

One thread iterates at a time. It may be a sender's thread while the training thread waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier import _native
from megatier.adapters.first_weights import base_name
from megatier.adapters.lora import adapter_config
from megatier.adapters.merge import LayerMerger
from megatier.address import address_of
from megatier.engine.stage import WeightUse
from megatier.errors import StreamedModelError, UnsupportedModelError
from megatier.models.decoder import Unit
from megatier.models.visits import HubElements, HubPiece, HubTensor, Visit, hub_visits, layer_groups
from megatier.models.weights import column_major
from megatier.optim.masters import weight_dtype
from megatier.play.player import Player
from megatier.session.held import HeldUse
from megatier.session.ram_weights import RamWeights
from megatier.session.session import Session
from megatier.tier import Phase

HUB_PASS = "weights"
"""The name of the pass that visits all units."""


class HubWeights:
    """An iterable over a model's current weights, by the names of its folder on the hub.

    Each iteration yields pairs of a name and a tensor, which lies on the device in the compute dtype. The class has the
    methods of vLLM's `WeightSource`. Several ranks have to iterate together, and each gets all tensors.
    """

    def __init__(self, session: Session, settle: Callable[[], None]) -> None:
        """List the tensors. Nothing is loaded yet.

        Args:
            session: the session.
            settle: finishes all updates or raises an error. It is called before weights are yielded.

        Raises:
            UnsupportedModelError: no known layout of the folder can be loaded back, or adapters cannot be merged.
        """
        self._session = session
        self._settle = settle
        _check_plain(session.whole_units)
        self._merger = LayerMerger(session.model) if adapter_config(session.model) is not None else None
        self._visits = self._find_visits()
        self._iteration: _Iteration | None = None

    def _find_visits(self) -> list[Visit]:
        """Return the visits of units that yield all tensors."""
        model, units, merger = self._session.model, self._session.whole_units, self._merger
        buffers = _buffers(model)
        if merger is None:
            names = {tensor.name: tensor.name for unit in units for tensor in unit.layout.tensors}
            return hub_visits(model, units, names, buffers)

        _check_can_merge(units, merger)
        return hub_visits(merger.plain, units, merger.names, buffers)

    def metadata(self) -> list[HubTensor]:
        """Return name, dtype and shape of each tensor, in the order of iteration."""
        return [piece.tensor for visit in self._visits for piece in visit.pieces if piece.is_last]

    def groups(self) -> list[list[str]]:
        """Return the names grouped by layer, in the order of iteration."""
        return layer_groups(tensor.name for tensor in self.metadata())

    def held_names(self) -> None:
        """Return None, which tells vLLM that each rank yields all tensors."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name. The tensor belongs to the caller.

        Raises:
            StreamedModelError: a step is open, or the model was used in another way before all tensors were taken.
            TransferError, IntegrityError: weights could not be loaded.
        """
        # Pending updates would change weights during the iteration.
        self._settle()
        iteration = self._iteration = _Iteration(self._session, self._visits, self._merger)
        try:
            while (pair := iteration.take()) is not None:
                yield pair
        finally:
            # This also runs if the caller breaks off the loop.
            iteration.end()

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield the names and the tensors of one layer after the other. The tensors belong to the caller."""
        # The groups are in the order of the tensors, so one pass serves all of them.
        pairs = iter(self)
        for names in self.groups():
            # The names come first, so that `zip` stops at their end without taking a pair of the next group.
            yield names, [tensor for _, (_, tensor) in zip(names, pairs, strict=False)]
        # The pass ends when the next tensor is asked for. Its order is recorded then, so the next pass loads ahead.
        next(pairs, None)

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each tensor, to compare with the tensors of an engine."""
        return {name: self.checksum(tensor) for name, tensor in self}

    @staticmethod
    def checksum(tensor: Tensor) -> int:
        """Return the CRC32C of a tensor's bytes, wherever it lies."""
        in_bytes = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        return _native.crc32c(address_of(in_bytes, torch.uint8, in_bytes.numel()), in_bytes.numel())

    def stop(self) -> None:
        """End an iteration that is under way, because something else uses the model or the session closes."""
        if self._iteration is not None:
            self._iteration.end()

    def drop(self) -> None:
        """End an iteration after an error. The pass is not ended, because other ranks may be gone."""
        if self._iteration is not None:
            self._iteration.is_open = False


class _PlayedPass:
    """A pass of the player, which brings units as for a forward."""

    def __init__(self, player: Player) -> None:
        """Take the player. The pass has not begun yet."""
        self._player = player

    def begin(self) -> None:
        """Begin the pass."""
        self._player.begin(HUB_PASS)

    def enter(self, unit: str) -> WeightUse:
        """Return the weights of a unit."""
        return self._player.weights.enter(unit, Phase.FORWARD, 0)

    def cancel(self) -> None:
        """Leave the pass half-way."""
        self._player.cancel()

    def end(self) -> None:
        """End the pass."""
        self._player.end()
        self._player.take_events()  # nobody asks what happened in it


class _RamPass(_PlayedPass):
    """Replaces a pass while the memory of the GPU tier is lent: each unit is copied to memory of its own."""

    def __init__(self, session: Session) -> None:
        """Take a session. All of its ranks have to enter the same units."""
        super().__init__(session.player)
        self._in_ram = RamWeights(session)
        self._device = session.engine.options.device
        self._blocks = session.blocks

    def begin(self) -> None:
        """Do nothing, because no pass is played."""

    def enter(self, unit: str) -> WeightUse:
        """Copy the weights of a unit."""
        weights = torch.empty(self._blocks.compute_bytes(unit), dtype=torch.uint8, device=self._device)
        self._in_ram.copy({unit: weights})
        return HeldUse(weights)

    def cancel(self) -> None:
        """Do nothing, as in `begin`."""

    def end(self) -> None:
        """Do nothing, as in `begin`."""


class _Iteration:
    """One iteration over all weights."""

    def __init__(self, session: Session, visits: Sequence[Visit], merger: LayerMerger | None) -> None:
        """Begin the pass."""
        self._merger = merger
        self._pass = _RamPass(session) if session.store.loan.is_lent else _PlayedPass(session.player)
        self._is_alone = session.ranks is None
        self._device = session.engine.options.device
        self._buffers = _buffers(session.model)
        self._lock = threading.Lock()
        # A visit is removed when its unit is entered. Other ranks still need this rank for the visits that are left.
        self._visits = deque(visits)
        self._pairs = self._all_pairs()
        self._use: WeightUse | None = None
        self.is_open = True
        """Whether the pass is under way."""
        self._is_whole = False

        # All work of the pass is on one stream, though the caller may use several.
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._computing():
            self._pass.begin()

    def take(self) -> tuple[str, Tensor] | None:
        """Return the next name and tensor; None: there are no more."""
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
                # An interrupt counts too. A generator that has raised cannot go on, and nor can the pass.
                self.is_open = False
                self._pass.cancel()
                raise
            if pair is None:
                self.is_open, self._is_whole = False, True
                return None
            self._hand_over(pair[1])
            return pair

    def end(self) -> None:
        """Release the weights in use and end the pass, unless it has ended."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            with self._computing():
                # Without other ranks nobody waits for the units that are left.
                if self._is_alone:
                    self._pass.cancel()
                else:
                    self._pass_over()

    def _all_pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Visit all units, and yield each tensor once it is whole."""
        # A tensor that lies in several units is whole only after the last of them.
        begun = dict[str, Tensor]()
        while self._visits:
            visit = self._visits.popleft()
            plane = self._enter(visit)
            # Each visit has its own sources, so that only the merged matrices of one unit are in memory.
            sources = _Sources(visit.unit, plane, self._buffers, self._merger)
            for piece in visit.pieces:
                tensor = self._taken(piece, sources, begun)
                if piece.is_last:
                    yield piece.tensor.name, tensor.view(piece.tensor.shape)
            self._leave()
        self._pass.end()

    def _taken(self, piece: HubPiece, sources: _Sources, begun: dict[str, Tensor]) -> Tensor:
        """Return a tensor, flat, after adding a piece to it."""
        name = piece.tensor.name
        if name not in begun:
            num_elements = torch.Size(piece.tensor.shape).numel()
            begun[name] = torch.empty(num_elements, dtype=piece.tensor.dtype, device=self._device)
        tensor = begun[name]
        for part in piece.parts:
            elements = sources.elements(part)
            if part.num_columns:
                elements = column_major(elements, part.num_columns)
            # Even a tensor of one part is copied, because the slot is reused before the caller is done with it.
            tensor[part.at : part.at + elements.numel()] = elements
        if piece.is_last:
            # From now on the caller has the only reference.
            del begun[name]
        return tensor

    def _enter(self, visit: Visit) -> Tensor | None:
        """Return the weights of a visit's unit, flat."""
        if visit.unit is None:
            return None
        self._use = self._pass.enter(visit.unit.name)
        return self._use.bytes.view(weight_dtype(visit.unit.layout.schema))

    def _leave(self) -> None:
        """Release the weights in use."""
        if self._use is not None:
            self._use.leave()
            self._use = None

    def _pass_over(self) -> None:
        """Visit the remaining units, because other ranks need this rank's shards of them."""
        self._leave()
        for visit in self._visits:
            self._enter(visit)
            self._leave()
        self._pass.end()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute on the stream of the pass, without gradients.

        Inference mode is off, as in an evaluation, because views of homes stay cached.
        """
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(mode=False), torch.no_grad(), stream:
            yield

    def _hand_over(self, tensor: Tensor) -> None:
        """Make a tensor ready for the caller's current stream."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            # The caller's stream waits until the tensor is computed. The allocator waits for the caller's stream before
            # it reuses the memory.
            current.wait_stream(self._stream)
            tensor.record_stream(current)


class _Sources:
    """Reads parts of a folder's tensors while a unit is visited."""

    def __init__(
        self, unit: Unit | None, plane: Tensor | None, buffers: Mapping[str, Tensor], merger: LayerMerger | None
    ) -> None:
        """Take the weights of a unit, or buffers.

        Args:
            unit: the unit; None: this visit yields buffers.
            plane: the weights of the unit, flat.
            buffers: the buffers by name.
            merger: merges adapters, if the model has some.
        """
        self._plane = plane
        self._buffers = buffers
        self._merger = merger
        self._slices = {tensor.name: tensor for tensor in unit.layout.tensors} if unit is not None else {}
        self._merged: dict[str, Tensor] = {}

    def elements(self, part: HubElements) -> Tensor:
        """Return the elements of a part, flat."""
        first, stop = part.elements
        if self._plane is None:
            return self._buffers[part.source].flatten()[first:stop]
        if self._merger is None or not self._merger.parts(part.source):
            return self._plane[first:stop]

        own_name = self._merger.own_names[part.source]
        base = self._slices[own_name]

        # Each parameter is merged once, although every expert of a layer has a tensor of its own.
        if part.source not in self._merged:
            merged = self._merger.merged(part.source, self._in_fp32(base.name), self._in_fp32)
            self._merged[part.source] = merged.to(self._plane.dtype)
        whole = self._merged[part.source]
        return whole[first - base.start : stop - base.start]

    def _in_fp32(self, name: str) -> Tensor:
        """Return a copy of a parameter of the unit, flat, which PEFT may merge into in place."""
        assert self._plane is not None
        tensor = self._slices[name]
        return self._plane[tensor.start : tensor.stop].to(torch.float32, copy=True)


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a model's folder has, by their names there."""
    # `keep_vars` leaves parameters what they are, by which buffers are told from them. Buffers that are not persistent
    # are in no state dict, and in no folder.
    state = model.state_dict(keep_vars=True)
    return {base_name(name): tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}


def _check_plain(units: Sequence[Unit]) -> None:
    """Refuse a quantised base: no engine takes its codes as weights.

    Raises:
        UnsupportedModelError: names the first parameter.
    """
    for unit in units:
        for tensor in unit.layout.tensors:
            # Codes travel as elements that stand for several parameters, and scales as elements that stand for none.
            if tensor.stands_for != 1:
                raise _make_merge_error(tensor.name, "it is quantised")


def _check_can_merge(units: Sequence[Unit], merger: LayerMerger) -> None:
    """Refuse adapters whose parts are in other units than what they adapt: units are visited one by one.

    Raises:
        UnsupportedModelError: names the first parameter.
    """
    unit_of = {}
    for unit in units:
        for tensor in unit.layout.tensors:
            unit_of[tensor.name] = unit.name

    for name, plain in merger.names.items():
        for part in merger.parts(plain):
            if unit_of[part] != unit_of[name]:
                raise _make_merge_error(name, "a part of its adapter is in another unit")


def _make_merge_error(name: str, why: str) -> UnsupportedModelError:
    """Make the error of a parameter with which no adapter can be merged."""
    return UnsupportedModelError(
        f"{name} cannot be merged with its adapter while it streams: {why}. Give the engine the adapter alone, as "
        "Streamed.export writes it."
    )
