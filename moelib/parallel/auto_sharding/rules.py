"""Dimension rules: which dimensions of an operation's operands and results are the same.

A rule is like an einsum, and like the sharding rules of Shardy: the product of two matrices has the
rule "m k, k n -> m n". `rule_of` returns the rule of an equation of a jaxpr;
`register_dimension_rule` declares the rules of kernels, which it cannot read.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from moelib.core.errors import UserError

Names = tuple[Hashable, ...]  # A name for each dimension of an array.

# Primitives that compute each entry of their results from the same entries of their operands.
_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh axis_index bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
digamma div empty eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
imag integer_pow iota is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul name ne
neg nextafter not one_minus_square optimization_barrier or platform_index pmax pmin polygamma
population_count pow ppermute psum psum_invariant pvary random_bits random_fold_in random_gamma
random_seed random_split random_unwrap random_wrap real reduce_precision regularized_incomplete_beta
rem rng_uniform round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
"""
_ELEMENTWISE = frozenset(_NAMES.split())
# Primitives that mix all entries along the axes that one of these parameters gives.
_ALONG_AXES = ("approx_top_k", "concatenate", "cum", "rev", "sort", "split", "top_k")
_AXES = ("axis", "dimension", "dimensions", "reduction_dimension")


class DimensionRule(NamedTuple):
    """A name for each dimension of each operand and result of an operation.

    Dimensions of one name are sharded together. If no result has a name, then each shard computes
    a term of the results, which are summed over the shards.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    replicated: Collection[Hashable] = ()  # Names that the operation needs whole.
    flops: float = 0.0
    windows: Collection[Hashable] = ()  # Names that XLA must not see sharded, even to gather them.


def parse_dimension_rule(text: str) -> DimensionRule:
    """Returns the rule of a text such as "m k, g k n, g -> m n; replicated g".

    Operands are separated by commas, dimensions by spaces; a scalar has none.

    Raises:
        UserError: If the text is no such rule.
    """
    match = re.fullmatch(r"([\w\s,]*)->([\w\s,]*)(?:;\s*replicated\s+([\w\s]+))?", text)
    if match is None:
        raise UserError(
            f"dimension rule {text!r}: write the names of each operand's and result's dimensions, "
            'such as "m k, k n -> m n" or "m k, g k n, g -> m n; replicated g".'
        )
    operands, results = (
        tuple(tuple(array.split()) for array in side.split(",")) for side in match.group(1, 2)
    )
    replicated = frozenset((match[3] or "").split())
    if unknown := replicated - {name for names in (*operands, *results) for name in names}:
        raise UserError(f"dimension rule {text!r}: no array has the dimension {min(unknown)!r}.")
    return DimensionRule(operands, results, replicated)


_registered: dict[str, DimensionRule] = {}


def register_dimension_rule(operation: str, rule: str) -> None:
    """Declares the dimensions of an operation that `auto_partition_specs` cannot read.

    Args:
        operation: Name of a primitive, or "pallas_call:NAME", "ffi_call:NAME" and "jit:NAME" of one
            kernel, custom call or function.
        rule: Its rule, as `parse_dimension_rule` reads it.
    """
    _registered[operation] = parse_dimension_rule(rule)


def operation_name(eqn: Any) -> str:
    """Returns the name by which `register_dimension_rule` knows an equation."""
    named = (eqn.params.get(key) for key in ("name", "target_name", "target"))
    label = next((str(each) for each in named if each is not None), "")
    return f"{eqn.primitive.name}:{label}" if label else eqn.primitive.name


def registered_rule(eqn: Any) -> DimensionRule | None:
    """Returns the declared rule of an equation, or None.

    Raises:
        UserError: If the rule has other numbers of operands, results or dimensions.
    """
    name = operation_name(eqn)
    rule = _registered.get(name) or _registered.get(eqn.primitive.name)
    if rule is None:
        return None
    for kind, names, variables in (
        ("operands", rule.operands, eqn.invars),
        ("results", rule.results, eqn.outvars),
    ):
        ranks, found = [len(each) for each in names], [len(v.aval.shape) for v in variables]
        if ranks != found:
            raise UserError(
                f"dimension rule of {name}: its {kind} have ranks {ranks}, but those of the call "
                f"have {found}."
            )
    sizes = {
        name: size
        for names, v in zip(rule.operands, eqn.invars, strict=True)
        for name, size in zip(names, v.aval.shape, strict=True)
    }
    kept = {name for names in rule.results for name in names}
    flops = 2.0 * math.prod(sizes.values()) if sizes.keys() - kept - set(rule.replicated) else 0.0
    return rule._replace(flops=flops)


def rule_of(eqn: Any, num_shards: int) -> DimensionRule | None:
    """Returns the rule of an equation, or None if it is unknown.

    Args:
        eqn: An equation of a jaxpr, without jaxprs inside.
        num_shards: Number of shards; it decides which dimensions a reshape keeps.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE:
        return _elementwise(eqn)
    if name.startswith(_ALONG_AXES):
        return _positional(eqn, whole=next(params[key] for key in _AXES if key in params))
    if name.startswith(("reduce_window", "select_and_")):  # Pooling.
        windows = params.get("window_dimensions")
        whole = None if windows is None else [i for i, n in enumerate(windows) if n > 1]
        return None if whole is None else _positional(eqn, whole=whole)
    removed = params.get("axes", params.get("dimensions"))
    if name == "squeeze" or (name.startswith(("reduce", "argm")) and removed is not None):
        return _positional(eqn, removed=removed)  # Not reduce_scatter, which lacks the parameter.
    if name.startswith("scatter"):
        return _scatter(eqn)
    if name == "reshape":
        return _reshape(eqn, num_shards)
    make = _RULES.get(name)
    return None if make is None else make(eqn)


