"""Code that a config file may name, so that reading the folder of someone else runs none of theirs.

A file names classes, functions and enum members as `module:qualname`. It may name

- components of moelib (configurable classes, records, enums, and the functions of layers, learner
  and policies), and all of its named configs;
- the user's code: modules that this process has imported from outside the standard library and the
  installed packages, and the modules of --module and --module_dir;
- functions of Optax and jax.nn, dtypes of NumPy and JAX;
- the modules in the list CONFIG_MODULES of the module of --module.

Everything else is refused before it is imported. The rule holds for the module where the object is
defined, so that `moelib.runtime.storage:os.remove` is refused too.
"""

import enum
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

from moelib.core import config_types, module_names
from moelib.core.errors import UserError, refuse_single_strings

# The functions of moelib that configs name.
_FUNCTIONS = ("moelib.checkpoint.policy", "moelib.layers", "moelib.learner")

# Modules of other libraries whose functions neither read nor write anything.
_PURE = ("jax.nn", "jax._src.nn", "optax")
_DTYPE_MODULES = ("jax.numpy", "ml_dtypes", "numpy")

_MOELIB = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_modules: set[str] = set()  # Modules and packages that the user has allowed in this process.
_folders: set[str] = set()  # Folders whose modules the user has allowed.


class UntrustedNameError(UserError):
    """A config file names code that it may not name."""


class UnknownModuleError(UntrustedNameError):
    """A config file names a module that cannot be imported here."""


def allow_module(module: types.ModuleType) -> None:
    """Lets config files name the package of a module, and the modules in its CONFIG_MODULES.

    Raises:
        UserError: If CONFIG_MODULES is a string.
    """
    listed = getattr(module, "CONFIG_MODULES", ())
    refuse_single_strings(CONFIG_MODULES=listed)
    _modules.update((module.__name__.partition(".")[0], *listed))


def allow_folder(folder: str) -> None:
    """Lets config files name the modules of a folder, and makes these importable."""
    folder = os.path.realpath(folder)
    _folders.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()


def resolve(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """Returns the object that a config file names.

    Args:
        text: Its name, `module:qualname`.
        names: Objects that are allowed in addition, by name.

    Raises:
        UntrustedNameError: If the file may not name it; it is not imported.
        UnknownModuleError: If there is no such module.
        UserError: If there is no such object.
    """
    if names and text in names:
        return names[text]
    module, _, qualname = text.partition(":")
    dtype = module in _DTYPE_MODULES and config_types.is_dtype_name(qualname)
    moved = f"If {qualname} has moved, import it in {module} too."
    if not dtype and not _may_import(module):
        refusal, top = f"a config file may not name {module!r}, as in {text!r}", _top(module)
        if top in sys.stdlib_module_names:
            raise UntrustedNameError(f"{refusal}: it is of Python's standard library.")
        cure = f"pass --module={top}, or the folder that holds it as --module_dir."
        if module_names.find_module(top) is None:
            raise UnknownModuleError(f"{refusal}. If you trust this code, {cure} {moved}")
        raise UntrustedNameError(f"{refusal}. If you trust this code, {cure}")
    try:
        value = config_types.resolve_reference(text)
    except UserError as error:
        raise UserError(f"{error} {moved}") from error
    if not dtype and not _may_use(value):
        if not callable(value):
            raise UntrustedNameError(
                f"a config file may not name {text!r} of type {type(value).__name__}; name a class "
                "or a function."
            )
        raise UntrustedNameError(
            f"a config file may not name {text!r}: only components, not all code of {module!r}. If "
            "you trust it, list the module that defines it in CONFIG_MODULES of your --module."
        )
    return value


def _may_import(module: str) -> bool:
    """Returns whether a config file may name objects of a module; it is not imported."""
    top = _top(module)
    if top in ("__main__", "moelib") or _within(module, (*_PURE, *_modules)):
        return True
    if not (source := _source(top)):
        return False
    if top in sys.modules and is_of_the_user(source):
        return True
    folder = os.path.dirname(source)
    named_configs = top in module_names.EXPERIMENTS and folder == os.path.dirname(_MOELIB)
    return named_configs or os.path.realpath(folder) in _folders


def _may_use(value: Any) -> bool:
    """Returns whether an object is defined where a file may name it."""
    owner = type(value) if isinstance(value, enum.Enum) else value
    if not config_types.has_reference(owner):
        return False
    module, name = getattr(owner, "__module__", None) or "", owner.__qualname__
    if _top(module) != "moelib" or _within(f"{module}.{name}", _FUNCTIONS):
        return _may_import(module)
    return isinstance(owner, type) and (
        hasattr(owner, "default_config")
        or config_types.is_config_class(owner)
        or issubclass(owner, enum.Enum)
        or config_types.is_record_class(owner)
    )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _source(module: str) -> str:
    """Returns the file or folder of a top-level module; "" if it is unknown or built in."""
    try:
        spec = importlib.util.find_spec(module_names.find_module(module) or module)
    except ValueError:  # A module without a spec.
        return ""
    if spec is not None and spec.submodule_search_locations:
        return os.path.abspath(spec.submodule_search_locations[0])
    if spec is not None and spec.has_location and spec.origin:
        return os.path.abspath(spec.origin)
    return ""


def is_of_the_user(file: str) -> bool:
    """Returns whether a source file is neither ours nor of Python or an installed package."""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix, _MOELIB)
    if not file or file.startswith(("<", *(folder + os.sep for folder in installed))):
        return False
    return not {"site-packages", "dist-packages"} & set(file.split(os.sep))
