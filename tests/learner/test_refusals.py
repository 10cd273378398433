"""Arguments that are refused, each with an error that names it and its value."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core.config import RequiredFieldMissingError, UnknownFieldError
from moelib.core.errors import UserError
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.accumulation import accumulate
from moelib.learner.ema import param_ema
from moelib.learner.learner import Learner, UpdateType
from tests.learner.example import SPECS, arrays, fn, gradients_like, make_learner

PARAMS = arrays(SPECS)
ADAMW = fn(optimizers.adamw_optimizer, learning_rate=0.1)
SGD = fn(optimizers.sgd_optimizer, learning_rate=1.0)
FROZEN = UpdateType.NO_UPDATE


def rules(*update_rules):
    return make_learner(ADAMW, update_rules=update_rules)


def norms(norms_of):
    return make_learner(SGD, norms_of=norms_of, update_rules=[("emb/.*", FROZEN)])


def step(gradients):
    learner = make_learner(ADAMW)
    return learner.update(gradients=gradients, state=learner.init(PARAMS), params=PARAMS)


def microbatches(number, **batch):
    return accumulate(lambda batch, state, sums: None, batch, num_microbatches=number)


def metric_without_a_weight(number):
    def bare(batch, state, sums):
        return jnp.mean(batch), 1.0, {}, {"layer": {"loss": jnp.mean(batch)}}, state

    return accumulate(bare, np.ones(4, np.float32), num_microbatches=number)


REFUSED = [
    (lambda: rules(("layer/qkw", FROZEN)), "update_rules: .*'layer/qkw'.*'layer/qkv'"),
    (lambda: rules(("layer/.*", SGD), ("layer/qkv", FROZEN)), "'layer/qkv'"),
    (lambda: rules(("layer/bias", SGD)), "'layer/bias'"),
    (lambda: make_learner(fn(schedules.constant, peak_lr=1.0)), "GradientTransformation"),
    (lambda: norms(["layer/bias"]), "norms_of: .*'layer/bias'"),  # Not trainable.
    (lambda: norms({"bias": "layer/bias"}), "norms_of: .*'layer/bias'"),
    (lambda: norms({"frozen": "emb/.*"}), "norms_of: .*'emb/.*'"),
    (lambda: norms({"layer": "layer/.*", "qkv": "layer/qkv"}), "norms_of: .*'layer/qkv'"),
    (lambda: norms({"other": "layer/.*"}), "norms_of: .*'other'"),
    (lambda: microbatches(4, ids=np.ones((10, 2))), r"num_microbatches.*4.*'ids'.*\(10"),
    (lambda: microbatches(4, ids=np.ones((8, 2)), k=np.ones(())), r"batch\['k'\].*0 sequences"),
    (lambda: microbatches(0, ids=np.ones((8, 2))), "num_microbatches.*0"),
    (lambda: metric_without_a_weight(1), "'layer/loss'"),
    (lambda: metric_without_a_weight(2), "'layer/loss'"),
    (lambda: param_ema(decay=1.0), "1.0"),
    (lambda: param_ema(decay=-0.1), "-0.1"),
    (lambda: optimizers.muon_optimizer(1.0), "param_specs.*None"),
    (
        lambda: optimizers.muon_optimizer(1.0, param_specs=SPECS, adam_paths=["layers/.*"]),
        r"adam_paths:.*'layers/.*'",
    ),
    (lambda: optimizers.adamw_decoupled_optimizer(schedules.constant(1.0)), "update_schedule"),
    (lambda: optimizers.sgd_optimizer(0.1, nesterov=True), "nesterov=True"),
    (lambda: optimizers.adafactor_optimizer(0.1, b1=1.0), "b1 is 1.0"),
    (lambda: optimizers.adam_optimizer(0.1, b2=-0.1), "b2 is -0.1"),
    (lambda: optimizers.adamw_optimizer(0.1, b1=2.0), "b1 is 2.0"),
    (lambda: optimizers.adamw_decoupled_optimizer(0.1, b2=math.nan), "b2 is nan"),
    (lambda: optimizers.lion_optimizer(0.1, b1=1.0), "b1 is 1.0"),
    (lambda: optimizers.muon_optimizer(0.1, beta=1.0, param_specs={}), "beta is 1.0"),
    (lambda: optimizers.sgd_optimizer(0.1, momentum=1.0), "momentum is 1.0"),
    (lambda: schedules.constant(1.0, warmup_steps=-1), "warmup_steps.*-1"),
    (
        lambda: schedules.wsd(1.0, max_step=10, warmup_steps=8, decay_steps=3),
        "warmup_steps 8.*decay_steps 3.*max_step 10",
    ),
    (lambda: schedules.wsd(1.0, max_step=10, decay_steps=0), "decay_steps.*0"),
    (lambda: schedules.wsd(1.0, max_step=10, decay_steps=2, decay="exponental"), "'exponential'"),
    (lambda: schedules.cosine(1.0, max_step=10, warmup_steps=10), "warmup_steps.*10.*max_step.*10"),
    (lambda: schedules.constant(-1.0), r"peak_lr is -1\.0"),
    (lambda: schedules.constant(math.nan), "peak_lr is nan"),
    (lambda: schedules.cosine(-1.0, max_step=10), r"peak_lr is -1\.0"),
    (lambda: schedules.linear(0.1, max_step=10, end_lr=0.2), r"0\.1.*end_lr is 0\.2"),
    (lambda: schedules.cosine(1.0, max_step=10, end_lr=-1.0), r"end_lr is -1\.0"),
    (lambda: schedules.as_schedule(-0.1), "learning_rate is -0.1"),
    (lambda: schedules.as_schedule(math.nan), "learning_rate is nan"),
    (lambda: schedules.as_schedule(schedules.cosine), r"config_for_function\(cosine\)"),
    (transforms.chain, "args"),
    (lambda: transforms.chain(optax.identity(), 3), r"args\[1\] is 3"),
    (lambda: transforms.clip_by_global_norm(0.0), "max_norm.*0.0"),
    (lambda: transforms.clip_by_global_norm(math.nan), "max_norm is nan"),
    (lambda: transforms.skip_bad_steps(drop_norm=-1.0), "drop_norm is -1.0"),
    (lambda: transforms.skip_bad_steps(drop_norm=math.nan), "drop_norm is nan"),
    (lambda: transforms.add_decayed_weights(-0.1), "weight_decay is -0.1"),
    (lambda: transforms.add_decayed_weights(math.nan), "weight_decay is nan"),
    (lambda: optimizers.adamw_decoupled_optimizer(-0.2), "learning_rate is -0.2"),
    (lambda: optimizers.adamw_decoupled_optimizer(math.nan), "learning_rate is nan"),
    (
        lambda: transforms.add_decayed_weights(0.1, per_param_scale=lambda spec: 1.0),
        "param_specs",
    ),
]

OF_ANOTHER_MODEL = [
    (lambda: step({"layer": gradients_like(PARAMS, 0)["layer"]}), r"'emb/weight'.*16, 6"),
    (
        lambda: step({**gradients_like(PARAMS, 0), "emb": {"weight": np.ones((6, 16))}}),
        r"'emb/weight'.*16, 6.*6, 16",
    ),
    (lambda: make_learner(ADAMW).init({"layer": PARAMS["layer"]}), r"'emb/weight'.*param_specs"),
    (lambda: make_learner(ADAMW).init({**PARAMS, "new": np.ones(3)}), "'new'"),
]

CASES = [*((*row, UserError) for row in REFUSED), *((*row, ValueError) for row in OF_ANOTHER_MODEL)]


@pytest.mark.parametrize(("call", "names", "error"), CASES, ids=[names for _, names, _ in CASES])
def test_refused_arguments_are_named(call, names, error):
    with pytest.raises(error, match=names):
        call()


def test_missing_optimizer_and_unknown_fields_are_refused():
    with pytest.raises(RequiredFieldMissingError, match="optimizer"):
        Learner.default_config().instantiate(parent=None, param_specs=SPECS)
    with pytest.raises(UnknownFieldError, match="update_rules"):
        Learner.default_config().update_rule = []