# -- Rules of primitives -------------------------------------------------------------------------
# The name of a dimension is (array, dimension), or a number for a dimension that arrays share.


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(variable.aval, "shape", ()))


def _own(array: str, variable: Any) -> list[Hashable]:
    """Returns names that no other array has."""
    return [(array, i) for i in range(len(_shape(variable)))]


def _elementwise(eqn: Any) -> DimensionRule:
    """Equal shapes; scalars and dimensions of size 1 are broadcast."""
    if len(eqn.invars) == len(eqn.outvars) > 1:  # Each result has the shape of its operand.
        arrays = tuple(tuple(_own(f"array{k}", v)) for k, v in enumerate(eqn.invars))
        return DimensionRule(arrays, arrays)
    shape = _shape(eqn.outvars[0])
    operands = tuple(
        tuple(i if own[i : i + 1] == shape[i : i + 1] else (k, i) for i in range(len(own)))
        for k, own in enumerate(map(_shape, eqn.invars))
    )
    return DimensionRule(operands, (tuple(range(len(shape))),) * len(eqn.outvars))


def _positional(eqn: Any, *, removed: Any = (), whole: Any = ()) -> DimensionRule:
    """Arrays share their dimensions by position; results lack the `removed` ones.

    Operands are scalars, or have the rank of the first one. The axes `whole` are not sharded.
    """
    names = tuple(range(len(_shape(eqn.invars[0]))))
    removed, whole = (
        {axis % len(names) for axis in (axes if isinstance(axes, Iterable) else (axes,))}
        for axes in (removed, whole)
    )
    operands = tuple(names if _shape(v) else () for v in eqn.invars)
    kept = tuple(i for i in names if i not in removed)
    return DimensionRule(operands, (kept,) * len(eqn.outvars), whole)


