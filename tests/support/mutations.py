"""Valid inputs, harmed at random: their bytes, or the structure that they are the text of."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

TOKENS = (
    *rb"""[ ] { } " ' , : * & ? % \ud800 null true NaN -Infinity -1 1e999 0x 1_ 2026-13-45 *a &a <<: ---""".split(),
    *(b"\n", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 5000, b"[" * 5000),
    *(b"!!int ", b"!!float ", b"!!bool ", b"!!timestamp ", b"!!binary ", b"!!set ", b"!!python/object:os.system "),
)
"""What parsers of JSON and YAML stumble over."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 625, 1 << 31, 1 << 63, 1 << 100, 10**4000, 0.5, -0.0, 1e308),
    *(math.nan, math.inf, -math.inf, [], {}, [[]], [None] * 700, [1 << 62] * 700, {"": None}, {"name": 1}),
    *("", "x", "nan", "-1", "1e400", "9" * 400 + ".5", "9" * 5000, "\0", "\ud800", "a" * 9999, "step", "AAAA", "5GiB"),
)
"""What the readers of values do."""


def harmed_bytes(draw: random.Random, raw: bytes) -> bytes:
    """Flip, cut out, repeat or put in something, up to four times."""
    found = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(found))
        stop = min(len(found), start + int(draw.expovariate(0.1)))
        match draw.randrange(6):
            case 0:
                found[start : start + 1] = draw.randbytes(1)
            case 1:
                del found[start:stop]
            case 2:
                found[start:start] = found[start:stop] * draw.randint(1, 3)
            case 3:
                del found[start:]
            case _:
                found[start:start] = draw.choice(TOKENS)
    return bytes(found)


def harmed_tree(draw: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """Replace, remove, rename, nest or swap values inside, up to three times."""
    found = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(found))
        if not places:
            break
        parent, key = draw.choice(places)
        other, other_key = draw.choice(places)
        match draw.randrange(7):
            case 0:
                del parent[key]
            case 1:
                parent[key] = [parent[key]] * draw.randint(1, 3)
            case 2:
                parent[key] = {"x": parent[key]}
            case 3:
                parent[key] = copy.deepcopy(other[other_key])
            case 4 if isinstance(parent, dict):
                parent[str(draw.choice(VALUES))[:20]] = parent.pop(key)
            case _:
                parent[key] = copy.deepcopy(draw.choice(VALUES))
    return found


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container inside, with each of its keys; of a long list some."""
    keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 8)) if isinstance(tree, list) else ()
    return [place for key in keys for place in ((tree, key), *_places(tree[key]))]
