"""A small drive for the process that imports this: a tmpfs in a mount namespace of its own, which ends with it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NO_NAMESPACES = 77
"""Exit code where this user may make none."""
NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
PRIVATE, READ_ONLY = (1 << 18) | (1 << 14), 1


def mount_small_drive(drive: str, options: str = "") -> None:
    """Mount a tmpfs, which only this process sees. Call it before the process has a second thread.

    Args:
        drive: an existing directory.
        options: those of a tmpfs, such as size=4m; or ro.
    """
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS | NEW_USERS):
        sys.exit(NO_NAMESPACES)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")

    is_read_only = options == "ro"
    given = b"" if is_read_only else options.encode()
    if libc.mount(b"none", b"/", None, PRIVATE, None) or libc.mount(
        b"none", drive.encode(), b"tmpfs", READ_ONLY * is_read_only, given
    ):
        sys.exit(NO_NAMESPACES)
