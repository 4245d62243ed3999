"""Forks fresh processes, each of which calls a function of torch in parallel twice; counts those whose calls differ.

python first_calls.py FUNCTION COUNT cold|warm

`cold` shows the fault of the vector maths library that `compute.vector_math` is there for: 0.4 to 1.7 % of the
processes differ, on two busy cores with torch 2.13. The parent itself computes nothing, since threads do not survive a
fork.
"""

from __future__ import annotations

import os
import sys

import torch

from megatier.compute.vector_math import warm_up

ELEMENTS = 4096
"""Enough for two threads."""


def differs(name: str, *, is_warm: bool) -> bool:
    """Whether the first call gives other bits than the second."""
    function = getattr(torch, name)
    values = torch.linspace(0.01, 0.99, ELEMENTS)
    if is_warm:
        warm_up()
    return not torch.equal(function(values), function(values))


def in_child(name: str, *, is_warm: bool) -> bool:
    """The same in a process of its own."""
    child = os.fork()
    if child == 0:
        os._exit(int(differs(name, is_warm=is_warm)))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise ChildProcessError(f"a child ended with {code}")
    return bool(code)


if __name__ == "__main__":
    function, count, state = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    print(sum(in_child(function, is_warm=state == "warm") for _ in range(count)))  # noqa: T201
