import logging

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from moelib.kernels.flash_attention import flash_attention
from tests.kernels.gpu_topology import H100


def test_gpus_get_the_xla_form_and_are_told_once(caplog):
    device = AbstractDevice(device_kind=H100, num_cores=132, platform="gpu")
    q, kv = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with caplog.at_level(logging.INFO):
        jax.eval_shape(flash_attention, q, kv, kv)
        assert not [r for r in caplog.records if "on GPUs" in r.getMessage()]
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            for _ in range(2):
                jax.eval_shape(flash_attention, q, kv, kv)
    (told,) = [r.getMessage() for r in caplog.records if "on GPUs" in r.getMessage()]
    assert told.startswith("flash_attention takes the xla form on GPUs: there is no kernel of ours")
