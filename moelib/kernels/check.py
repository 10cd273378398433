"""Self-check of the kernels that a run uses: values and gradients against the reference.

Kernels are tested where they are developed, most of them in an interpreter. A wrong result on the
hardware at hand would train a wrong model without an error, so a run on an accelerator begins with
one small case of each kernel, computed on one local device of each process without collectives.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from moelib.core.errors import UserError
from moelib.kernels.backend import current_device, how_to_set, kernel_backends, traced_backends
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.kernels.gmm import gmm, gmm_activated

# Largest difference, as a share of the largest reference value. Rounding of bfloat16 operands and
# results stays below 2^-7; a wrong mask, group or sum is far above.
TOLERANCE = 2**-5

PLATFORMS = ("gpu", "tpu")


def check_kernels(dtype: DTypeLike | None) -> None:
    """Compares grouped matmul and attention with their references, if there is an accelerator.

    Args:
        dtype: Dtype that the model computes in; None for float32.

    Raises:
        UserError: If a value or gradient differs by more than `TOLERANCE`, or is NaN.
    """
    device = jax.local_devices()[0]
    if device.platform not in PLATFORMS:
        return
    mesh = Mesh(np.array([device]), ("kernel_check",))
    with jax.set_mesh(mesh), kernel_backends():
        replicated = NamedSharding(mesh, PartitionSpec())
        for kernel, (function, shapes) in _CASES.items():
            rng = np.random.default_rng(0)
            drawn = {
                name: scale * rng.normal(size=shape) for name, (shape, scale) in shapes.items()
            }
            arrays = {
                name: jax.device_put(x.astype(dtype or jnp.float32), replicated)
                for name, x in drawn.items()
            }
            got = _value_and_gradients(function, arrays)
            backend = traced_backends()[kernel]
            with kernel_backends({kernel: "reference"}), jax.default_matmul_precision("highest"):
                want = _value_and_gradients(function, arrays)
            for name in got:
                _compare(kernel, backend, name, got[name], want[name])


def _value_and_gradients(
    function: Callable[..., jax.Array], arrays: Mapping[str, jax.Array]
) -> dict[str, np.ndarray]:
    """Returns the value of a function, and its gradients by array, weighted by a fixed wave."""

    @jax.jit
    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, pull = jax.vjp(lambda arrays: function(**arrays), arrays)
        wave = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return value, pull(wave.astype(value.dtype))[0]

    value, gradients = run(dict(arrays))
    named = {"value": value} | {f"gradient of {name}": x for name, x in gradients.items()}
    return {name: np.asarray(x, np.float32) for name, x in named.items()}


def _compare(kernel: str, backend: str, name: str, got: np.ndarray, want: np.ndarray) -> None:
    difference, bound = np.abs(got - want), TOLERANCE * np.abs(want).max()
    if (difference <= bound).all():
        return
    index = np.unravel_index(np.argmax(np.where(difference <= bound, 0, difference)), got.shape)
    raise UserError(
        f"{kernel} by backend {backend!r} is wrong on {current_device().kind}: its {name} at "
        f"{list(map(int, index))} is {got[index]:.6g}, the reference's {want[index]:.6g} "
        f"(tolerance {bound:.3g}). For another backend, {how_to_set(kernel, 'xla')}; to continue "
        "with this one, set --skip_kernel_check."
    )


# Sizes are multiples of 64, which all kernels take, but groups and segments are off the tiles.
_SIZES = (70, 0, 130, 90)


def _experts(rows: Any, up: Any, up_bias: Any, down: Any) -> jax.Array:
    """Returns the output of gated experts; 30 of 320 rows belong to none."""
    sizes = jnp.asarray(_SIZES, jnp.int32)
    hidden = gmm_activated(rows, up, sizes, activation=_gated, bias=up_bias)
    return gmm(hidden, down, sizes)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Returns causal attention of two packed documents, and padding."""
    ids = jnp.asarray(np.repeat([1, 2, 0], [150, 190, 44])[None], jnp.int32)
    return flash_attention(q, k, v, MaskSpec(64**-0.5), segment_ids=ids)


# Function, and the shape and standard deviation of each operand.
_CASES: dict[str, tuple[Callable[..., jax.Array], dict[str, tuple[tuple[int, ...], float]]]] = {
    "gmm": (
        _experts,
        {
            "rows": ((320, 128), 1.0),
            "up": ((4, 2, 128, 192), 128**-0.5),
            "up_bias": ((4, 2, 192), 1.0),
            "down": ((4, 192, 128), 192**-0.5),
        },
    ),
    "flash_attention": (
        _attention,
        {"q": ((1, 384, 4, 64), 1.0), "k": ((1, 384, 2, 64), 1.0), "v": ((1, 384, 2, 64), 1.0)},
    ),
}
