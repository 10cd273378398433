"""`verify_config`: from a config to a report."""

import functools
import itertools
import tempfile

import jax
import pytest

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.norm import RMSNorm
from moelib.layers.remat import remat
from moelib.parallel.pipeline.schedule import Schedule
from moelib.verify.early_checks import EARLY_CHECKS
from moelib.verify.mesh_checks import MESH_CHECKS
from moelib.verify.outcome import COMPILED, Status
from moelib.verify.run import run_checks, verify_config
from moelib.verify.shrink import runnable
from moelib.verify.single_device import SINGLE_DEVICE_CHECKS
from moelib.verify.step_probe import Probe, narrow_layers
from tests.tiny import model_config, plain_moe, stacked, trainer_config, transformer_layer
from tests.verify import planted
from tests.verify.tiny import moe, outcomes, tiny


def test_a_correct_config_passes_on_the_meshes_of_a_list():
    # The loss is correct, though its name is not that of its field.
    trainer_config = tiny(**moe(planted.WithALossOfItsOwn))
    # --8<-- [start:verify]
    report = verify_config(
        trainer_config, num_devices=4, meshes="expert=2,model=2", without=["hosts", "bfloat16"]
    )
    for outcome in report.outcomes:
        print(outcome.mesh, outcome.check, outcome.status, outcome.detail)
    # --8<-- [end:verify]
    assert report.status is Status.PASSED, report.lines()
    assert list(report.meshes) == ["expert=2,model=2"]
    skipped = {each.check: each.detail for each in report.outcomes if each.status is Status.SKIPPED}
    # No Hugging Face family has such layers.
    assert skipped.keys() == {
        "hosts",
        "quantized",
        "exported",
        "bfloat16",
    }
    assert [each.check for each in report.outcomes] == [
        "built",
        *EARLY_CHECKS,
        COMPILED,
        *SINGLE_DEVICE_CHECKS,
        COMPILED,
        *MESH_CHECKS,
        "bfloat16",
    ]
    assert {change.path for change in report.changes} >= {"max_step", "input.seq_len"}
    assert trainer_config.max_step == 4  # The config itself is not changed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("pipeline=2,fsdp=2", {"pipeline_schedule": Schedule.ZB_V, "num_microbatches": 4}),
        ("expert=2,model=2", {"num_microbatches": 2}),
    ],
)
def test_factors_and_norms_of_outputs_pass_every_check(mesh, fields):
    norm = RMSNorm.default_config()
    layer = transformer_layer(plain_moe(), num_heads=4, num_kv_heads=2)
    layer.self_attention.set(score_scale=0.3, rotated_qk_norm=norm)
    layer.set(norm=None, output_norm=norm, residual_scale=0.5)
    decoder = stacked(layer, num_layers=4, remat=config_for_function(remat))
    model = model_config(decoder, lm_head=None, logit_divisor=3.0)
    model.embedding.scale = 6.0
    cfg = trainer_config("unused", model=model, max_step=4, evaler=False)
    report = verify_config(
        cfg.set(**fields), num_devices=4, meshes=mesh, without=["hosts", "bfloat16"]
    )
    assert report.status is Status.PASSED, report.lines()


@pytest.mark.parametrize("num_devices", [1, 1000])
def test_too_few_devices_are_refused(num_devices):
    jax.devices()  # Their number is settled when JAX starts.
    with pytest.raises(UserError, match=f"num_devices={num_devices}"):
        verify_config(tiny(), num_devices=num_devices)


def test_the_name_of_a_config_is_no_config():
    with pytest.raises(UserError, match="trainer_config is 'flame'"):
        verify_config("flame")


def test_a_check_to_leave_out_must_exist():
    with pytest.raises(UserError, match="without='grads'"):
        verify_config(tiny(), without=["grads"])


def test_checks_go_on_after_a_failure_and_can_be_left_out():
    cfg = tiny().set(mesh_rules=[("gpu-.*", planted.BrokenRule.default_config())])
    with tempfile.TemporaryDirectory() as folder:
        run = functools.partial(run_checks, cfg, [], jax.devices()[:1], folder)
        first = list(itertools.islice(run(keep_going=True, without=["initial"]), 3))
    assert [(each.check, each.status) for each in first] == [
        ("built", Status.PASSED),
        ("rules", Status.FAILED),
        ("initial", Status.SKIPPED),
    ]


def in_its_own_dtype():
    return tiny(feed_forward=planted.InItsOwnDtype.default_config().set(hidden_dim=24))


def test_a_layer_in_bfloat16_is_named_unless_verify_can_set_its_dtype():
    for cfg, names in (
        (in_its_own_dtype(), ["decoder/layer0/feed_forward"]),
        (runnable(in_its_own_dtype())[0], []),
    ):
        assert narrow_layers(Probe(cfg.set(dir="unused"), {}, jax.devices()[:1]).trainer) == names


@pytest.mark.slow
def test_a_failure_of_a_layer_in_bfloat16_says_what_to_set():
    failed = outcomes(in_its_own_dtype())[-1]
    assert failed.status is Status.FAILED
    assert "_dtype, which verify sets to float32" in failed.detail
