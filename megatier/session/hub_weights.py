"""Yields the weights of a session, under the names and in the layout of its model's folder.

An engine that generates text takes them from here, one after the other. A pass visits the units in the order of layers,
as in a forward, and the queues load ahead of it. So the model is whole nowhere. Each tensor is yielded as a copy,
because vLLM's senders keep several until they have filled a buffer, and a slot is another unit's by then.

Threads: one at a time iterates. It may be a sender's own thread while the training thread waits.
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
from megatier.models.weights import by_columns
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

    Iterating yields pairs of a name and a tensor in the dtype in which the model computes, on the device, as often as
    asked. The class has the methods of vLLM's `WeightSource`. Several ranks iterate together, and each gets all
    tensors.
    """

    def __init__(self, session: Session, settle: Callable[[], None]) -> None:
        """Find out which tensors there are. Nothing is loaded.

        Args:
            session: the session.
            settle: finishes all updates, or refuses; it is called before the weights are given out.

        Raises:
            UnsupportedModelError: no layout of the folder is known that loads back, or adapters cannot be merged.
        """
        self._session = session
        self._settle = settle
        _check_plain(session.whole_units)
        self._merger = LayerMerger(session.model) if adapter_config(session.model) is not None else None
        self._visits = self._find_visits()
        self._giving: _Giving | None = None

    def _find_visits(self) -> list[Visit]:
        """Return the visits of units in which all tensors are given out."""
        model, units, merger = self._session.model, self._session.whole_units, self._merger
        buffers = _buffers(model)
        if merger is None:
            names = {tensor.name: tensor.name for unit in units for tensor in unit.layout.tensors}
            return hub_visits(model, units, names, buffers)

        _check_can_merge(units, merger)
        return hub_visits(merger.plain, units, merger.names, buffers)

    def metadata(self) -> list[HubTensor]:
        """Return name, dtype and shape of each tensor, in the order in which iterating gives them."""
        return [piece.tensor for visit in self._visits for piece in visit.pieces if piece.is_last]

    def groups(self) -> list[list[str]]:
        """Return the names by layer, in the same order."""
        return layer_groups(tensor.name for tensor in self.metadata())

    def held_names(self) -> None:
        """Return None, by which vLLM knows that each rank gives all tensors."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give each tensor with its name. It is the caller's own.

        Raises:
            StreamedModelError: a step is open, or the model was used in another way before all tensors were taken.
            TransferError, IntegrityError: weights could not be brought.
        """
        # Updates that are due would change weights half-way.
        self._settle()
        giving = self._giving = _Giving(self._session, self._visits, self._merger)
        try:
            while (pair := giving.take()) is not None:
                yield pair
        finally:
            # A loop that is broken off comes here too.
            giving.end()

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Give the tensors of one layer after the other, with their names. They are the caller's own."""
        # One pass for all groups, as the groups are in the order of the tensors.
        pairs = iter(self)
        for names in self.groups():
            # The names come first in `zip`: it stops at their end without taking a pair of the next group.
            yield names, [tensor for _, (_, tensor) in zip(names, pairs, strict=False)]
        # The pass ends only where somebody asks for more, and is known then: the next one loads ahead.
        next(pairs, None)

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each tensor as it is now, to compare with those of the tensors that an engine has."""
        return {name: self.checksum(tensor) for name, tensor in self}

    @staticmethod
    def checksum(tensor: Tensor) -> int:
        """Return the CRC32C of a tensor's bytes, wherever it lies."""
        in_bytes = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        return _native.crc32c(address_of(in_bytes, torch.uint8, in_bytes.numel()), in_bytes.numel())

    def stop(self) -> None:
        """Give no more weights to a loop that takes them now: something else uses the model, or it closes."""
        if self._giving is not None:
            self._giving.end()

    def drop(self) -> None:
        """Do so where an error closes the session. The pass is not ended, since other ranks may be gone."""
        if self._giving is not None:
            self._giving.is_open = False


class _Pass:
    """A pass in which units come as for a forward."""

    def __init__(self, player: Player) -> None:
        """Begin nothing yet."""
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


class _FromRam(_Pass):
    """What stands for it while the memory of the gpu tier is lent: each unit comes by itself, to memory of its own."""

    def __init__(self, session: Session) -> None:
        """Take a session. Its ranks come to the same units."""
        super().__init__(session.player)
        self._in_ram = RamWeights(session)
        self._device = session.engine.options.device
        self._blocks = session.blocks

    def begin(self) -> None:
        """Do nothing: no pass is played."""

    def enter(self, unit: str) -> WeightUse:
        """Copy the weights of a unit."""
        weights = torch.empty(self._blocks.compute_bytes(unit), dtype=torch.uint8, device=self._device)
        self._in_ram.copy({unit: weights})
        return HeldUse(weights)

    def cancel(self) -> None:
        """Do nothing, as in `begin`."""

    def end(self) -> None:
        """Do nothing, as in `begin`."""


