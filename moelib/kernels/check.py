"""Comparison of a kernel's call with its reference, values and gradients, on this device.

Kernels are tested where they are developed, most of them in an interpreter. A wrong result on the
hardware at hand would train a wrong model without an error, so each call that a program makes is
compared at its own shapes, with drawn operands. The reference is in float32, and takes little more
memory than the call.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.errors import UserError, is_full_device
from moelib.kernels.backend import Call, kernel_backends, traced_backends

# Largest difference, as a share of the largest reference value, and of a row, as a share of its
# norm. Rounding of bfloat16 operands and results stays below 2^-7; a wrong group or sum, and a mask
# that hides one key of 32 from a query, are above.
TOLERANCE = 2**-5
_FLOOR = 0.25  # Share of the mean norm that a row has at least: small ones are sums that cancel.

FAILS = "fails"  # Begins the text on an exception.
NO_MEMORY = "is not compared, for lack of memory"  # No fault of the kernel.

_Arrays = dict[str, jax.Array]


def backend_of(call: Call) -> str:
    """Returns the backend that computes a call on the first local device.

    Raises:
        UserError: If the backend that is chosen cannot compute it.
    """
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in call.operands}
    with jax.set_mesh(_mesh()):
        try:
            jax.eval_shape(partial(call.function, **dict(call.options)), **shapes)
        except UserError:
            raise
        except Exception:  # A fault of the kernel, which `compare` finds again.
            pass
    return traced_backends()[call.kernel]


def compare(call: Call) -> str | None:
    """Compares a call on the first local device, by its backend, with its reference.

    Returns:
        What follows the kernel's name: a text that begins with "is wrong" if a difference is beyond
        the tolerance, one that begins with FAILS, or NO_MEMORY. None if the call is right.
    """
    try:
        with jax.set_mesh(_mesh()):
            return _difference(call)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        if is_full_device(error):
            return NO_MEMORY
        return f"{FAILS} ({type(error).__name__}: {reason:.300})"


def _mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("kernel_check",))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# -- Operands --------------------------------------------------------------------------------------


def _drawn(call: Call) -> _Arrays:
    """Returns operands: normal floats, groups of uneven sizes, documents of uneven lengths."""
    shapes = {name: shape for name, shape, _ in call.operands}

    def draw(index: int, name: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
        if name == "group_sizes":
            return jnp.asarray(_group_sizes(shape[0], shapes["lhs"][0]), dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(_documents(*shape), dtype)
        scale = shape[-2] ** -0.5 if name in ("rhs", "weight") else 1.0
        return jax.random.normal(jax.random.key(index), shape, dtype) * jnp.asarray(scale, dtype)

    @partial(jax.jit, out_shardings=NamedSharding(_mesh(), PartitionSpec()))
    def drawn() -> _Arrays:
        return {operand[0]: draw(i, *operand) for i, operand in enumerate(call.operands)}

    return drawn()


def _group_sizes(num_groups: int, num_rows: int) -> np.ndarray:
    """Returns uneven sizes, with a few rows of no group.

    Of several groups one has 3 rows at most, and of more than two another has none.
    """
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(num_groups, 2.0))
    if num_groups > 2:
        share[1] = 0
    sizes = np.floor(0.95 * num_rows * share / share.sum()).astype(np.int64)
    if num_groups > 1:  # Sums of more rows hide one that is missing.
        last = sizes[-1]
        sizes[-1] = min(last, 3)
        sizes[0] += last - sizes[-1]
    return sizes


def _documents(num_sequences: int, length: int) -> np.ndarray:
    """Returns segment ids of packed documents, with padding, which has the id 0, at the ends."""
    rng = np.random.default_rng(0)
    ids = 1 + np.cumsum(rng.random((num_sequences, length)) < 4 / length, axis=1)
    ids[0, : length - length // 4] = 1  # Of one sequence, most is one document.
    ids[0, length - length // 4 :] += 1
    ids[:, length - length // 16 :] = 0
    return ids


# -- Values and gradients --------------------------------------------------------------------------


def _difference(call: Call) -> str | None:
    """Returns a text on the first result that is wrong, if any is."""
    arrays = _drawn(call)
    got = _value_and_gradients(call, arrays)
    wide = {name: x.astype(jnp.float32) if _is_float(x) else x for name, x in arrays.items()}
    with kernel_backends({call.kernel: "reference"}), jax.default_matmul_precision("highest"):
        want = _value_and_gradients(call, wide)
    for name, x in got.items():
        index, ours, right, bound, is_wrong = map(np.asarray, _farthest(x, want[name]))
        if is_wrong:
            at = [int(i) for i in np.unravel_index(index, x.shape)]
            values = f"{ours:.6g}, the reference's {right:.6g} (tolerance {bound:.3g})"
            return f"is wrong: its {name} at {at} is {values}"
    return None


def _value_and_gradients(call: Call, arrays: _Arrays) -> _Arrays:
    """Returns the value of a call, and its gradients by array, weighted by a fixed wave."""

    @jax.jit
    def run(arrays: _Arrays) -> tuple[jax.Array, _Arrays]:
        value, pull = jax.vjp(lambda x: call.function(**x, **dict(call.options)), arrays)
        wave = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        (gradients,) = pull(wave.astype(jnp.bfloat16).astype(value.dtype))
        return value, {name: x for name, x in gradients.items() if _is_float(x)}

    value, gradients = run(arrays)
    return {"value": value, **{f"gradient of {name}": x for name, x in gradients.items()}}


@jax.jit
def _farthest(got: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    """Returns where the difference is largest, as a flat index, with both values.

    Last come the tolerance, and whether any difference is beyond it; NaN is. If only the norm of a
    row is beyond, the index is in this row.
    """
    size = got.shape[-1] if got.ndim else 1
    got, want = (x.astype(jnp.float32).reshape(-1, size) for x in (got, want))
    difference = jnp.abs(got - want)
    bound = TOLERANCE * jnp.max(jnp.abs(want))
    rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x), axis=-1))
    allowed = TOLERANCE * (rms(want) + _FLOOR * jnp.sqrt(jnp.mean(jnp.square(want))))
    row = jnp.argmax(rms(difference) - allowed)  # The first NaN, if there is one.
    is_wrong = ~(jnp.max(difference) <= bound)
    in_row = row * size + jnp.argmax(difference[row])
    index = jnp.where(is_wrong, jnp.argmax(difference), in_row)
    bound = jnp.where(is_wrong, bound, allowed[row])
    is_wrong |= ~(rms(difference)[row] <= allowed[row])
    return index, got.reshape(-1)[index], want.reshape(-1)[index], bound, is_wrong
