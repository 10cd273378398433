"""Names in a compiled program lead back to the config."""

import pytest

from experiments import flame_moe
from moelib.layers.transformer import ScanStack
from moelib.planning.hlo.source import config_path


@pytest.fixture(scope="module")
def looped():
    cfg = flame_moe.tiny().model
    return cfg.set(name="model").instantiate(parent=None)


@pytest.fixture(scope="module")
def scanned():
    cfg = flame_moe.tiny().model
    old = cfg.decoder
    cfg.decoder = ScanStack.default_config().set(
        num_layers=old.num_layers, first_layers=old.first_layers, block=old.block
    )
    return cfg.set(name="model").instantiate(parent=None)


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(train_step)/jvp(embedding)/gather", "model.embedding"),
        ("jit(s)/jvp(decoder)/layer0/feed_forward/mul", "model.decoder.first_layers[0]."),
        ("jit(s)/transpose(jvp(decoder))/layer3/feed_forward/router/dot_general",
         "model.decoder.block[0].feed_forward.router"),
        ("jit(s)/jvp(decoder)/while/body/add", "model.decoder"),
        ("jit(s)/jvp()/shard_map/all_gather", "model"),
        ("jit(s)/learner/mul", "learner"),
        ("", "model"),
    ],
)  # fmt: skip
def test_a_name_leads_to_the_innermost_config(looped, op_name, expected):
    assert config_path(op_name, looped).startswith(expected)


def test_repeated_layers_are_those_of_the_block(scanned):
    name = "jit(s)/jvp(decoder)/while/body/eval_jaxpr/repeated0/feed_forward/shard_map/mul"
    assert config_path(name, scanned) == "model.decoder.block[0].feed_forward"


def test_without_a_model_the_answer_is_the_model_as_a_whole():
    assert config_path("jit(s)/jvp(decoder)/layer0/mul") == "model"
