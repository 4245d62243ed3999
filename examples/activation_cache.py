"""A cache of more activations than RAM holds, kept by megatier's store.

    python examples/activation_cache.py /var/tmp

64 MiB of activations pass through 16 MiB of RAM; the directory has room for the rest. Nothing stays there.
"""

import argparse
import math

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("directory", help="a directory on a drive")
if __name__ == "__main__":
    GIVEN = PARSER.parse_args()  # before the imports that take long

import torch

from megatier import BlockSpec, Tier, TieredStore


class ActivationCache:
    """bf16 tensors of one shape by key. Those for which RAM has no slot lie on NVMe."""

    def __init__(self, shape: tuple[int, ...], num_entries: int, *, ram: str, nvme: list[str]) -> None:
        self._shape = shape
        self._places: dict[object, str] = {}
        self.store = TieredStore.open(ram=ram, nvme=nvme)

        for number in range(num_entries):
            self.store.register(BlockSpec(f"entry{number}", 2 * math.prod(shape), home=Tier.NVME))

    def put(self, key: object, activation: torch.Tensor) -> None:
        """Keep a copy of the activation."""
        place = self._places.setdefault(key, f"entry{len(self._places)}")

        # All bytes are overwritten, so nothing is read.
        with self.store.lease(place, Tier.RAM, fresh=True, wait=True) as block:
            block.bytes.view(torch.bfloat16).view(self._shape).copy_(activation)
            self.store.mark_dirty(place, Tier.RAM)

        # This runs behind. Once it is over, the slot may serve another entry.
        self.store.write_back(place, Tier.RAM)

    def get(self, key: object) -> torch.Tensor:
        """Return a copy of what was put there."""
        with self.store.lease(self._places[key], Tier.RAM, wait=True) as block:
            return block.bytes.view(torch.bfloat16).view(self._shape).clone()


def main(directory: str) -> tuple[int, int]:
    """Return how many bytes were read when all entries were, and when the last one was read again."""
    cache = ActivationCache((1024, 512), num_entries=64, ram="16MiB", nvme=[f"{directory}:64MiB"])
    activations = {("layer", number): torch.randn(1024, 512).bfloat16() for number in range(64)}

    with cache.store:
        for key, activation in activations.items():
            cache.put(key, activation)

        for key, activation in activations.items():
            assert torch.equal(cache.get(key), activation)
        all_read = cache.store.moved_bytes["nvme_to_ram"]

        # What was used last is still in RAM.
        cache.get(("layer", 63))
        return all_read, cache.store.moved_bytes["nvme_to_ram"] - all_read


if __name__ == "__main__":
    main(GIVEN.directory)
