"""Warms the vector maths library under torch, whose first parallel call in a process may compute wrong numbers.

On a CPU torch sends functions such as `cos` and `exp` to Intel's VML, in pieces, from several threads. The library sets
itself up at its first call. When two threads make that call together, one of them may compute its piece with less
accuracy: 1e-4 off. This was seen in 4 to 17 of 1,000 fresh processes with torch 2.13 on two busy cores, for `cos`,
`sin`, `exp`, `log`, `tanh`, `erf`, `sqrt` and others, and in none of several thousand after one call from one thread.
The fault lies below megatier. It matters here because a run promises the bits of its twin.
"""

from __future__ import annotations

import functools

import torch

FUNCTIONS = (
    *("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "erfinv", "lgamma", "sigmoid"),
)
"""The functions of one argument that torch may send to a vector maths library."""


@functools.cache
def warm_up() -> None:
    """Call each function once, on a single element, so that one thread alone sets the library up.

    Call it before anything that computes. Later calls in the same process return at once.
    """
    # torch gives one element to no other thread.
    for dtype in (torch.float32, torch.float64):
        element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            function = getattr(torch, name)
            function(element)