def _equal_sizes(eqn: Any) -> DimensionRule:
    """Arrays share the dimensions in which their sizes are equal; the others are needed whole."""
    first, num_operands = _shape(eqn.invars[0]), len(eqn.invars)
    arrays: list[Names] = []
    whole = {i for i, pads in enumerate(eqn.params.get("padding_config", ())) if any(pads)}
    for k, v in enumerate((*eqn.invars, *eqn.outvars)):
        arrays.append(tuple(i if n == first[i] else (k, i) for i, n in enumerate(_shape(v))))
        whole |= {each for name in arrays[k] if isinstance(name, tuple) for each in (name, name[1])}
    return DimensionRule(tuple(arrays[:num_operands]), tuple(arrays[num_operands:]), whole)


def _broadcast_in_dim(eqn: Any) -> DimensionRule:
    shape, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    positions = eqn.params["broadcast_dimensions"]
    names = tuple(
        name if shape[i] == result[name] else ("one", i) for i, name in enumerate(positions)
    )
    return DimensionRule((names, *((),) * (len(eqn.invars) - 1)), (tuple(range(len(result))),))


def _transpose(eqn: Any) -> DimensionRule:
    order = tuple(eqn.params["permutation"])
    return DimensionRule((tuple(range(len(order))),), (order,))


def _unstack(eqn: Any) -> DimensionRule:
    return _positional(eqn, removed=eqn.params["axis"], whole=eqn.params["axis"])


def _stack(eqn: Any) -> DimensionRule:
    names = tuple(range(len(_shape(eqn.outvars[0]))))
    new = eqn.params["axis"] % len(names)
    return DimensionRule((names[:new] + names[new + 1 :],) * len(eqn.invars), (names,), {new})


def _reshape(eqn: Any, num_shards: int) -> DimensionRule:
    """Matches runs of dimensions with equal products.

    The outermost dimensions of two such runs are sharded alike if `num_shards` divides both.
    """
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    names, results = _own("operand", eqn.invars[0]), _own("result", eqn.outvars[0])
    changed: set[Hashable] = set()
    if 0 not in before:
        for old, new in _equal_products(before, after):
            divide = before[old[0]] % num_shards == after[new[0]] % num_shards == 0
            if divide or len(old) == len(new) == 1:
                results[new[0]] = names[old[0]]
                old, new = old[1:], new[1:]
            changed |= {names[i] for i in old} | {results[i] for i in new}
    scalars = ((),) * (len(eqn.invars) - 1)
    return DimensionRule((tuple(names), *scalars), (tuple(results),), changed)


