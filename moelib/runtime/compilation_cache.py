"""The compilation cache of the commands: later runs load programs that earlier ones compiled.

It is JAX's own, in `~/.cache/moelib/programs`. A program for CPUs has instructions that another
processor may lack, so that each kind of processor has a folder of its own.
"""

import hashlib
import logging
import os
import pathlib
import platform

from moelib.runtime.files import user_cache_dir

_logger = logging.getLogger(__name__)

_SETTINGS = {
    "jax_compilation_cache_max_size": 1 << 30,  # Bytes; JAX deletes the least recently used.
    "jax_persistent_cache_min_compile_time_secs": 0.2,  # Others compile as fast as they are read.
    "jax_persistent_cache_enable_xla_caches": "none",  # Without bounds, and for GPUs only.
}
_LOCK, _ENTRY, _LAST_USE = ".lockfile", "-cache", "-atime"  # JAX's names.


def use_compilation_cache() -> None:
    """Keeps compiled programs in a folder of the user, unless JAX has another setting.

    Each of JAX's own environment variables takes precedence. A folder that cannot be written is a
    warning. Call it before anything compiles.
    """
    import jax

    config = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    folder = pathlib.Path(user_cache_dir("programs"), kind_of_processor())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_incomplete_entries(folder)
    except OSError as error:
        _logger.warning(
            "%s: compiled programs are not kept (%s); set JAX_COMPILATION_CACHE_DIR to a folder "
            "that can be written, or JAX_ENABLE_COMPILATION_CACHE=false.",
            folder,
            error.strerror or error,
        )
        return
    for name, value in {"jax_compilation_cache_dir": str(folder), **_SETTINGS}.items():
        if name.upper() not in os.environ:
            config.update(name, value)


def kind_of_processor() -> str:
    """Returns a name that differs between processors of different instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        lines = []
    known = ("flags", "Features", "model name", "CPU part")  # Fields of x86 and Arm.
    parts = sorted({line for line in lines if line.startswith(known)})
    text = "\n".join([platform.machine(), platform.processor(), *parts])
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _delete_incomplete_entries(folder: pathlib.Path) -> None:
    """Deletes entries of processes that ended, or found the disk full, while they wrote them.

    JAX would read them with a warning at every start, and never replace them. It notes an entry's
    last use after it has written all of it.
    """
    import filelock

    with filelock.FileLock(folder / _LOCK, timeout=10):
        for path in folder.glob(f"*{_ENTRY}"):
            if not path.with_name(path.name.removesuffix(_ENTRY) + _LAST_USE).exists():
                path.unlink()
