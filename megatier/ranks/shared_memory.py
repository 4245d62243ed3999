"""Memory that the ranks of a host share.

It is a file without a name (`memfd_create`), which the other ranks open by the descriptor of the first. It ends with
the last process that has it, also if all are killed, and no other user can open it.
"""

from __future__ import annotations

import mmap
import os

from megatier.ranks.channel import Channel


def share_memory(channel: Channel, num_bytes: int) -> mmap.mmap:
    """Map memory that all ranks have. They have to be of one host, and all of them have to call it.

    All of it is taken now, and counts as RAM of the first rank.

    Args:
        channel: by which the ranks find it.
        num_bytes: its size.

    Returns:
        The mapping, zeros.

    Raises:
        OSError: the system has no RAM to share, or does not let one rank open what another has.
        PeerError: a rank has failed.
    """
    made: list[int] = []

    def make() -> tuple[int, int]:
        file = os.memfd_create("megatier", os.MFD_CLOEXEC)
        made.append(file)

        # Ranks open it by its path under /proc, and users other than theirs may not.
        os.fchmod(file, 0o600)

        # Pages that are missing when they are touched end the process.
        os.posix_fallocate(file, 0, num_bytes)
        return os.getpid(), file

    try:
        process, number = channel.broadcast(make)

        # If one rank cannot open it, none goes on: the others would wait for that one.
        with channel.failing_together():
            if not made:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                made.append(file)
            return mmap.mmap(made[0], num_bytes)
    finally:
        # The mapping holds the memory without them.
        for descriptor in made:
            os.close(descriptor)
