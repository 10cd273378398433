"""The step compiled in other ways: in bfloat16 on a mesh, and with the kernels of TPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.parallel.sharding import SplitError
from moelib.verify.compare import Difference, first_difference
from moelib.verify.mesh_checks import MeshRun
from moelib.verify.meshes import Axes
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import Reference
from moelib.verify.step_probe import Probe

_BFLOAT16_LOSS = 0.01  # Relative error of a loss in bfloat16; observed: 9e-4.
_BFLOAT16_GRADIENT = 0.3  # Norm of a gradient's error, as a share of its norm; observed: 0.09.


def bfloat16(known: Reference, axes: Sequence[Axes], devices: Sequence[Any]) -> Difference | None:
    """Bounds the error of loss and gradients of a step in bfloat16 on the first possible mesh."""
    for each in axes:
        try:
            probe = Probe(known.config.clone(train_dtype="bfloat16"), each, devices)
            probe.compile(known.start, known.batches[0], known.first.gradients)
        except SplitError:
            continue
        observed = probe(known.start, known.batches[0], known.first.gradients)
        losses = ({"loss": step.metrics["loss"]} for step in (known.first, observed))
        if found := first_difference(*losses, relative=_BFLOAT16_LOSS):
            return found
        want, got = (
            tree.by_path(known.plain.layers_apart(jax.device_get(step.gradients)))
            for step in (known.first, observed)
        )
        norms = {path: float(np.linalg.norm(x)) for path, x in want.items()}
        for path in reversed(known.plain.in_order(norms)):
            error = float(np.linalg.norm(np.float32(got[path]) - want[path]))
            allowed = _BFLOAT16_GRADIENT * norms[path] + 0.01 * max(norms.values())
            if not error <= allowed:
                raise CheckFailedError(
                    f"The gradient of {path} in bfloat16 has an error of norm {error:.3g}, allowed "
                    f"{allowed:.3g}, and in float32 the norm {norms[path]:.3g}."
                )
        return None
    raise CheckSkippedError("the config cannot be split over any of the meshes")


def tpu_kernels(known: Reference) -> Difference | None:
    """Compares the step with that of the grouped matmul of TPUs, interpreted.

    Heads of a small config are too small for their attention, which `kernels` compares.
    """
    backends = known.config.kernel_backends | {"gmm": "tpu"}
    probe = Probe(known.config.clone(kernel_backends=backends), {}, known.devices)
    probe.compile(known.start, known.batches[0], known.first.gradients)
    run = MeshRun(known, probe)
    return run.metrics() or run.gradients()
