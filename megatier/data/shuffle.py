"""Shuffles by a permutation that is computed for each position, from a key alone.

So the training batch of any step can be read at once, and a run that is resumed needs no position but its step.
"""

from __future__ import annotations

import hashlib

SHUFFLE_ROUNDS = 6
"""Feistel rounds; four already look random."""


def permute(position: int, count: int, key: tuple[int, ...]) -> int:
    """Return the place of a position in the key's permutation of range(count).

    It is a Feistel network over the next power of four, and numbers past count are walked on. Unlike a library's
    shuffle it takes no memory and cannot change with the library's version.
    """
    # The network permutes a range of 4^half_bits numbers, at most four times `count`. So a walk from a number past
    # `count` takes few turns, and as it follows a permutation it comes back inside.
    num_bits = (count - 1).bit_length()
    half_bits = max(1, -(-num_bits // 2))
    mask = (1 << half_bits) - 1
    while True:
        left = position >> half_bits
        right = position & mask
        for turn in range(SHUFFLE_ROUNDS):
            left, right = right, left ^ (hash_numbers((*key, turn, right)) & mask)
        position = (left << half_bits) | right
        if position < count:
            return position


def hash_numbers(numbers: tuple[int, ...]) -> int:
    """Return 64 bits that depend on each number."""
    # Python's own hash may change with its version, and the order of a run must not.
    packed = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
