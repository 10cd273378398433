import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from moelib.core.param import ParameterSpec
from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, mesh_shape_from_axes
from moelib.parallel.sharding import (
    DEFAULT_RULES,
    PIPELINE_RULES,
    check_mesh_axes,
    check_rules_used,
    constrain,
    current_mesh,
    current_rules,
    keep_axes,
    mesh_axes,
    named_shardings,
    partition_spec,
    sharding_rules,
)

MESH = {"data": 2, "expert": 1, "fsdp": 2, "seq": 1, "model": 2}


def mesh(**axes):
    return create_device_mesh(mesh_shape_from_axes(**axes))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", None, "ffn"), PartitionSpec("fsdp", None, "model")),
        (("experts", "embed", None, "ffn"), PartitionSpec(None, "fsdp", None, "model")),
        (("batch", "sequence"), PartitionSpec(("data", "fsdp"), None)),
        (("vocab", "embed"), PartitionSpec("model", "fsdp")),
        (("norm",), PartitionSpec(None)),
        ((), PartitionSpec()),
    ],
)
def test_the_table_gives_the_sharding(axes, expected):
    assert partition_spec(axes, MESH) == expected


def test_the_table_has_only_axes_of_the_mesh():
    assert {axis for axes in DEFAULT_RULES.values() for axis in axes} <= set(MESH_AXIS_NAMES)


def test_mesh_axes_that_are_absent_or_of_size_1_shard_nothing():
    assert mesh_axes("batch", {"data": 4}) == ("data",)
    assert mesh_axes("batch", {"data": 1, "fsdp": 2}) == ("fsdp",)
    assert mesh_axes("batch", {}) == ()


def test_a_mesh_axis_that_would_shard_two_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"'fsdp'.*'batch'.*'embed'"):
        partition_spec(("batch", "embed"), MESH)


def test_an_unknown_logical_axis_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'embedd'.*'embed'"):
        partition_spec(("embedd",), MESH)
    specs = {"decoder": {"weight": ParameterSpec((8,), ("embedd",))}}
    with pytest.raises(ValueError, match=r"decoder/weight:.*'embedd'"):
        named_shardings(specs, mesh(data=4, model=2))


def test_an_indivisible_dimension_is_refused_with_the_parameters_path():
    specs = {"decoder": {"layer0": {"kv": ParameterSpec((8, 3), ("embed", "kv_heads"))}}}
    message = r"decoder/layer0/kv:.*'kv_heads'.*size 3.*2 \(model=2\)"
    with pytest.raises(ValueError, match=message):
        named_shardings(specs, mesh(data=4, model=2))


def test_a_gathered_array_stays_sharded_over_the_kept_axes():
    split = PartitionSpec(("fsdp", "model"), "expert", None, "model")
    assert keep_axes(split, ("fsdp", "model")) == PartitionSpec(
        ("fsdp", "model"), None, None, "model"
    )
    assert keep_axes(split, ("fsdp", "expert")) == PartitionSpec("fsdp", "expert", None, None)


def test_parameters_get_their_shardings():
    specs = {"up": ParameterSpec((4, 8), ("embed", "ffn")), "scale": ParameterSpec((3,), ("norm",))}
    shardings = named_shardings(specs, mesh(fsdp=4, model=2))
    assert shardings["up"].spec == PartitionSpec("fsdp", "model")
    assert shardings["up"].shard_shape((4, 8)) == (1, 4)
    assert shardings["scale"].shard_shape((3,)) == (3,)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        # Shards of 1,440 of the width 2,880 end in a tile of 128: the rows are sharded instead.
        ((32, 2880, 2880), ("experts", "expert_ffn", "expert_embed"), (None, ("model", "fsdp"))),
        ((64, 64, 2880), ("heads", "head_dim", "embed"), ("model", "fsdp")),
        ((2, 5632, 2880), ("layers", "ffn", "embed"), (None, ("model", "fsdp"))),
        ((32, 1408, 2048), ("experts", "expert_ffn", "expert_embed"), (None, "model", "fsdp")),
        ((32, 2882, 2880), ("experts", "expert_ffn", "expert_embed"), (None, "model", "fsdp")),
        ((32, 28, 2880), ("experts", "expert_ffn", "expert_embed"), (None, "model", "fsdp")),
        ((201088, 2880), ("vocab", "embed"), ("model", "fsdp")),
        ((32, 2880), ("experts", "expert_embed"), (None, "fsdp")),
        ((2, 2880), ("layers", "embed"), (None, "fsdp")),
        ((2880, 64, 64), ("embed", "heads", "head_dim"), ("fsdp", "model")),
    ],
)
def test_rows_are_sharded_where_shards_of_the_width_end_in_a_tile(shape, axes, expected):
    found = partition_spec(axes, MESH, shape=shape)
    assert found == PartitionSpec(*expected, *(None for _ in shape[len(expected) :]))


