"""`moelib bench`: moved to `python -m benchmarks`, in the repository.

For one version the command still runs the benchmarks where the repository is the current folder.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

_MOVED = "moelib bench is now `python -m benchmarks NAME`, run in the repository of moelib."


def define_flags() -> None:
    """Defines the flags of the benchmarks; ends the process where they are not found."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("benchmarks") is None:
        sys.exit(_MOVED)
    _benchmarks().define_flags()


def run(args: Sequence[str]) -> None:
    """Runs a benchmark, after a notice.

    Raises:
        UsageError: If the benchmark cannot run; the message says why.
    """
    print(_MOVED, file=sys.stderr)
    _benchmarks().run(args)


def _benchmarks() -> types.ModuleType:
    return importlib.import_module("benchmarks.__main__")
