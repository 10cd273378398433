"""Memory maps of this process, of which compiled programs take many.

A program for CPUs takes 6 to 150. Linux grants a process 65,530 by default, and LLVM ends a process
that gets no more.
"""

import logging
import pathlib

_logger = logging.getLogger(__name__)

_MAPS = pathlib.Path("/proc/self/maps")
_LIMIT = pathlib.Path("/proc/sys/vm/max_map_count")
_SHARE = 0.8  # Share of the limit above which a process is warned.


def count() -> int:
    """Returns the number of memory maps of this process; 0 on systems other than Linux."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def warn_if_many() -> None:
    """Logs a warning if compiled programs take most of the memory maps that this process may have.

    Call it before each program of a loop that compiles many.
    """
    maps = count()
    if maps and maps > _SHARE * (limit := int(_LIMIT.read_text(encoding="ascii"))):
        _logger.warning(
            "This process has %d of at most %d memory maps, nearly all of compiled programs, and "
            "ends when it needs more: call jax.clear_caches(), or raise vm.max_map_count.",
            maps,
            limit,
        )