class _Giving:
    """One time of giving all weights out."""

    def __init__(self, session: Session, visits: Sequence[Visit], merger: LayerMerger | None) -> None:
        """Begin the pass."""
        self._merger = merger
        self._pass = _FromRam(session) if session.store.loan.is_lent else _Pass(session.player)
        self._is_alone = session.ranks is None
        self._device = session.engine.options.device
        self._buffers = _buffers(session.model)
        self._lock = threading.Lock()
        # A visit is taken out when its unit is entered, so what is left here is what other ranks still need of this
        # one.
        self._visits = deque(visits)
        self._pairs = self._all_pairs()
        self._use: WeightUse | None = None
        self.is_open = True
        """Whether the pass is under way."""
        self._is_whole = False

        # Those who take weights may do so on several streams. All work of the pass is on one.
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._computing():
            self._pass.begin()

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
                # An interrupt as well: a generator that has raised gives nothing more, so the pass cannot go on.
                self.is_open = False
                self._pass.cancel()
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
                # Nobody waits for the units that are left.
                if self._is_alone:
                    self._pass.cancel()
                else:
                    self._pass_over()

    def _all_pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Visit all units, and yield each tensor once it is whole."""
        # Tensors that lie in several units are whole only after the last of these.
        begun = dict[str, Tensor]()
        while self._visits:
            visit = self._visits.popleft()
            plane = self._enter(visit)
            # New for each visit: the merged matrices that it holds are dropped with it, so those of one unit are there
            # at a time.
            sources = _Sources(visit.unit, plane, self._buffers, self._merger)
            for piece in visit.pieces:
                tensor = self._taken(piece, sources, begun)
                if piece.is_last:
                    yield piece.tensor.name, tensor.view(piece.tensor.shape)
            self._leave()
        self._pass.end()

    def _taken(self, piece: HubPiece, sources: _Sources, begun: dict[str, Tensor]) -> Tensor:
        """Return a tensor, flat, with what a piece adds to it."""
        name = piece.tensor.name
        if name not in begun:
            num_elements = torch.Size(piece.tensor.shape).numel()
            begun[name] = torch.empty(num_elements, dtype=piece.tensor.dtype, device=self._device)
        tensor = begun[name]
        for part in piece.parts:
            elements = sources.elements(part)
            if part.num_columns:
                elements = by_columns(elements, part.num_columns)
            # Copied even where the tensor is one part, since the slot is another unit's before the caller is done with
            # it.
            tensor[part.at : part.at + elements.numel()] = elements
        if piece.is_last:
            # The caller alone holds it from now on, and so decides when its memory is free.
            del begun[name]
        return tensor

    def _enter(self, visit: Visit) -> Tensor | None:
        """Return the weights of a visit's unit, flat."""
        if visit.unit is None:
            return None
        self._use = self._pass.enter(visit.unit.name)
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
        self._pass.end()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute on the stream of the pass for a while, without gradients.

        Inference mode is left, as for an evaluation: views of homes stay cached.
        """
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(mode=False), torch.no_grad(), stream:
            yield

    def _hand_over(self, tensor: Tensor) -> None:
        """Let the caller use a tensor on its current stream."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            # The other stream waits for the work that makes the tensor. The allocator waits for the other stream before
            # it uses the memory again.
            current.wait_stream(self._stream)
            tensor.record_stream(current)


class _Sources:
    """The sources of a folder's tensors while a unit is visited."""

    def __init__(
        self, unit: Unit | None, plane: Tensor | None, buffers: Mapping[str, Tensor], merger: LayerMerger | None
    ) -> None:
        """Take the weights of a unit, or buffers.

        Args:
            unit: the unit; None: buffers are visited.
            plane: its weights, flat.
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

        # Merged once, though the experts of a layer have a tensor each.
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
                raise _not_merged(tensor.name, "it is quantised")


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
                raise _not_merged(name, "a part of its adapter is in another unit")


def _not_merged(name: str, why: str) -> UnsupportedModelError:
    """Make the error of a parameter with which no adapter can be merged."""
    return UnsupportedModelError(
        f"{name} cannot be merged with its adapter while it streams: {why}. Give the engine the adapter alone, as "
        "Streamed.export writes it."
    )
