"""The check of devices: flipped bits and wrong results are found and named, equal ones are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.tree import map_by_path
from moelib.runs.folder import RunFolder
from moelib.train.watchers.device_check import DeviceCheck, DeviceCheckError
from tests import tiny


def check_on(mesh, **fields):
    check = DeviceCheck.default_config().set(dim=16, **fields).instantiate()
    check.use(mesh)
    return check


def replicas(mesh, *spec, shape=(8, 4), dtype="float32"):
    """Returns an array with this sharding."""
    values = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    return jax.device_put(values, jax.NamedSharding(mesh, jax.P(*spec)))


def flipped(x, device, bit=1):
    """Returns an array, of which a device holds one other bit."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[0] ^= bit
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def test_a_flipped_bit_of_one_replica_is_found_and_named():
    mesh = tiny.mesh(data=4, fsdp=2)
    check = check_on(mesh)
    dtypes = ("float32", "bfloat16", "int8", "bool", "uint32")
    compared = {dtype: replicas(mesh, dtype=dtype) for dtype in dtypes}
    compared |= {"split": replicas(mesh, "fsdp"), "count": replicas(mesh, shape=())}
    state = {**compared, "sharded": replicas(mesh, ("data", "fsdp"))}
    assert check.check(state) == []
    device = mesh.devices.flat[5]
    for name, x in compared.items():
        (found,) = check.check({**state, name: flipped(x, device)})
        assert found.startswith(f"{name}: device 5 (process 0, ")
        assert "holds other bits" in found


def test_of_two_replicas_both_are_named():
    mesh = tiny.mesh(data=2, fsdp=4)
    x = replicas(mesh, "fsdp")
    (found,) = check_on(mesh).check({"w": flipped(x, mesh.devices.flat[6])})
    assert found.startswith("w: device 2 (process 0")
    assert ", 6 (process 0" in found


def test_a_device_that_computes_something_else_is_named():
    mesh = tiny.mesh(expert=2, fsdp=4)
    check = check_on(mesh)
    assert check.check({}) == []
    check._seeds = flipped(check._seeds, mesh.devices.flat[2])
    found = check.check({})
    assert len(found) == 6
    assert "bfloat16 gradient of x: device 2 (process 0" in found[0]
    assert "computes other bits" in found[0]


def test_a_result_that_changes_on_all_devices_is_found():
    check = check_on(tiny.mesh(data=1))
    assert check.check({}) == []
    check._seeds = check._seeds + jnp.uint32(1)
    assert check.check({}) == ["All devices compute other bits than at the first check."]


@pytest.mark.parametrize(("on_difference", "status"), [("stop", 2), ("restart", 88)])
def test_the_error_names_the_step_and_the_exit_status_is_chosen(on_difference, status):
    error = check_on(tiny.mesh(data=1), on_difference=on_difference).error(7, ["w", "x", "y", "z"])
    assert "step 7: w x y And 1 more." in str(error)
    assert error.exit_status == status


@pytest.mark.parametrize("field", ["every_n_steps", "dim"])
def test_numbers_that_are_not_positive_are_refused(field):
    with pytest.raises(ValueError, match=f"DeviceCheck.Config.{field}=0"):
        DeviceCheck.default_config().set(**{field: 0}).instantiate()


@pytest.mark.parametrize(("flip_at", "found_at"), [(5, 6), (7, 7)])
def test_a_flip_in_a_run_ends_it_before_the_next_save(tmp_path, flip_at, found_at):
    cfg = tiny.trainer_config(tmp_path, mesh_shape=(1, 4, 1, 2, 1, 1), evaler=False)
    cfg.set(max_step=7 if found_at == 7 else 8)
    cfg.watchers["device_check"] = DeviceCheck.default_config().set(dim=16, every_n_steps=2)
    trainer = cfg.instantiate(parent=None)

    def flip(_):
        if trainer.step == flip_at:
            state, device = trainer.trainer_state, trainer.mesh().devices.flat[3]
            of_table = lambda path, x: flipped(x, device) if path == "table" else x
            trainer._state = state._replace(model=map_by_path(of_table, state.model))

    tiny.after_each_step(trainer, flip)
    with pytest.raises(DeviceCheckError, match=rf"step {found_at}: .*model/table: device") as info:
        trainer.run()
    assert "3 (process 0" in str(info.value)
    assert trainer.checkpointer.latest_step() == 4
    events = {x["event"]: x for x in RunFolder(tmp_path).events()}
    assert events["device_difference"]["step"] == found_at
    assert events["end"]["error"].startswith("DeviceCheckError: ")
