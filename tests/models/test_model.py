"""Models in parts: the parts compose to the forward pass, and no override is ignored."""

import numpy as np
import pytest

from moelib.core.config import config_for_class
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.models.causal_lm import CausalLM
from tests import tiny
from tests.layers.calling import initial


def test_the_parts_of_a_model_compose_to_its_forward_pass():
    model = tiny.dense_model(tiny.VOCAB_SIZE).instantiate(parent=None)
    params, batch = initial(model), tiny.packed_batch(0)

    def run(method, *inputs):
        args = {"is_training": False, "method": method}
        return functional(model, None, params, inputs, **args)[0]

    x, side_inputs = run("before", batch)
    stack = model.stack
    y, _ = functional(stack, None, params["decoder"], {"x": x, **side_inputs}, is_training=False)
    loss, _ = run("after", y, batch)
    want, _ = run("forward", batch)
    np.testing.assert_array_equal(loss.mean, want.mean)
    np.testing.assert_array_equal(model.token_counts(batch)[0], want.weight)


class Hidden(CausalLM):
    """Overrides a method that the loss does not call."""

    def hidden(self, batch):
        return super().hidden(batch) * 0


def test_an_override_that_training_would_ignore_is_refused():
    fields = {name: x for name, x in tiny.model_config().items() if name != "klass"}
    with pytest.raises(UserError, match=r"Hidden overrides hidden.*before and after"):
        Hidden.default_config().set(**fields).instantiate(parent=None)


class Plain:
    """A class without a config."""


def test_a_layer_that_is_no_model_is_refused(tmp_path):
    cfg = tiny.trainer_config(tmp_path)
    layer = tiny.transformer_layer().set(input_dim=16)
    with pytest.raises(UserError, match=r"model is a TransformerLayer; set a .*model\.Model"):
        cfg.set(model=layer).instantiate(parent=None)
    with pytest.raises(
        UserError, match=r"Config\.model=.*a class, expected .*default_config\(\) of Hidden"
    ):
        cfg.set(model=Hidden)
    with pytest.raises(UserError, match=r"model is a Plain; set a .*model\.Model"):
        cfg.set(model=config_for_class(Plain)).instantiate(parent=None)


def test_a_negative_size_of_the_model_is_named():
    with pytest.raises(UserError, match=r"CausalLM\.Config\.dim=-64: expected int >= 1"):
        tiny.model_config().set(dim=-64)
