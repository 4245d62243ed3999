"""RAM that the ranks of a host share: a file without a name (`memfd_create`), which all of them map.

The other ranks open it by the descriptor of rank 0. The system frees it with the last process that has it, even if all
are killed, and no other user can open it.
"""

from __future__ import annotations

import mmap
import os

from megatier.ranks.channel import Channel


def share_memory(channel: Channel, num_bytes: int) -> mmap.mmap:
    """Map RAM that all ranks share. They have to be on one host, and all of them have to call this.

    All of it is allocated now, and counts as RAM of rank 0.

    Args:
        channel: a channel to the other ranks.
        num_bytes: the size of the memory.

    Returns:
        The mapping, zeros.

    Raises:
        OSError: there is no RAM to share, or a rank cannot open the file of rank 0.
        PeerError: a rank has failed.
    """
    descriptors: list[int] = []

    def make() -> tuple[int, int]:
        file = os.memfd_create("megatier", os.MFD_CLOEXEC)
        descriptors.append(file)

        # Ranks open it by its path under /proc. Other users may not.
        os.fchmod(file, 0o600)

        # Touching a page that the system cannot provide would end the process later.
        os.posix_fallocate(file, 0, num_bytes)
        return os.getpid(), file

    try:
        process, number = channel.broadcast(make)

        # If one rank cannot open it, all have to stop, because the others would wait for that one.
        with channel.failing_together():
            if not descriptors:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                descriptors.append(file)
            return mmap.mmap(descriptors[0], num_bytes)
    finally:
        # The mapping keeps the memory without the descriptor.
        for descriptor in descriptors:
            os.close(descriptor)
