"""Verification of a config that quantizes: what is skipped, and on what grounds."""

import jax
import pytest

from moelib.core.param import specs_by_path
from moelib.layers.quantization import Quantization
from moelib.verify.mesh_checks import MeshRun
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.plain import Plain
from moelib.verify.reference import Reference
from moelib.verify.step_probe import Probe
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


@pytest.mark.parametrize(
    ("axes", "scheme", "is_skipped"),
    [
        ({"seq": 2}, Quantization.FP8_BLOCK, True),
        ({"seq": 2}, None, False),
        ({"expert": 2}, Quantization.FP8_BLOCK, False),
    ],
)
def test_gradients_of_a_scheme_are_not_compared_over_seq(tmp_path, axes, scheme, is_skipped):
    model = tiny.model_config().set(quantization=scheme)
    cfg = tiny.trainer_config(tmp_path, model=model, evaler=False)
    probe = Probe(cfg, axes, jax.devices()[:2])
    run = MeshRun(Reference(None, None, (), (), False, Plain(probe.trainer)), probe)
    if not is_skipped:
        run._require_equal_rounding()
        return
    for check in (run.gradients, run.metrics):
        with pytest.raises(CheckSkippedError, match="quantization=FP8_BLOCK: attention over"):
            check()


def test_a_model_without_a_scheme_is_compared_with_its_plain_form(tmp_path):
    cfg = tiny.trainer_config(tmp_path, model=tiny.model_config(), evaler=False)
    plain = Plain(cfg.instantiate(parent=None))
    Reference(None, None, (), (), False, plain).check_plain()
