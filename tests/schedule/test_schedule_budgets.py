"""Budgets of a rank: its part of a host, without what the ranks of a host share."""

from __future__ import annotations

import random

import pytest

from megatier.schedule.budgets import Budgets, host_ram, shared_buffer_bytes
from megatier.schedule.policy import Policy
from megatier.schedule.world import World
from megatier.tier import SHARED_STAGES

MIB = 1 << 20


@pytest.mark.parametrize(
    ("part", "buffer"),
    [(1 * MIB, MIB // 4), (64 * MIB, MIB // 4), (200 * MIB, MIB // 2), (256 * MIB, MIB), (1 << 40, 16 * MIB)],
)
def test_buffer_of_shared_ram_is_a_small_part_within_bounds(part: int, buffer: int) -> None:
    assert shared_buffer_bytes(part) == buffer


def test_budgets_of_ranks_leave_out_what_ranks_of_one_host_share() -> None:
    host = Budgets(7, 512 * MIB, 100)
    assert host.of_rank(World()) == host
    assert host.of_rank(World(2)) == Budgets(7, 256 * MIB - SHARED_STAGES * MIB, 50, SHARED_STAGES * MIB)
    assert host.of_rank(World(4, 2)) == Budgets(7, 256 * MIB, 50)
    assert Budgets(7, 512, 0).of_rank(World(2)) == Budgets(7, 0, 0, 256)


def test_ram_that_a_refusal_names_is_enough_and_hardly_more() -> None:
    chance = random.Random(3)
    for ranks in (2, 8):
        policy = Policy(num_ranks=ranks, num_host_ranks=ranks)
        for _ in range(300):
            needed = int(2 ** chance.uniform(12, 40))
            named = host_ram(needed, policy)
            assert Budgets(0, named, 0).of_rank(World(ranks)).ram >= needed
            assert Budgets(0, named - 4096 * ranks, 0).of_rank(World(ranks)).ram < needed + SHARED_STAGES * 16 * MIB
    assert host_ram(5, Policy()) == 5
    assert host_ram(5, Policy(num_ranks=4, num_host_ranks=2)) == 10
