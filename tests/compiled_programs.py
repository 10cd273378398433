"""The programs that tests compile, kept for later runs.

Each process that runs tests reads and writes a folder of its own, because JAX writes entries
without a lock. When it ends, its new entries join those that later runs start with.
"""

import os
import pathlib
import shutil
import tempfile

import jax

from moelib.runtime.compilation_cache import kind_of_processor

_KEPT = pathlib.Path(__file__).parents[1] / ".cache/jax"
_MAX_BYTES = 3 << 30


class CompiledPrograms:
    """The plugin of a process that runs tests."""

    def pytest_configure(self) -> None:
        """Sets JAX's folder, here and for child processes, to a copy of the kept one."""
        kept = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or _KEPT)
        self._kept = kept / kind_of_processor()
        self._kept.mkdir(parents=True, exist_ok=True)
        self._folder = pathlib.Path(tempfile.mkdtemp(dir=kept, prefix="process-"))
        for entry in self._kept.iterdir():
            os.link(entry, self._folder / entry.name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self._folder)
        jax.config.update("jax_compilation_cache_dir", str(self._folder))

    def pytest_unconfigure(self) -> None:
        """Keeps the new entries, unless there are too many."""
        entries = [(entry, entry.stat()) for entry in self._folder.glob("*-cache")]
        if sum(stat.st_size for _, stat in entries) > _MAX_BYTES:
            shutil.rmtree(self._kept, ignore_errors=True)  # Most are of earlier code.
        else:
            for entry, stat in entries:
                if stat.st_size and stat.st_nlink == 1:
                    entry.replace(self._kept / entry.name)
        shutil.rmtree(self._folder, ignore_errors=True)
