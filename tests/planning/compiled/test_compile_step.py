"""The trainer's own step, compiled for a topology; and impossible plans."""

import jax
import pytest

from experiments import flame_moe
from moelib.core.errors import UserError
from moelib.planning.compiled import compile_step as compile_step_module
from moelib.planning.compiled import examine
from moelib.planning.compiled.compile_step import compile_step
from moelib.planning.hardware.topologies import topology
from moelib.train.compiler_options import BY_DEVICE_KIND
from tests import tiny


@pytest.fixture(scope="module")
def where():
    pytest.importorskip("libtpu")
    return topology("v6e:2x2x1")


def test_the_step_is_laid_over_the_devices_of_the_topology(where, tmp_path):
    cfg = tiny.trainer_config(tmp_path, mesh_shape=(1, -1, 1, 2, 1, 1), evaler=False)
    folder = tmp_path / "dump"
    report = compile_step(cfg, where, name="tiny", dump_dir=str(folder))
    assert (report.name, report.topology) == ("tiny", "v6e:2x2x1")
    assert report.mesh["data"] == report.mesh["fsdp"] == 2
    assert report.figures["memory.aliased"] > 0  # The state is donated.
    assert report.figures["all-reduce.count"] > 0
    assert report.figures["seconds.compile_cpu"] > 0
    assert "rows_computed_over_routed" not in report.figures
    assert (folder / "hlo_optimized.txt").read_text().startswith("HloModule jit_train_step")
    assert "# tiny" in (folder / "report.md").read_text()
    assert not (tmp_path / "config.txt").exists()


@pytest.mark.slow
def test_gradients_of_micro_batches_in_bfloat16_compile_and_are_scattered(where):
    cfg = flame_moe.named_trainer_configs()["flame-moe-tiny"]()
    cfg.set(train_dtype="bfloat16", num_microbatches=2, mesh_shape=(1, 1, 1, 4, 1, 1))
    report = compile_step(cfg, where, name="tiny")
    assert report.figures["reduce-scatter.executions"] > 0


def test_options_are_added_to_those_of_the_trainer(where, tmp_path, monkeypatch):
    told = []

    def compile_with(lowered, options):
        told.append(options)
        return original(lowered, options)

    original = compile_step_module.compile_with
    monkeypatch.setattr(compile_step_module, "compile_with", compile_with)
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    changed = "xla_tpu_enable_data_parallel_all_reduce_opt"
    compile_step(cfg, where, name="tiny", compiler_options={changed: "False"})
    assert BY_DEVICE_KIND["TPU v6 lite"][changed] == "True"
    assert told == [BY_DEVICE_KIND["TPU v6 lite"] | {changed: "False"}]


def test_rows_routed_are_a_devices_tokens_times_their_experts():
    cfg = flame_moe.tiny().set(dir="unused", mesh_shape=(1, 1, 2, 2, 1, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:4])
    assert examine._rows_routed(trainer) == 8 * 128 // 4 * 2


@pytest.mark.parametrize(
    ("mesh_shape", "batch_size", "options", "message"),
    [
        ((1, 3, 1, 2, 1, 1), 8, {}, "6 devices.*4"),
        (None, 6, {}, "global_batch_size.*6.*4 parts"),
        (None, 8, {"xla_tpu_no_such_option": "True"}, "xla_tpu_no_such_option=True"),
        (None, 8, {"xla_tpu_scoped_vmem_limit_kib": "many"}, "xla_tpu_scoped_vmem_limit_kib=many"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    where, tmp_path, mesh_shape, batch_size, options, message
):
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    cfg.set(mesh_shape=mesh_shape or cfg.mesh_shape).input.global_batch_size = batch_size
    with pytest.raises(UserError, match=message):
        compile_step(cfg, where, name="tiny", compiler_options=options)


def test_a_step_that_does_not_fit_names_its_memory_and_that_of_the_state(where, tmp_path):
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    cfg.model.set(vocab_size=2**23, dim=512)
    cfg.input.vocab_size = 2**23
    with pytest.raises(UserError, match=r"v6e:2x2x1:.*GiB") as error:
        compile_step(cfg, where, name="tiny")
    assert "\n" not in str(error.value)
