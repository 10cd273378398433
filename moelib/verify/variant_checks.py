"""The step compiled in other ways: in bfloat16 on a mesh, and with exact gradients in 8 bits."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.param import specs_by_path
from moelib.core.precision import is_cast
from moelib.layers.moe.router import Router
from moelib.parallel.sharding import SplitError
from moelib.verify.compare import Difference, first_difference
from moelib.verify.meshes import Axes
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import (
    ROUNDED_GRADIENT,
    ROUNDED_LOSS,
    Reference,
    check_rounded_gradients,
)
from moelib.verify.step_probe import Observed, Probe


def bfloat16(known: Reference, axes: Sequence[Axes], devices: Sequence[Any]) -> Difference | None:
    """Bounds the error of loss and gradients of a step in bfloat16 on the first possible mesh.

    Gradients are those of initial parameters, with noise in constant ones: in larger ones, rounding
    moves tokens to other experts. What is kept in float32 is compared with an update in float32 by
    the same gradients.
    """
    for each in axes:
        try:
            probe = Probe(known.config.clone(train_dtype="bfloat16"), each, devices)
            probe.compile(known.start, known.batches[0], known.first.gradients)
        except SplitError:
            continue
        observed = probe(known.start, known.batches[0], known.first.gradients)
        losses = ({"loss": step.metrics["loss"]} for step in (known.first, observed))
        if found := first_difference(*losses, relative=ROUNDED_LOSS):
            return found
        check_rounded_gradients(known, probe, known.initial(), "in bfloat16")
        return _kept_in_float32(known, probe, observed)
    raise CheckSkippedError("the config cannot be split over any of the meshes")


def _kept_in_float32(known: Reference, probe: Probe, observed: Observed) -> Difference | None:
    """Compares parameters and learner state after the step with an update in float32.

    Raises:
        CheckFailedError: If gradients of micro-batches are summed in bfloat16, or a router, or
            another parameter that is not to be cast, is.
    """
    gradients = tree.by_path(jax.device_get(observed.gradients))
    specs = specs_by_path(probe.trainer.trainer_state_specs.model)
    model = probe.trainer.model
    routers = [layer.path() for layer, _ in model.walk() if isinstance(layer, Router)]
    of_router = lambda path: (
        f"{model.path()}/{path}".rpartition("/")[0].replace("/", ".") in routers
    )
    for path, x in gradients.items():
        cast = is_cast(specs[path], "bfloat16")
        if (of_router(path) and cast) or (not cast and x.dtype != specs[path].dtype):
            raise CheckFailedError(
                f"{path} is cast to bfloat16, in which different scores are equal; set "
                "cast=Cast.NEVER in its ParameterSpec."
            )
    num = known.config.num_microbatches
    for path, x in gradients.items():
        total = num * np.float32(x)  # About half of the sums of two bfloat16 numbers need more.
        is_rounded = np.array_equal(total, np.float32(total.astype(jnp.bfloat16)))
        if num > 1 and np.count_nonzero(total) >= 64 and is_rounded:
            raise CheckFailedError(
                f"The gradients of {path} are summed over micro-batches in bfloat16, not float32."
            )
    given = tree.unflatten({path: np.float32(x) for path, x in gradients.items()})
    again = jax.device_get(probe(known.start, known.batches[0], given))
    if again.metrics.get("skipped"):
        return None
    want = tree.select(again.updated, gradients.__contains__)
    got = tree.select(again.state.model, gradients.__contains__)
    before = tree.by_path(known.start.model)
    for path, x in tree.by_path(want).items():
        # The step may use gradients before they are rounded to bfloat16.
        floor = 2**-7 * float(np.abs(x - before[path]).max(initial=0.0))
        pair = {path: x}, {path: tree.by_path(got)[path]}
        if found := first_difference(*pair, relative=1e-6, floor=floor):
            return found
    types = (tree.map_by_path(lambda _, x: str(x.dtype), s) for s in (known.start, again.state))
    for (path, old), (_, new) in zip(*map(tree.flatten_items, types), strict=True):
        if old != new:
            raise CheckFailedError(f"The step returns {path} in {new}, and was given {old}.")
    return None


def quantized(known: Reference) -> Difference | None:
    """Compares the step with one that multiplies the same operands, but quantizes no gradients."""
    if not (schemes := known.plain.unquantized):
        raise CheckSkippedError("no quantization")
    backends = known.config.kernel_backends | {"quantized_matmul": "straight_through"}
    probe = Probe(known.config.clone(kernel_backends=backends), {}, known.devices)
    probe.compile(known.start, known.batches[0], known.first.gradients)
    other = probe(known.start, known.batches[0], known.first.gradients)
    losses = ({"loss": step.metrics["loss"]} for step in (other, known.first))
    if found := first_difference(*losses, relative=ROUNDED_LOSS):
        return found
    want, got = (
        known.plain.by_layer(jax.device_get(step.gradients)) for step in (other, known.first)
    )
    smallest = 1e-6 * max(map(np.linalg.norm, want.values()))
    for path in reversed(want):  # Errors spread to all layers before.
        x, y = (np.float64(each[path]) for each in (want, got))
        if (norm := np.linalg.norm(x)) <= smallest:
            continue
        error, factor = np.linalg.norm(y - x) / norm, np.vdot(x, y) / norm**2
        # Errors of rounding have both signs, so that those of many entries leave the length.
        if not error <= ROUNDED_GRADIENT or (x.size >= 64 and abs(factor - 1) > 0.1):
            raise CheckFailedError(
                f"The gradient of {path} with {schemes} is {factor:.3g} times that of exact "
                f"matmuls of the same operands, with an error of {error:.2g} of its norm."
            )
    return None
