"""Objects that nobody has closed, at the end of their process."""

from __future__ import annotations

import subprocess
import sys

AT_THE_END = """
import ctypes
import json  # before the module, so that it is cleared after it
from megatier import finalizer as dropped

class Kept(dropped.ClosedWhenDropped):
    def close(self): ...

for module in (json, dropped):  # as the frame of a thread keeps them
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
json.kept = Kept()
json.kept._own()
"""


def test_dropped_when_the_names_of_its_module_are_gone_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert done.stderr == ""
