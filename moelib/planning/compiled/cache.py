"""Reports of compiled steps on disk, under all that decides what the compiler makes of a step."""

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import moelib

_logger = logging.getLogger(__name__)

DEFAULT_DIR = str(
    pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    / "moelib"
    / "plan"
)

_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "optax",
)
# Of the environment, what JAX and the compilers read; the worker sets JAX_PLATFORMS itself.
_READ = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|JAX_(?!PLATFORMS$)\w+")
_REFERENCE = re.compile(r"([\w.]+):[A-Za-z_]\w*")


def key(request: Mapping[str, Any]) -> str:
    """Returns the name under which to keep the result of a request.

    It changes with the request, the versions of JAX and the compilers, the flags that they read
    from the environment, the sources of moelib, and those of other modules that the config names.

    Args:
        request: Values of JSON; `config` is the config as text.
    """
    parts = {
        "request": request,
        "versions": {name: _version(name) for name in _PACKAGES},
        "environment": {name: os.environ[name] for name in os.environ if _READ.fullmatch(name)},
        "moelib": _hash_of_moelib(),
        "others": {name: _hash(path) for name, path in _named_sources(request["config"]).items()},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read(folder: str, name: str) -> dict[str, Any] | None:
    """Returns what was kept, or None if there is nothing; what is damaged counts so, and warns."""
    path = pathlib.Path(folder) / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return warn_damaged(path, error)
    if not isinstance(found, dict):
        return warn_damaged(path, "it is no JSON object")
    return found


def warn_damaged(path: pathlib.Path | str, reason: object) -> None:
    """Says that a file of the cache is not used."""
    _logger.warning("%s cannot be used (%s): the step is compiled anew.", path, reason)


def write(folder: str, name: str, value: Mapping[str, Any]) -> None:
    """Keeps a value, at once or not at all; a folder that cannot be written is warned about."""
    path = pathlib.Path(folder) / f"{name}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        _logger.warning("%s: the report is not kept: %s", folder, error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _hash_of_moelib() -> str:
    folder = pathlib.Path(moelib.__path__[0])
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(
        "".join(f"{path.relative_to(folder)} {_hash(path)}" for path in files).encode()
    ).hexdigest()


def _named_sources(config: str) -> dict[str, pathlib.Path]:
    """Returns the files of the modules that a config names, beside moelib's own."""
    names = sorted(set(_REFERENCE.findall(config)))
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {
        name: pathlib.Path(path)
        for name, path in files.items()
        if path and not name.startswith("moelib.")
    }
