"""A compact JAX library for training Mixture-of-Experts language models.

The public names are imported when they are first used, so that `import moelib` is cheap:

    import moelib

    result = moelib.fit(trainer_config, trainer_dir="runs/first")
    model = moelib.load_model("runs/first")
    text = next(moelib.generate(model, ["Once upon a time"])).text
"""

import importlib
from typing import TYPE_CHECKING, Any

from moelib.runtime import simulated

if TYPE_CHECKING:
    from moelib.evaluation.evaluate import evaluate
    from moelib.inference.generate import generate
    from moelib.inference.trace import trace
    from moelib.planning.plan import plan
    from moelib.runs.loading import load_model
    from moelib.tasks.fit import fit
    from moelib.tasks.run import predict
    from moelib.tasks.task import Task
    from moelib.verify.run import verify_config

__version__ = "0.1.0"

simulated.prepare()

__all__ = [
    "Task",
    "__version__",
    "evaluate",
    "fit",
    "generate",
    "load_model",
    "plan",
    "predict",
    "trace",
    "verify_config",
]

_MODULES = {
    "Task": "moelib.tasks.task",
    "evaluate": "moelib.evaluation.evaluate",
    "fit": "moelib.tasks.fit",
    "generate": "moelib.inference.generate",
    "load_model": "moelib.runs.loading",
    "plan": "moelib.planning.plan",
    "predict": "moelib.tasks.run",
    "trace": "moelib.inference.trace",
    "verify_config": "moelib.verify.run",
}


def __getattr__(name: str) -> Any:
    """Imports a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moelib' has no attribute {name!r}.")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
