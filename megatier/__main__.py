"""The command line as `python -m megatier`, for sources that are not installed."""

import sys

from megatier.cli import main

if __name__ == "__main__":
    sys.exit(main())
