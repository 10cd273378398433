"""Examples of docs/how_to/scale.md, docs/how_to/hugging_face.md and docs/kernels.md."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from experiments import deepseek, flame_moe
from moelib.core.config import config_for_function
from moelib.huggingface.pretrained import load_pretrained, read_config
from moelib.kernels.backend import kernel_backends, traced_backends
from moelib.kernels.gmm import gmm
from moelib.layers.attention.indexer import Indexer
from moelib.layers.quantization import Quantization
from moelib.layers.remat import remat
from moelib.learner.learner import UpdateType
from moelib.learner.optimizers import adamw_optimizer, muon_optimizer
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction
from moelib.parallel.mesh import HybridMeshShape, infer_mesh_shape, mesh_shape_from_axes
from moelib.train.init_from import InitFrom
from moelib.train.routing_log import RoutingEvaler

FIXTURES = pathlib.Path(__file__).parents[1] / "huggingface/fixtures"


def test_scale():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:mesh]
    cfg.mesh_shape = mesh_shape_from_axes(fsdp=-1, expert=8)
    # --8<-- [end:mesh]
    assert infer_mesh_shape(cfg.mesh_shape, 32) == (1, 1, 8, 4, 1, 1)
    # --8<-- [start:hybrid]
    cfg.mesh_shape = HybridMeshShape(
        ici=mesh_shape_from_axes(fsdp=-1, expert=8), dcn=mesh_shape_from_axes(data=2)
    )
    # --8<-- [end:hybrid]
    # --8<-- [start:quantization]
    cfg.model.quantization = Quantization.FP8_BLOCK
    # --8<-- [end:quantization]
    # --8<-- [start:memory]
    cfg.model.decoder.remat = config_for_function(remat).set(
        keep=["attention_output"], offload=["experts_up"]
    )
    cfg.num_microbatches = 2
    cfg.learner.offload_state = True
    # --8<-- [end:memory]
    cfg.instantiate(parent=None)


def test_optimizers():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:optimizers]
    muon = config_for_function(muon_optimizer).set(learning_rate=1e-3, consistent_rms=0.2)
    cfg.learner.optimizer = muon.set(weight_decay=0.1)
    slow = config_for_function(adamw_optimizer).set(learning_rate=1e-4)
    cfg.learner.update_rules = [(".*/router/.*", slow), ("embedding/.*", UpdateType.NO_UPDATE)]
    # --8<-- [end:optimizers]
    trainer = cfg.instantiate(parent=None)
    assert trainer.learner.is_frozen("embedding/weight")
    assert set(trainer.trainer_state_specs.learner.optimizer) == {"main", "rule0"}


def test_a_run_logs_its_routing():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:routing_log]
    log = RoutingEvaler.default_config().set(evaler="validation", max_batches=1)
    cfg.watchers["routing_log"] = log
    # --8<-- [end:routing_log]
    trainer = cfg.instantiate(parent=None)
    assert [
        step for step in range(1, 701) if trainer.watchers["routing_log"].should_log(step=step)
    ] == [70 * i for i in range(1, 11)]


def test_a_run_starts_from_a_model_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "qwen3_moe", "Qwen3")
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:start]
    cfg.model, _ = read_config("Qwen3")
    cfg.init_from = InitFrom.default_config().set(run="Qwen3")
    # --8<-- [end:start]
    for lm_input in (cfg.input, cfg.evalers["validation"].input):
        lm_input.vocab_size = None
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    q = trainer.trainer_state.model["decoder"]["repeated0"]["self_attention"]["q"]
    want = load_pretrained("Qwen3").params["decoder"]["repeated0"]["self_attention"]["q"]
    np.testing.assert_array_equal(q, want)


def test_any_language_model_predicts_further_tokens():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:multi_token]
    module = MultiTokenModule.default_config().set(layer=cfg.model.decoder.block[-1])
    cfg.model.multi_token_prediction = MultiTokenPrediction.default_config().set(
        num_depths=1, loss_weight=0.3, module=module
    )
    # --8<-- [end:multi_token]
    assert "depth1" in cfg.instantiate(parent=None).model.multi_token_prediction.children


def test_latent_attention_takes_an_indexer():
    cfg = deepseek.named_trainer_configs()["deepseek-v3"]()
    # --8<-- [start:sparse]
    indexer = Indexer.default_config().set(num_heads=64, index_dim=128, num_chosen=2048)
    for layer in [*cfg.model.decoder.first_layers, *cfg.model.decoder.block]:
        layer.self_attention.indexer = indexer.clone(sparse=False)
    cfg.learner.update_rules = [
        (".*/indexer/.*", UpdateType.OPTIMIZERS),
        (".*", UpdateType.NO_UPDATE),
    ]
    # --8<-- [end:sparse]
    specs = cfg.model.instantiate(parent=None).create_parameter_specs_recursively()
    assert specs["decoder"]["repeated0"]["self_attention"]["indexer"]["q"].shape[1:] == (
        1536,
        64,
        128,
    )


def test_a_backend_is_set_by_a_context_manager():
    lhs, rhs = jnp.ones((4, 8)), jnp.ones((2, 8, 3))
    group_sizes = jnp.array([1, 3])
    # --8<-- [start:backend]
    with kernel_backends({"gmm": "reference"}):
        y = jax.jit(gmm)(lhs, rhs, group_sizes)
    # --8<-- [end:backend]
    assert traced_backends()["gmm"] == "reference"
    np.testing.assert_allclose(y, 8.0)
