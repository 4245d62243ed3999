"""What the processes of ranks import, and what transformers makes at the first model: once, before they are forked."""

from __future__ import annotations

import rank_runs  # noqa: F401
import tiny_runs  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.trainer  # noqa: F401
from warm_python import load

load()
