"""Comparison of a kernel's call with its reference, values and gradients, on this device.

Kernels are tested where they are developed, most of them in an interpreter. A wrong result on the
hardware at hand would train a wrong model without an error, so each call that a program makes is
compared at its own shapes, with drawn operands. The reference is in float32, and takes little more
memory than the call.
"""

import logging
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.errors import UserError
from moelib.kernels.backend import Call, kernel_backends, traced_backends

# Largest difference, as a share of the largest reference value. Rounding of bfloat16 operands and
# results stays below 2^-7; a wrong mask, group or sum is far above.
TOLERANCE = 2**-5

_Arrays = dict[str, jax.Array]

_logger = logging.getLogger(__name__)


def backend_of(call: Call) -> str:
    """Returns the backend that computes a call on the first local device.

    Raises:
        UserError: If the backend that is chosen cannot compute it.
    """
    with jax.set_mesh(_mesh()), kernel_backends():
        shapes = {name: jax.ShapeDtypeStruct(shape, x) for name, shape, x in call.operands}
        try:
            jax.eval_shape(lambda x: call.function(**x, **dict(call.options)), shapes)
        except UserError:
            raise
        except Exception:  # A fault of the kernel, which `compare` raises again.
            _logger.debug("%s", call, exc_info=True)
        return traced_backends()[call.kernel]


def compare(call: Call) -> str | None:
    """Compares a call on the first local device, by its backend, with its reference.

    Returns:
        The largest difference if it is beyond the tolerance, else None.
    """
    with jax.set_mesh(_mesh()), kernel_backends():
        arrays = _drawn(call)
        got = _value_and_gradients(call, arrays)
        wide = {name: x.astype(jnp.float32) if _is_float(x) else x for name, x in arrays.items()}
        with kernel_backends({call.kernel: "reference"}), jax.default_matmul_precision("highest"):
            want = _value_and_gradients(call, wide)
        return next(filter(None, (_difference(name, got[name], want[name]) for name in got)), None)


def _mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("kernel_check",))


# -- Operands --------------------------------------------------------------------------------------


def _drawn(call: Call) -> _Arrays:
    """Returns operands: normal floats, groups of uneven sizes, documents of uneven lengths."""
    sharding = NamedSharding(_mesh(), PartitionSpec())
    shapes = {name: shape for name, shape, _ in call.operands}
    arrays: _Arrays = {}
    for index, (name, shape, dtype) in enumerate(call.operands):
        if jnp.issubdtype(dtype, jnp.floating):
            scale = shape[-2] ** -0.5 if name in ("rhs", "weight") else 1.0
            draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
            x = draw(jax.random.key(index), shape, jnp.dtype(dtype))
            arrays[name] = x * jnp.asarray(scale, dtype)
        else:
            grouped = name == "group_sizes"
            x = _group_sizes(shape[0], shapes["lhs"][0]) if grouped else _documents(*shape)
            arrays[name] = jax.device_put(x.astype(dtype), sharding)
    return arrays


def _group_sizes(num_groups: int, num_rows: int) -> np.ndarray:
    """Returns uneven sizes: a group without rows, and a few rows of no group."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(num_groups, 2.0))
    if num_groups > 2:
        share[1] = 0
    return np.floor(0.95 * num_rows * share / share.sum()).astype(np.int64)


def _documents(num_sequences: int, length: int) -> np.ndarray:
    """Returns segment ids of packed documents, with padding, which has the id 0, at the ends."""
    rng = np.random.default_rng(0)
    ids = 1 + np.cumsum(rng.random((num_sequences, length)) < 4 / length, axis=1)
    ids[:, length - length // 16 :] = 0
    return ids


# -- Values and gradients --------------------------------------------------------------------------


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _value_and_gradients(call: Call, arrays: Mapping[str, jax.Array]) -> _Arrays:
    """Returns the value of a call, and its gradients by array, weighted by a fixed wave."""
    floats = {name: x for name, x in arrays.items() if _is_float(x)}
    others = {name: x for name, x in arrays.items() if name not in floats}

    @jax.jit
    def run(floats: _Arrays, others: _Arrays) -> tuple[jax.Array, _Arrays]:
        of = lambda floats: call.function(**floats, **others, **dict(call.options))
        value, pull = jax.vjp(of, floats)
        wave = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return value, pull(wave.astype(jnp.bfloat16).astype(value.dtype))[0]

    value, gradients = run(floats, others)
    return {"value": value, **{f"gradient of {name}": x for name, x in gradients.items()}}


@jax.jit
def _farthest(got: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the flat index of the largest excess over the tolerance, both values, the bound."""
    got, want = (x.astype(jnp.float32).reshape(-1) for x in (got, want))
    bound = TOLERANCE * jnp.max(jnp.abs(want))
    difference = jnp.abs(got - want)
    excess = jnp.where(difference <= bound, -1.0, jnp.nan_to_num(difference, nan=jnp.inf))
    index = jnp.argmax(excess)
    return index, got[index], want[index], bound, excess[index] >= 0


def _difference(name: str, got: jax.Array, want: jax.Array) -> str | None:
    index, ours, right, bound, is_wrong = (np.asarray(x) for x in _farthest(got, want))
    if not is_wrong:
        return None
    at = list(map(int, np.unravel_index(index, got.shape))) if math.prod(got.shape) else []
    return f"its {name} at {at} is {ours:.6g}, the reference's {right:.6g} (tolerance {bound:.3g})"
