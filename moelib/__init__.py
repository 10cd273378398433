"""A compact JAX library for training Mixture-of-Experts language models.

The public functions are imported when they are first used, so that `import moelib` is cheap:

    import moelib

    result = moelib.fit(trainer_config, trainer_dir="runs/first")
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelib.planning.plan import plan
    from moelib.train.fit import fit
    from moelib.verify.run import verify_config

__version__ = "0.1.0"

__all__ = ["__version__", "fit", "plan", "verify_config"]

_MODULES = {
    "fit": "moelib.train.fit",
    "plan": "moelib.planning.plan",
    "verify_config": "moelib.verify.run",
}


def __getattr__(name: str) -> Any:
    """Imports a public function."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moelib' has no attribute {name!r}.")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