def test_a_layer_in_a_pipeline_is_sharded_as_its_storage():
    """256 / 2 = 128 is a whole tile, but the pipeline's two ranks store 64 each."""
    sizes = {"data": 2, "fsdp": 2, "pipeline": 2}
    with jax.set_mesh(mesh(**sizes)), sharding_rules(PIPELINE_RULES):
        split = lambda: partition_spec(("ffn", "embed"), sizes, shape=(512, 256))
        assert split() == PartitionSpec(("fsdp", "pipeline"), None)
        inside = []
        of_ranks = PartitionSpec("pipeline")
        jax.shard_map(
            lambda x: inside.append(split()) or x,
            in_specs=of_ranks,
            out_specs=of_ranks,
            axis_names={"pipeline"},
        )(jnp.zeros(2))
    assert inside == [PartitionSpec("fsdp", None)]


def test_rules_change_inside_the_block_only():
    with sharding_rules({"embed": ("data", "fsdp")}):
        assert mesh_axes("embed", MESH) == ("data", "fsdp")
        with sharding_rules({"ffn": ()}):
            assert mesh_axes("ffn", MESH) == ()
            assert mesh_axes("embed", MESH) == ("data", "fsdp")
        assert mesh_axes("ffn", MESH) == ("model",)
    assert current_rules() == DEFAULT_RULES


def test_a_block_yields_the_logical_axes_used_inside():
    with sharding_rules({}) as outer:
        partition_spec(("batch", None), MESH)
        with sharding_rules({"embed": ()}) as used:
            constrain(jnp.ones((3, 5)), ("sequence", None))  # Without a mesh too.
            partition_spec(("heads",), MESH, rules={"heads": ()})  # Asks another table.
        assert used == {"sequence"}
        check_rules_used({"sequence"}, used)
        message = "'embed'"
        with pytest.raises(ValueError, match=message):
            check_rules_used({"embed"}, used)
    assert outer == {"batch", "sequence"}


def test_each_table_has_its_own_trace_and_equal_ones_share_it():
    traced = []

    @jax.jit
    def split(x):
        traced.append(dict(current_rules()))
        return constrain(x, ("batch", None))

    with jax.set_mesh(mesh(data=8)):
        for rules, num_traces in [({}, 1), ({"batch": ()}, 2), ({"batch": []}, 2), ({}, 2)]:
            with sharding_rules(rules):
                spec = split(jnp.zeros((8, 2))).sharding.spec
            assert spec == (PartitionSpec() if rules else PartitionSpec("data")), rules
            assert len(traced) == num_traces


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embedd": ("fsdp",)}, r"'embedd'.*'embed'"),
        ({"embed": ("fdsp",)}, r"'embed'.*'fdsp'.*'fsdp'"),
    ],
)
def test_a_rule_for_an_unknown_axis_is_refused(rules, message):
    with pytest.raises(ValueError, match=message), sharding_rules(rules):
        pass


def test_a_mesh_with_names_of_its_own_may_be_named_in_rules():
    own = jax.make_mesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(own), sharding_rules({"sequence": ("ring",)}):
        assert mesh_axes("sequence", dict(own.shape)) == ("ring",)


def test_without_a_mesh_nothing_is_constrained():
    assert current_mesh() is None
    x = jnp.ones((3, 5))
    assert constrain(x, ("batch", "sequence")) is x


def test_an_activation_is_sharded_by_its_logical_axes():
    axes = ("batch", "sequence", "activation_ffn")
    with jax.set_mesh(mesh(data=2, seq=2, model=2)):
        y = jax.jit(lambda x: constrain(x, axes))(jnp.ones((2, 4, 6)))
        message = r"'batch'.*size 3.*2"
        with pytest.raises(ValueError, match=message):
            constrain(jnp.ones((3, 4, 6)), axes)
    assert y.sharding.spec == PartitionSpec("data", "seq", "model")


def test_inside_a_shard_map_there_is_no_current_mesh():
    seen = []

    def local(x):
        seen.append(current_mesh())
        return constrain(x, ("batch",))

    with jax.set_mesh(mesh(data=8)):
        spec = PartitionSpec("data")
        jax.jit(jax.shard_map(local, in_specs=spec, out_specs=spec))(jnp.ones(8))
    assert seen[0] is None


def test_mesh_axes_without_a_rule_are_refused():
    check_mesh_axes({"pipeline": 1, "data": 8})
    check_mesh_axes({"pipeline": 8}, {"layers": ("pipeline",)})
    with pytest.raises(ValueError, match="pipeline=8"):
        check_mesh_axes({"pipeline": 8})
    with pytest.raises(ValueError, match="fdsp=2"):
        check_mesh_axes({"fdsp": 2})
