"""The entries `gmm` and `gmm_weight_gradient`: contract, custom VJP and choice of backend.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels.backend import check_backend, run_on_backend
from moelib.kernels.gmm import cpu, gpu, reference, tpu, xla

BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "cpu": cpu,
    "xla": xla,
    "tpu": tpu,
    "gpu": gpu,
}


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"] | Float[Array, "g n k"],
    group_sizes: Int[Array, "s"],
    *,
    bias: Float[Array, "g n"] | None = None,
    group_offset: Int[Array, ""] | int | None = None,
    transpose_rhs: bool = False,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]`, [m, n]; rows of no group are zeros.

    The first `group_sizes[0]` rows are the first group's, and so on. Rows past the sum of the group
    sizes belong to no group: they give zeros, have zero gradients, and may hold anything; so do
    rows of groups that rhs does not hold. Products are summed in float32; operands of two dtypes
    are multiplied in the wider. Differentiable in lhs, rhs and bias, in reverse mode. With several
    devices it belongs inside of `jax.shard_map`: it is not partitioned by itself.

    On TPUs our kernels are the default, for XLA's own writes every result in float32 to be masked
    and cast by another pass: for 4096 rows of 8 groups, k = n = 2048, in bfloat16 on v6e, 102 us by
    the compiler's count of bytes instead of 61, and 225 instead of 61 for the weight gradient.

    Args:
        lhs: The rows, sorted by group.
        rhs: A matrix for each group held, [g, k, n]; [g, n, k] if `transpose_rhs`.
        group_sizes: Number of rows of each group; one below 0 counts as 0. Rows counted past m do
            not exist.
        bias: A vector for each group held, added to its rows' results.
        group_offset: rhs holds the groups from this one on, of all that are counted: from 0 to
            s - g, to which an array is clamped. By default it holds all, and g is s.
        transpose_rhs: Whether to multiply by each matrix's transpose; nothing is copied for it.
        backend: "cpu" (loops over blocks of rows, the default except on TPU and Hopper), "tpu"
            (Pallas kernels, the default there for bfloat16 and float32; interpreted elsewhere, for
            tests), "gpu" (the same for Hopper, for bfloat16 and float16, k and n multiples of 64;
            the default where the mesh in context or the default device is one), "xla"
            (`lax.ragged_dot`, what other dtypes get on TPU), or "reference".
        preferred_element_type: Dtype of the result; lhs's by default.

    Raises:
        ValueError: If the shapes disagree, group_sizes are not integers, group_offset is a number
            out of its range, the backend is unknown, or has no kernel for the dtype.
    """
    check_operands("gmm", lhs, rhs, group_sizes, backend, transpose_rhs=transpose_rhs)
    sizes, offset = check_groups("gmm", rhs.shape[0], group_sizes, group_offset)
    n = rhs.shape[1 if transpose_rhs else 2]
    if bias is not None and bias.shape != (rhs.shape[0], n):
        raise ValueError(f"gmm: bias {bias.shape} is not [g, n], {(rhs.shape[0], n)}.")
    options = GmmOptions(transpose_rhs, backend, out_dtype(lhs, preferred_element_type))
    return product(options, *align(lhs, rhs, bias, sizes, offset))


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "s"],
    *,
    group_offset: Int[Array, ""] | int | None = None,
    num_groups: int | None = None,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "g k n"]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group, zeros for empty groups.

    The gradient of `gmm` in rhs, where grad is that of its result. Sums are in float32.
    Differentiable in lhs and grad, in reverse mode.

    Args:
        lhs: The rows, sorted by group, as for `gmm`.
        grad: As many rows.
        group_sizes: As for `gmm`.
        group_offset: As for `gmm`.
        num_groups: Number of groups held; all that are counted by default.
        backend: As for `gmm`.
        preferred_element_type: Dtype of the result; lhs's by default.

    Raises:
        ValueError: As `gmm`.
    """
    _check_group_sizes("gmm_weight_gradient", group_sizes)
    if not lhs.ndim == grad.ndim == 2 or lhs.shape[0] != grad.shape[0]:
        raise ValueError(
            f"gmm_weight_gradient: lhs {lhs.shape} and grad {grad.shape} are not [m, k] and [m, n]."
        )
    check_backend("gmm_weight_gradient", backend, BACKENDS)
    num_groups = len(group_sizes) if num_groups is None else num_groups
    sizes, offset = check_groups("gmm_weight_gradient", num_groups, group_sizes, group_offset)
    options = WeightOptions(num_groups, backend, out_dtype(lhs, preferred_element_type), None)
    return weight_gradient(options, *align(lhs, grad, sizes, offset))


# ------------------------------------------------------------------------------------------------
# Checks


def check_operands(
    kernel: str,
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    backend: str | None,
    *,
    transpose_rhs: bool,
) -> None:
    """Raises ValueError unless lhs [m, k] can be multiplied by rhs, with a backend that exists."""
    _check_group_sizes(kernel, group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or rhs.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
        want = "[g, n, k]" if transpose_rhs else "[g, k, n]"
        raise ValueError(f"{kernel}: lhs {lhs.shape} is not [m, k] to {want} of rhs {rhs.shape}.")
    check_backend(kernel, backend, BACKENDS)


def check_groups(
    kernel: str, num_groups: int, group_sizes: Array, offset: Array | int | None
) -> tuple[Array, Array | None]:
    """Returns the sizes, none below 0, and the offset as an int32 scalar, or None for none.

    Raises:
        ValueError: If the groups held cannot be among those counted; of an offset that is an array
            only the shape and dtype are looked at.
    """
    counted = group_sizes.shape[0]
    if offset is None and num_groups != counted:
        raise ValueError(
            f"{kernel}: rhs holds {num_groups} groups, so it has no matrix for each of {counted} "
            "groups of group_sizes; set group_offset to the first that it holds."
        )
    if num_groups > counted:
        raise ValueError(f"{kernel}: {num_groups} groups are held, but {counted} are counted.")
    sizes = jnp.maximum(group_sizes, 0)  # Backends would differ on rows counted backwards.
    if offset is None:
        return sizes, None
    last = counted - num_groups
    if isinstance(offset, int | np.integer) and not 0 <= offset <= last:
        raise ValueError(
            f"{kernel}: group_offset is {offset}, but {num_groups} of {counted} groups are held; "
            f"set the first of them, from 0 to {last}."
        )
    offset = jnp.asarray(offset)
    if offset.shape != () or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(f"{kernel}: group_offset is {offset}; set one integer.")
    return sizes, offset.astype(jnp.int32)


def _check_group_sizes(kernel: str, group_sizes: Array) -> None:
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        shape, dtype = group_sizes.shape, group_sizes.dtype
        raise ValueError(f"{kernel}: group_sizes must be [g] integers, not {dtype}{list(shape)}.")


def out_dtype(lhs: Array, preferred: DTypeLike | None) -> Any:
    """Returns the dtype of a result."""
    return lhs.dtype if preferred is None else jnp.dtype(preferred)


# ------------------------------------------------------------------------------------------------
# Backends


def widened(array: Array, axis: int) -> Array:
    """Returns the array with one more zero at the end of an axis."""
    return jnp.pad(array, [(0, int(i == axis)) for i in range(array.ndim)])


def _run(
    name: str, backend: str | None, lhs: Array, other: Array, *rest: Array | None, **kw: Any
) -> Any:
    """Runs the function called `name` of the backend's module, on operands of one dtype.

    On TPUs, dtypes for which there is no kernel of ours take XLA's; on Hopper, whatever there is
    none for takes the "cpu" form.
    """
    dtype = jnp.promote_types(lhs.dtype, other.dtype)
    runs = {key: functools.partial(getattr(module, name), **kw) for key, module in BACKENDS.items()}
    own = "tpu" if str(dtype) in tpu.DTYPES else "xla"
    if backend is None:  # The platform's own: what is compiled elsewhere need not be traced.
        runs["tpu"] = functools.partial(runs["tpu"], interpret=False)
        runs["gpu"] = functools.partial(runs["gpu"], interpret=False)
    sides = lhs.shape[1], other.shape[1 if kw.get("transpose_rhs") else -1]
    platforms = {"tpu": own, "default": "cpu"}
    platforms |= gpu.default_on_cuda(name, dtype, sides, kw["out_dtype"])
    operands = lhs.astype(dtype), other.astype(dtype), *rest
    return run_on_backend(name, backend, runs, platforms, *operands)


# ------------------------------------------------------------------------------------------------
# Derivatives


class GmmOptions(NamedTuple):
    """How `product` is to run."""

    transpose_rhs: bool
    backend: str | None
    out_dtype: Any


class WeightOptions(NamedTuple):
    """How `weight_gradient` is to run."""

    num_groups: int
    backend: str | None
    out_dtype: Any
    bias_dtype: Any  # None for no sums of grad.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    options: GmmOptions,
    lhs: Array,
    rhs: Array,
    bias: Array | None,
    sizes: Array,
    offset: Array | None,
) -> Array:
    """Is `gmm`, of operands that are checked and vary alike."""
    transpose_rhs, backend, dtype = options
    kw = {"transpose_rhs": transpose_rhs, "out_dtype": dtype}
    if lhs.shape[1] == 0:  # Backends sum something.
        lhs, rhs = widened(lhs, 1), widened(rhs, 2 if transpose_rhs else 1)
    return _run("gmm", backend, lhs, rhs, sizes, bias, offset, **kw)


def _product_forward(options: GmmOptions, *operands: Any) -> tuple[Array, tuple[Any, ...]]:
    return product(options, *operands), operands


def _product_backward(
    options: GmmOptions, operands: tuple[Any, ...], grad: Array
) -> tuple[Array | None, ...]:
    lhs, rhs, bias, sizes, offset = operands
    turned = GmmOptions(not options.transpose_rhs, options.backend, lhs.dtype)
    lhs_grad = product(turned, grad, rhs, None, sizes, offset)
    bias_dtype = None if bias is None else bias.dtype
    weights = WeightOptions(rhs.shape[0], options.backend, rhs.dtype, bias_dtype)
    if not options.transpose_rhs:
        made = weight_gradient(weights, lhs, grad, sizes, offset)
        rhs_grad, bias_grad = made if bias_dtype is not None else (made, None)
        return lhs_grad, rhs_grad, bias_grad, None, None
    plain = weights._replace(bias_dtype=None)
    rhs_grad, bias_grad = weight_gradient(plain, grad, lhs, sizes, offset), None
    if bias_dtype is not None:  # Sums are made for the second operand, so grad has to be it.
        ones = jnp.ones_like(grad[:, :1])
        made = weight_gradient(plain._replace(out_dtype=bias_dtype), ones, grad, sizes, offset)
        bias_grad = made[:, 0]
    return lhs_grad, rhs_grad, bias_grad, None, None


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weight_gradient(
    options: WeightOptions, lhs: Array, grad: Array, sizes: Array, offset: Array | None
) -> Any:
    """Is `gmm_weight_gradient`; with the sums of grad, (result, sums), if `bias_dtype` is set."""
    num_groups, backend, dtype, bias_dtype = options
    kw = {"num_groups": num_groups, "out_dtype": dtype, "bias_dtype": bias_dtype}
    if lhs.shape[1] == 0:
        wide = weight_gradient(options, widened(lhs, 1), grad, sizes, offset)
        return jax.tree.map(lambda x: x[:, :0] if x.ndim == 3 else x, wide)
    return _run("gmm_weight_gradient", backend, lhs, grad, sizes, offset, **kw)


def _weight_forward(options: WeightOptions, *operands: Any) -> tuple[Any, tuple[Any, ...]]:
    return weight_gradient(options, *operands), operands


def _weight_backward(
    options: WeightOptions, operands: tuple[Any, ...], cotangent: Any
) -> tuple[Array | None, ...]:
    lhs, grad, sizes, offset = operands
    of_matrix, of_sums = (cotangent, None) if options.bias_dtype is None else cotangent
    turned = GmmOptions(True, options.backend, lhs.dtype)
    plain = GmmOptions(False, options.backend, grad.dtype)
    lhs_grad = product(turned, grad, of_matrix, None, sizes, offset)
    grad_grad = product(plain, lhs, of_matrix, of_sums, sizes, offset)
    return lhs_grad, grad_grad, None, None


weight_gradient.defvjp(_weight_forward, _weight_backward)
