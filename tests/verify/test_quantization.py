"""Verification of a config that quantizes: what is skipped, and on what grounds."""

import jax
import numpy as np
import pytest

from moelib.core.param import is_spec, specs_by_path
from moelib.layers.quantization import Quantization
from moelib.train.state import TrainerState
from moelib.verify.compare import Difference
from moelib.verify.mesh_checks import MeshRun
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.plain import Plain
from moelib.verify.reference import Reference
from moelib.verify.step_probe import Observed
from tests import tiny


def test_the_plain_form_has_no_scheme_and_names_what_it_leaves_out(tmp_path):
    model = tiny.model_config()
    model.decoder.quantization = Quantization.FP8_BLOCK
    model.decoder.block[0].feed_forward.quantization = Quantization.NONE
    cfg = tiny.trainer_config(tmp_path, model=model, evaler=False)
    plain = Plain(cfg.instantiate(parent=None))
    specs = specs_by_path(plain.model.create_parameter_specs_recursively())
    assert not any(spec.quantization for spec in specs.values())
    assert "decoder.quantization=FP8_BLOCK" in plain.unquantized
    known = Reference(None, None, (), (), False, plain)
    with pytest.raises(CheckSkippedError, match=r"decoder\.quantization=FP8_BLOCK"):
        known.check_plain()


def mesh_run(tmp_path, scheme, factor, **metrics):
    """Returns a run whose gradients are `factor` times those of the reference."""
    model = tiny.model_config().set(quantization=scheme)
    trainer = tiny.trainer_config(tmp_path, model=model, evaler=False).instantiate(parent=None)
    shapes = trainer.trainer_state_specs.model
    gradients = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes, is_leaf=is_spec)
    batch = {"input_ids": np.zeros((8, 4), np.int32)}
    want = Observed(None, {"loss": 2.0, "objective": 2.0, "entropy": 1.0}, gradients, {}, {})
    scaled = jax.tree.map(lambda x: x * np.float32(factor), gradients)
    got = want._replace(gradients=scaled, metrics=want.metrics | metrics)
    start = TrainerState(0, None, gradients, None)
    on_one = lambda state, batch, gradients: want
    known = Reference(on_one, start, (batch,), (want,), False, Plain(trainer))
    run = MeshRun(known, lambda state, batch, gradients: got)
    run.__dict__["_steps"] = [got]
    return run


def test_numbers_within_the_rounding_of_a_scheme_are_reported(tmp_path):
    run = mesh_run(tmp_path, Quantization.FP8_BLOCK, 1.01, loss=2.001, entropy=1.1)
    for check in (run.gradients, run.loss, run.metrics):
        assert str(check()).startswith("within the rounding of quantization=FP8_BLOCK: ")
    equal = mesh_run(tmp_path, Quantization.FP8_BLOCK, 1.0)
    assert (equal.gradients(), equal.loss(), equal.metrics()) == (None, None, None)


def test_larger_errors_of_a_scheme_are_failures(tmp_path):
    run = mesh_run(tmp_path, Quantization.FP8_BLOCK, 1.5, loss=2.1, entropy=2.0)
    with pytest.raises(CheckFailedError, match=r"The gradient of .* on the mesh has an error"):
        run.gradients()
    assert isinstance(run.metrics(), Difference)
    with pytest.raises(CheckFailedError, match=r"loss.* is 2\.1.*entropy.* is 2"):
        run.loss()


@pytest.mark.parametrize("scheme", [None, Quantization.NONE])
def test_without_a_scheme_nothing_may_be_rounded(tmp_path, scheme):
    run = mesh_run(tmp_path, scheme, 1.001, entropy=1.001)
    assert isinstance(run.gradients(), Difference)
    assert isinstance(run.metrics(), Difference)


def test_a_model_without_a_scheme_is_compared_with_its_plain_form(tmp_path):
    cfg = tiny.trainer_config(tmp_path, model=tiny.model_config(), evaler=False)
    plain = Plain(cfg.instantiate(parent=None))
    Reference(None, None, (), (), False, plain).check_plain()
