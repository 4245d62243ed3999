"""The probe of collectives: how fast ranks all-gather and all-to-all, and how much that slows compute.

`megatier bench` runs it under torchrun, on all ranks at the same time, with the queue and the collectives of a run. The
ranks agree on the number of collectives. If GPUs cannot read each other's memory, there are two transports, and both
are measured. Runs then use the one that costs compute less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatier.hardware import ram_available_bytes
from megatier.measure.link_probe import MATMUL_SIZE
from megatier.measure.link_traffic import alone, repeats_per_s, square_product
from megatier.ranks.ranks import Ranks
from megatier.schedule.budgets import shared_buffer_bytes
from megatier.schedule.rates import Rates
from megatier.store.queue import Queue
from megatier.store.stream_clock import StreamClock
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, Transport

LAYER_BYTES = {"cuda": 436_000_000, "cpu": 32_000_000}
"""Bytes that a gather or scatter is about. On a GPU they are those of a layer of an 8B model in bf16."""
WARM_UPS = 2
"""Collectives before the first that counts, because the first one makes connections."""
SLOWDOWN_MIN = 0.01
"""The least that collectives are taken to cost compute: it is below what can be measured, and not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """The speed of collectives, and of compute during them, while all ranks measure at the same time."""

    ranks: int
    """The number of ranks."""
    hosts: int
    """The number of hosts that they run on."""
    layer_bytes: int
    """Bytes of a whole layer, of which each rank has an equal part."""
    gather_seconds: float
    """Seconds of gathering a layer."""
    scatter_seconds: float
    """Seconds of scattering as many bytes."""
    compute_share: float
    """Products that a rank does during collectives, as a share of those that it does alone."""
    collective_share: float
    """Collectives during products, as a share of those that go on alone."""
    way: Transport
    """What moved the bytes."""
    why: str = ""
    """Why nothing better did."""

    @property
    def slowdown(self) -> float:
        """Seconds that compute loses for each second that collectives at the same time would take alone; at most 1."""
        return min(1.0, max(SLOWDOWN_MIN, (1 - self.compute_share) / self.collective_share))

    @property
    def lost_seconds(self) -> float:
        """Seconds that compute loses for each layer. While collectives take less than it, they cost nothing else."""
        return self.slowdown * (self.gather_seconds + self.scatter_seconds)

    def added_to(self, rates: Rates) -> Rates:
        """Return the rates of a host with those of the links.

        Ranks of one host say what its own links do. Those of several hosts say what the network does, which is what a
        scatter waits for there.
        """
        # A rank has one part itself, so it receives those of the others alone.
        part = self.layer_bytes / self.ranks
        if self.hosts > 1:
            far = (self.ranks - self.ranks // self.hosts) * part
            return replace(rates, network_bytes_per_s=far / self.scatter_seconds, ranks_slowdown=self.slowdown)
        others = (self.ranks - 1) * part
        return replace(
            rates,
            gather_bytes_per_s=others / self.gather_seconds,
            scatter_bytes_per_s=others / self.scatter_seconds,
            ranks_slowdown=self.slowdown,
            ranks_way=self.way,
        )


def probe_ranks(ranks: Ranks, device: str, *, seconds: float) -> RankFigures:
    """Measure gathers, scatters, and both during products, by the way that runs will take. Every rank calls it.

    Args:
        ranks: the ranks that measure.
        device: "cuda" or "cpu".
        seconds: the time of each measurement.
    """
    figures = _probe_transport(ranks, device, seconds)
    if figures.way is not Transport.RAM or device == "cpu":
        return figures

    # Kernels take multiprocessors from compute, so that even the faster transport may cost a step more.
    by_kernels = _probe_transport(ranks, device, seconds, Transport.KERNELS)
    return min(figures, by_kernels, key=lambda way: way.lost_seconds)


def _probe_transport(ranks: Ranks, device: str, seconds: float, prefers: Transport | None = None) -> RankFigures:
    """Measure one transport: the best of this machine, or one that is preferred to shared RAM."""
    # In whole pages, as shards have in slots.
    own_bytes = max(1, LAYER_BYTES[device] // ranks.size // PAGE_BYTES) * PAGE_BYTES

    # Tensors of collectives have to be in memory that other ranks can read by copy engines.
    num_bytes = (1 + ranks.size) * own_bytes
    buffer = shared_buffer_bytes(ram_available_bytes() // ranks.local_size)
    if device == "cuda":
        memory = ranks.allocate_gpu_tier(num_bytes, buffer, prefers=prefers)
    else:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        ranks.share_ram(buffer)
    shard, whole = memory[:own_bytes], memory[own_bytes:]
    received = torch.empty_like(whole)
    gather = partial(ranks.all_gather, whole, shard)
    scatter = partial(ranks.all_to_all, received, whole)

    clock = StreamClock() if device == "cuda" else None
    with closing(Queue("ranks", clock)) as queue:
        gather_s = _seconds_each(ranks, queue, gather, seconds)
        scatter_s = _seconds_each(ranks, queue, scatter, seconds)
        product = square_product(torch.device(device), MATMUL_SIZE[device])
        alone_per_s = alone(partial(repeats_per_s, product, device), seconds)

        # All ranks begin together, because a collective waits for the last of them.
        count = max(1, round(seconds / (gather_s + scatter_s)))
        ranks.all_gather_object(None)
        moves = _submit(queue, [gather, scatter] * count)

        # Until the last collective has ended, so that a collective runs beside each product.
        beside_per_s = repeats_per_s(product, device, moves[-1].done)
        beside_s = _span_s(moves)

    ranks.drop_memory()
    shares = [beside_per_s / alone_per_s, count * (gather_s + scatter_s) / beside_s]

    # A step waits for its slowest rank, so the smallest share counts.
    compute, collective = (min(of_ranks) for of_ranks in zip(*ranks.all_gather_object(shares), strict=True))
    return RankFigures(
        ranks=ranks.size,
        hosts=ranks.size // ranks.local_size,
        layer_bytes=ranks.size * own_bytes,
        gather_seconds=gather_s,
        scatter_seconds=scatter_s,
        compute_share=compute,
        collective_share=collective,
        way=ranks.transport,
        why=ranks.transport_reason,
    )


def _seconds_each(ranks: Ranks, queue: Queue, work: Callable[[], None], seconds: float) -> float:
    """Return the seconds of one collective of many in a row, on the rank that takes longest."""

    def longest_s(count: int) -> float:
        moves = _submit(queue, [work] * count)
        return max(ranks.all_gather_object(_span_s(moves)))

    warm_ups = _submit(queue, [work] * WARM_UPS)
    _span_s(warm_ups)

    # All ranks compute the same count from this time. With different counts one would wait for ever.
    one_s = longest_s(1) or seconds
    count = max(1, round(seconds / one_s))
    return longest_s(count) / count


def _submit(queue: Queue, works: Sequence[Callable[[], None]]) -> list[Transfer]:
    return [queue.submit("layer", 0, work) for work in works]


def _span_s(moves: Sequence[Transfer]) -> float:
    """Wait for moves, and return the seconds from the start of the first to the end of the last."""
    for move in moves:
        move.wait()
    start_ns, _ = moves[0].span_ns()
    _, end_ns = moves[-1].span_ns()
    return (end_ns - start_ns) / 1e9
