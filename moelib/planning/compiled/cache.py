"""A cache of reports of compiled steps, keyed by everything that decides the compiled program."""

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
from moelib.core.errors import UserError
from moelib.core.files import read_json, user_cache_dir, write_json

_logger = logging.getLogger(__name__)

DEFAULT_DIR = user_cache_dir("plan")

# Packages that compile, and variables that they read; the worker sets JAX_PLATFORMS itself.
_COMPILERS = re.compile(r"jax[\w-]*|libtpu|nvidia-(cuda-nvcc|nvvm).*|optax")
_VARIABLES = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|JAX_(?!PLATFORMS$)\w+")
_REFERENCE = re.compile(r"([\w.]+):[A-Za-z_]\w*")


def key(request: Mapping[str, Any]) -> str:
    """Returns the name of the entry of a request: JSON values, with the config as text in `config`.

    It depends on the request, the versions of JAX and the compilers, their environment variables,
    and the sources of moelib and of other modules that the config names.
    """
    parts = {
        "request": request,
        "versions": _versions(),
        "environment": {n: os.environ[n] for n in os.environ if _VARIABLES.fullmatch(n)},
        "moelib": _hash_of_moelib(),
        "others": {name: _hash(path) for name, path in _named_sources(request["config"])},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read(folder: str, name: str) -> dict[str, Any]:
    """Returns an entry, or {} if there is none; a damaged entry is ignored with a warning."""
    path = os.path.join(folder, f"{name}.json")
    try:
        return read_json(path)
    except (OSError, UserError) as error:
        warn_damaged(path, error)
        return {}


def warn_damaged(path: str, reason: object) -> None:
    """Warns that an entry of the cache is ignored."""
    _logger.warning("%s is damaged (%s): the step is compiled again.", path, reason)


def write(folder: str, name: str, value: Mapping[str, Any]) -> None:
    """Writes an entry; a folder that cannot be written is a warning."""
    try:
        os.makedirs(folder, exist_ok=True)
        write_json(os.path.join(folder, f"{name}.json"), value, indent=None)
    except OSError as error:
        _logger.warning("%s: the report is not cached: %s", folder, error)


@functools.cache
def _versions() -> list[tuple[str, str]]:
    found = ((each.name, each.version) for each in importlib.metadata.distributions())
    return sorted({each for each in found if _COMPILERS.fullmatch(each[0])})


def _hash(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _hash_of_moelib() -> str:
    folder = pathlib.Path(moelib.__path__[0])
    files = sorted(folder.rglob("*.py"))
    text = "".join(f"{path.relative_to(folder)} {_hash(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _named_sources(config: str) -> list[tuple[str, pathlib.Path]]:
    """Returns (module, file) of the modules outside of moelib that a config names."""
    names = sorted(set(_REFERENCE.findall(config)))
    files = ((name, getattr(sys.modules.get(name), "__file__", None)) for name in names)
    return [(name, pathlib.Path(p)) for name, p in files if p and not name.startswith("moelib.")]
