"""Print the first shell block below a heading of README.md, so that CI runs exactly what a newcomer copies.

python tools/readme_command.py 'Quick start'
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def command_below(heading: str, text: str) -> str:
    """The first ```sh block after a heading; raises LookupError when there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}$.*?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"README.md has no shell block below {heading!r}")
    return found[1]


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    print(command_below(sys.argv[1], readme.read_text(encoding="utf-8")), end="")
