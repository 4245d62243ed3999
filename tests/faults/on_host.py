"""One rank of `megatier` on a host of its own: a network namespace with a name of a host.

Usage: on_host.py NAMESPACE HOST LOOKS WORDS, with the environment that torchrun gives. LOOKS is after how many looks a
rank is silent. If KILLED_IN names a place of `killed_rank.py`, the rank dies there.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megatier.cli import main
from megatier.ranks import peer_monitor

NEW_NETWORK = 0x40000000
NEW_NAMES = 0x04000000


def move_to(namespace: str, host: str) -> None:
    """Move this process, which has one thread still, to a host."""
    system = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(Path("/var/run/netns") / namespace, os.O_RDONLY | os.O_CLOEXEC)
    if system.setns(descriptor, NEW_NETWORK) or system.unshare(NEW_NAMES):
        raise OSError(ctypes.get_errno(), "cannot enter the namespaces of a host")
    os.close(descriptor)
    socket.sethostname(host)


def tell_apart(host: str) -> None:
    """Have this process be of another machine than those of other hosts, whose ends the system would tell."""
    here = peer_monitor.Member.here()
    peer_monitor.Member.here = lambda: replace(here, host=host, machine=f"{here.machine} {host}")  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    move_to(*sys.argv[1:3])
    tell_apart(sys.argv[2])
    peer_monitor.SILENT_LOOKS = int(sys.argv[3])
    if place := os.environ.get("KILLED_IN"):
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("killed_rank").inject(place)
    sys.exit(main(sys.argv[4:]))
