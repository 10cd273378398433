"""The page on shardings of any function: its code runs, and prints what it says."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.auto_sharding import foreign_models
from moelib.parallel.auto_sharding import rules
from moelib.planning.choose_specs import choose_specs


@pytest.fixture(autouse=True)
def _promotion():
    with foreign_models():
        yield


# --8<-- [start:loss]
def loss(params, x, y):
    """Returns the squared error of a network with one hidden layer."""
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.square(hidden @ params["down"] - y).mean()


params = {"up": jnp.zeros((256, 1024)), "bias": jnp.zeros(1024), "down": jnp.zeros((1024, 256))}
batch = jnp.ones((8, 256)), jnp.ones((8, 256))
# --8<-- [end:loss]


def test_the_report_names_classes_and_collectives(capsys):
    # --8<-- [start:specs]
    from moelib.parallel.auto_sharding.specs import auto_partition_specs

    found = auto_partition_specs(loss, params, *batch, num_shards=4)
    print(found.report)
    # --8<-- [end:specs]
    assert capsys.readouterr().out == (
        "    1,024 over 4: bias[0], down[0], up[1] (1 all-reduce)\n"
        "predicted: 1 all-reduce of 0.01 MiB\n"
    )
    assert found.specs == {"up": P(None, "model"), "bias": P("model"), "down": P("model")}


def test_the_cheapest_compiled_candidate_is_taken():
    mesh = jax.make_mesh((2, 4), ("fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # --8<-- [start:choose]
    choice = choose_specs(loss, params, *batch, mesh=mesh)
    for each in choice.candidates:
        print(each.name, f"{each.sent_bytes / 1e6:.2f} MB", each.collectives)
    specs = choice.best.specs
    # --8<-- [end:choose]
    assert choice.best.name == "traced"
    assert specs["up"] == P("fsdp", "model")


def test_a_declared_kernel_is_read(monkeypatch):
    monkeypatch.setattr(rules, "_registered", {})
    # --8<-- [start:register]
    from moelib.parallel.auto_sharding.rules import register_dimension_rule

    register_dimension_rule("pallas_call:my_product", "m k, k n -> m n")
    register_dimension_rule("ffi_call:my_grouped_product", "m k, g k n, g -> m n; replicated g")
    # --8<-- [end:register]
    assert set(rules._registered) == {"pallas_call:my_product", "ffi_call:my_grouped_product"}