def _equal_products(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Returns the shortest runs of dimensions, sizes of 1 apart, whose products are equal."""
    sides = [[i for i, size in enumerate(shape) if size > 1] for shape in (before, after)]
    runs = []
    while sides[0]:
        old, new = ([side.pop(0)] for side in sides)
        while (a := math.prod(before[i] for i in old)) != (b := math.prod(after[i] for i in new)):
            (old if a < b else new).append(sides[0 if a < b else 1].pop(0))
        runs.append((old, new))
    return runs


def _dot_general(eqn: Any) -> DimensionRule:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    a, b = _own("a", eqn.invars[0]), _own("b", eqn.invars[1])
    for i, j in zip((*left, *left_batch), (*right, *right_batch), strict=True):
        b[j] = a[i]
    batch = [a[i] for i in left_batch]
    kept = [
        name
        for side, used in ((a, {*left, *left_batch}), (b, {*right, *right_batch}))
        for i, name in enumerate(side)
        if i not in used
    ]
    contracted = math.prod(_shape(eqn.invars[0])[i] for i in left)
    flops = 2.0 * math.prod(_shape(eqn.outvars[0])) * contracted
    return DimensionRule((tuple(a), tuple(b)), ((*batch, *kept),), flops=flops)


def _ragged_dot(eqn: Any) -> DimensionRule | None:
    """[m, k] times one of [g, k, n] for each row; the partitioner cannot shard the groups."""
    rows, weights = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    result = _shape(eqn.outvars[0])
    if (len(rows), len(weights)) != (2, 3) or result != (rows[0], weights[2]):
        return None
    flops = 2.0 * rows[0] * rows[1] * weights[2]
    names = (("m", "k"), ("g", "k", "n"), ("g",))
    return DimensionRule(names, (("m", "n"),), {"g"}, flops)


def _convolution(eqn: Any) -> DimensionRule:
    """A product over the window and the channels; its windows are not sharded.

    Where a window, or a dimension that it moves along, is sharded, XLA's partitioner may multiply
    values or gradients by the sizes of other mesh axes (seen with JAX 0.12).
    """
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    (batch, channel, *space), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    x, w, y = _own("x", eqn.invars[0]), _own("w", eqn.invars[1]), _own("y", eqn.outvars[0])
    kernel = _shape(eqn.invars[1])
    y[numbers.out_spec[0]], y[numbers.out_spec[1]] = x[batch], w[out]
    windows, whole = {w[i] for i in window}, set[Hashable]()
    if groups == 1:
        w[into] = x[channel]
    else:  # Channels stay in their group.
        x[channel] = w[out]
        whole.add(w[into])
    for i, j, k in zip(space, numbers.out_spec[2:], window, strict=True):
        if kernel[k] == 1 and _shape(eqn.invars[0])[i] == _shape(eqn.outvars[0])[j]:
            y[j] = x[i]
        else:
            windows |= {x[i], y[j]}
    if eqn.params.get("batch_group_count", 1) > 1:
        windows |= {*x, *w, *y}
    flops = 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) / max(kernel[out], 1)
    return DimensionRule((tuple(x), tuple(w)), (tuple(y),), whole, flops, windows)


def _gather(eqn: Any) -> DimensionRule:
    """Reads slices: a dimension that is searched is summed over, as in a product with one-hot."""
    n = eqn.params["dimension_numbers"]
    batches = n.operand_batching_dims, n.start_indices_batching_dims
    variables = (*eqn.invars, *eqn.outvars)
    (x, index, part), whole = _indexed(variables, n.offset_dims, n.collapsed_slice_dims, batches)
    return DimensionRule((x, index), (part,), whole)


def _scatter(eqn: Any) -> DimensionRule:
    """Writes or adds updates; each shard takes those in its range."""
    n = eqn.params["dimension_numbers"]
    batches = n.operand_batching_dims, n.scatter_indices_batching_dims
    arrays, whole = _indexed(eqn.invars, n.update_window_dims, n.inserted_window_dims, batches)
    return DimensionRule(arrays, arrays[:1], whole)


def _indexed(
    variables: Sequence[Any],
    window: Sequence[int],
    collapsed: Sequence[int],
    batches: tuple[Sequence[int], Sequence[int]],
) -> tuple[tuple[Names, ...], set[Hashable]]:
    """Returns the names of an array, of indices into it and of slices, and those needed whole.

    Args:
        variables: The array, the indices and the slices.
        window: Dimensions of the slices within the array.
        collapsed: Dimensions of the array that the slices lack.
        batches: Batch dimensions of the array, and of the indices.
    """
    x, index, part = (_own(name, v) for name, v in zip("xip", variables, strict=True))
    for i, j in zip(*batches, strict=True):
        index[j] = x[i]
    kept = [i for i in range(len(x)) if i not in {*collapsed, *batches[0]}]
    whole = set[Hashable]()
    for j, i in zip(window, kept, strict=True):
        if _shape(variables[2])[j] == _shape(variables[0])[i]:
            part[j] = x[i]
        else:
            whole |= {part[j], x[i]}
    rest = (j for j in range(len(part)) if j not in window)
    for j, name in zip(rest, index, strict=False):
        part[j] = name
    return (tuple(x), tuple(index), tuple(part)), whole


_RULES: dict[str, Callable[[Any], DimensionRule | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _equal_sizes,
    "dynamic_update_slice": _equal_sizes,
    "gather": _gather,
    "pad": _equal_sizes,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "slice": _equal_sizes,
    "stack": _stack,
    "tile": _equal_sizes,
    "transpose": _transpose,
    "unstack": _unstack,
}
