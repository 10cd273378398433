"""The walk over a trace enters every kind of inner jaxpr, and counts trips of loops."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from moelib.core.jaxpr import abstract_parameters, inner_jaxprs, walk
from moelib.core.param import Cast, ParameterSpec

X = jax.ShapeDtypeStruct((8,), jnp.float32)


@jax.custom_vjp
def _custom_vjp(x):
    return jnp.sin(x)


_custom_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))


@jax.custom_jvp
def _custom_jvp(x):
    return jnp.sin(x)


_custom_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0]))


def _scan(x):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, length=5)[0]


def _nested_scan(x):
    return jax.lax.scan(lambda carry, _: (_scan(carry), None), x, length=3)[0]


def _while(x):
    return jax.lax.while_loop(lambda x: jnp.sin(x)[0] < 3, jnp.sin, x)


def _cond(x):
    return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: -jnp.sin(x), x)


def _shard_map(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    ("function", "sines", "executions"),
    [
        (jnp.sin, 1, 1),
        (jax.jit(jnp.sin), 1, 1),
        (jax.checkpoint(jnp.sin), 1, 1),
        (_custom_vjp, 1, 1),
        (_custom_jvp, 1, 1),
        (_scan, 1, 5),
        (_nested_scan, 1, 15),
        (_while, 2, 1),
        (_cond, 2, 1),
        (_shard_map, 1, 1),
    ],
)
def test_a_walk_finds_equations_inside_others_and_how_often_they_run(function, sines, executions):
    found = [s for s in walk(jax.make_jaxpr(function)(X)) if s.eqn.primitive.name == "sin"]
    assert [site.executions for site in found] == [executions] * sines


def test_opaque_primitives_are_yielded_but_not_entered():
    jaxpr = jax.make_jaxpr(lambda x: _scan(_while(x)))(X)
    names = collections.Counter(s.eqn.primitive.name for s in walk(jaxpr, opaque=("while",)))
    assert (names["while"], names["sin"]) == (1, 1)


def test_inner_jaxprs_have_names_and_trip_counts():
    (loop,) = jax.make_jaxpr(_while)(X).jaxpr.eqns
    parts = [(name, trips) for name, _, trips in inner_jaxprs(loop)]
    assert parts == [("cond_jaxpr", None), ("body_jaxpr", None)]
    branches = [eqn for eqn in jax.make_jaxpr(_cond)(X).jaxpr.eqns if "branches" in eqn.params]
    assert [each.name for each in inner_jaxprs(branches[0])] == ["branches[0]", "branches[1]"]


def test_parameters_are_cast_as_a_step_casts_them():
    specs = {
        "weight": ParameterSpec((4, 8), ("embed", "ffn"), "float32"),
        "router": ParameterSpec((4, 2), ("embed", None), "float32", cast=Cast.NEVER),
    }
    params = abstract_parameters(specs, "bfloat16")
    assert (params["weight"].shape, params["weight"].dtype) == ((4, 8), jnp.bfloat16)
    assert params["router"].dtype == abstract_parameters(specs)["weight"].dtype == jnp.float32
