"""`moelib bench`: moved to `python -m benchmarks NAME`, in the repository.

For one version the command still runs the benchmarks where they are found.
"""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from moelib.core.errors import UsageError

_MOVED = "moelib bench is now `python -m benchmarks NAME`, run in the repository of moelib."

if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
_benchmarks: Any = None
if importlib.util.find_spec("benchmarks") is not None:
    _benchmarks = importlib.import_module("benchmarks.__main__")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoFlags:
    """Flags of the command where there are no benchmarks."""


Flags: type = _NoFlags if _benchmarks is None else _benchmarks.Flags


def run(flags: Any, arguments: Sequence[str]) -> None:
    """Runs a benchmark, after a notice.

    Raises:
        UsageError: If there are no benchmarks, or the benchmark cannot run.
    """
    if _benchmarks is None:
        raise UsageError(_MOVED)
    print(_MOVED, file=sys.stderr)
    _benchmarks.run(flags, arguments)
