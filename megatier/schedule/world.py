"""The ranks and hosts of a run, as figures. Plans, budgets and rates take them from here. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """The world size of a run, and the number of hosts, which have equally many ranks each.

    Raises:
        ConfigError: a number is less than 1, or the hosts cannot have equally many ranks.
    """

    num_ranks: int = 1
    num_hosts: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        # Each rank gets an equal share of its host, so hosts need equally many ranks.
        are_positive = self.num_ranks >= 1 and self.num_hosts >= 1
        if not are_positive or self.num_ranks % self.num_hosts:
            raise ConfigError(
                f"{self.num_ranks} ranks on {self.num_hosts} hosts: give a number of ranks that so many hosts share "
                "equally."
            )

    @property
    def num_host_ranks(self) -> int:
        """Ranks of one host, which share its RAM, its processors and its drives."""
        return self.num_ranks // self.num_hosts


ONE_PROCESS = World()
"""A process that trains alone, and has all of the state."""
