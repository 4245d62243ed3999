"""A process that is killed while something new takes the place of something old.

Usage: replace.py FOLDER KIND NUMBER SWITCHES. FOLDER/target is there already, a "file" or a "folder" by KIND. The
process kills itself before the call of that number among those that reach the drive; with too high a number it ends
with 0. SWITCHES is 0 for a file system that cannot switch two names.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatier import durable

CALLS = ((durable, "sync"), (durable, "sync_tree"), (durable, "exchange_names"), (os, "rename"), (os, "unlink"))


def main(folder: Path, kind: str, last: int, switches: bool) -> None:
    count = 0

    def killed_before(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*args, **kwargs)

        return counted

    if not switches:
        durable.exchange_names = lambda first, second: False
    for module, name in CALLS:
        setattr(module, name, killed_before(getattr(module, name)))
    target, partial = folder / "target", folder / ".target.partial"
    durable.restore_replaced(target)
    with durable.committing(partial, target, "a test", replaces=True):
        if kind == "folder":
            partial.mkdir()
            for name in ("a", "b"):
                (partial / name).write_text("new")
        else:
            partial.write_text("new")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
