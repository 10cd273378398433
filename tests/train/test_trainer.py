"""Runs: their files, resuming bit for bit and under another mesh, options of the compiler."""

import dataclasses
import errno
import json
import math
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import flame_moe
from moelib.checkpoint.checkpointer import CheckpointSaveError
from moelib.checkpoint.contents import CheckpointMismatchError, CheckpointRecord
from moelib.checkpoint.restore import restore_params_only
from moelib.checkpoint.writers import DiskWriter
from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.config_text import parse, set_from_text
from moelib.core.errors import UserError
from moelib.data.batches.lm_input import LMInput
from moelib.data.tokens.token_source import InMemoryTokens
from moelib.learner.transforms import chain
from moelib.operations.runs import list_runs
from moelib.parallel.mesh import HybridMeshShape, mesh_shape_from_axes
from moelib.planning.hardware.topologies import topology
from moelib.runs.folder import RunFolder
from moelib.runs.identity import TrainerDirConflictError, identity
from moelib.runs.phases import Phase
from moelib.runtime.platforms import GPU_MEMORY_SHARE
from moelib.train.compiler_options import (
    compile_with,
    default_options,
    deterministic_options,
    spelled,
)
from moelib.train.failures import NonFiniteError
from tests import tiny
from tests.checkpoint.small import truncate_arrays
from tests.parallel.slices import two_slices
from tests.python_process import finish, start
from tests.train import small_run


def run(cfg):
    trainer = cfg.instantiate(parent=None)
    return trainer, trainer.run()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """An uninterrupted run of 8 steps: its folder, trainer and result."""
    directory = tmp_path_factory.mktemp("unbroken")
    trainer, out = run(tiny.trainer_config(directory))
    return directory, trainer, out


def own_loop(trainer, last_step):
    """Returns the loss of each step up to one."""
    losses = {}
    # --8<-- [start:loop]
    for batch in trainer.batches():
        metrics = trainer.train_step(batch)
        losses[trainer.step] = metrics["loss"]
        if trainer.step == last_step:
            break
    # --8<-- [end:loop]
    return losses


def test_a_loop_of_ones_own_takes_the_steps_of_a_run(unbroken, tmp_path):
    cfg = tiny.trainer_config(tmp_path)
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    losses = own_loop(trainer, 5)
    trainer.save_checkpoint()
    trainer.saver.wait()
    trainer = cfg.instantiate(parent=None)
    assert trainer.restore_checkpoint() == 5
    losses |= own_loop(trainer, 8)
    assert losses == tiny.losses(unbroken[0])
    states = (trainer.trainer_state, unbroken[1].trainer_state)
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_loop_of_ones_own_reads_the_batches_of_a_run_in_a_new_folder(tmp_path):
    cfg = tiny.trainer_config(tmp_path / "run", max_step=4).set(skip_batches=["1:3"])
    _, out = run(cfg)
    own = cfg.clone(dir=str(tmp_path / "own/new")).instantiate(parent=None)
    own.init()
    assert own_loop(own, 4) == tiny.losses(tmp_path / "run")
    assert own.input_state["skipped"] == [[1, 3]]
    assert out["step"] == 4
    text = small_run.trainer_config(tmp_path / "text", small_run.make_store(tmp_path / "store"))
    trainer = text.set(mesh_shape=(1, 1, 1, -1, 1, 1)).instantiate(parent=None)
    trainer.init()
    own_loop(trainer, 1)
    assert (tmp_path / "text/tokenizer.json").exists()


def test_a_step_on_an_earlier_batch_is_refused(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    trainer.init()
    batches = trainer.batches()
    first, _ = next(batches), next(batches)
    with pytest.raises(UserError, match="is not the newest one"):
        trainer.train_step(first)
    batches.close()


def test_a_loop_of_ones_own_refuses_what_only_runs_do(tmp_path):
    phase = Phase.default_config().set(after_step=4, changes={"num_microbatches": 2})
    trainer = tiny.trainer_config(tmp_path).set(phases={"a": phase}).instantiate(parent=None)
    with pytest.raises(UserError, match=r"phases=\['a'\].*set phase"):
        next(trainer.batches())
    trainer = tiny.trainer_config(tmp_path).set(rewind_to=4).instantiate(parent=None)
    with pytest.raises(UserError, match=r"rewind_to=4.*restore_checkpoint\(4\)"):
        next(trainer.batches())


def test_a_loop_of_ones_own_ends_at_a_loss_that_is_not_finite(tmp_path):
    cfg = tiny.trainer_config(tmp_path)
    cfg.model.nan_at = 2
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    with pytest.raises(NonFiniteError, match="step 2: the loss is nan"):
        own_loop(trainer, 8)


def test_run_that_fails_resumes_from_its_last_local_checkpoint(unbroken, tmp_path, caplog):
    cfg = tiny.trainer_config(tmp_path / "run", save_every=4)
    cfg.checkpointer.set(local_dir=str(tmp_path / "local"), local_every_n_steps=3)
    trainer = cfg.instantiate(parent=None)
    run_step = trainer.run_step

    def fail(batch, **options):
        if trainer.step == 7:
            raise RuntimeError("the data cannot be read")
        return run_step(batch, **options)

    trainer.run_step = fail
    with pytest.raises(RuntimeError, match="cannot be read"):
        trainer.run()
    trainer = cfg.instantiate(parent=None)
    assert trainer.restore_checkpoint() == 6
    trainer, _ = run(cfg)
    assert tiny.losses(tmp_path / "run") == tiny.losses(unbroken[0])
    states = (trainer.trainer_state, unbroken[1].trainer_state)
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert not os.listdir(tmp_path / "local")


def test_run_that_stops_after_a_local_restore_saves_a_durable_checkpoint(tmp_path):
    cfg = tiny.trainer_config(tmp_path / "run", save_every=100)
    cfg.checkpointer.set(local_dir=str(tmp_path / "local"), local_every_n_steps=2)
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    trainer.step = 6
    trainer._state = trainer.trainer_state._replace(step=trainer.trainer_state.step + 6)
    trainer.input_state = trainer.input.iterator().state() | {"step": 6}
    trainer.save_checkpoint(local=True)
    trainer.checkpointer.close()
    cfg.set(max_step=6, accept_changes=("schedule",))
    assert run(cfg)[1]["step"] == 6
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["local.json", "step_00000006"]


def test_run_writes_the_documented_files(unbroken):
    directory, _, out = unbroken
    assert sorted(os.listdir(directory)) == [
        ".lock", "checkpoints", "config.txt", "events.jsonl", "metrics.jsonl", "run.json",
        "summaries",
    ]  # fmt: skip
    assert sorted(os.listdir(directory / "checkpoints")) == ["step_00000004", "step_00000008"]
    assert sorted(os.listdir(directory / "summaries")) == ["train", "val"]
    assert out["step"] == 8
    assert out["stopped_by"] is None
    assert out["loss"] == tiny.losses(directory)[8] < tiny.losses(directory)[1]


def test_metrics_of_a_step(unbroken):
    directory, _, _ = unbroken
    with open(directory / "metrics.jsonl", encoding="utf-8") as lines:
        first = json.loads(next(lines))
    assert first["num_tokens"] == 8 * 16
    assert first["perplexity"] == pytest.approx(math.exp(first["cross_entropy"]))
    assert first["objective"] == pytest.approx(first["loss"] + first["aux_loss"])
    assert first["aux_loss"] == pytest.approx(0.01 * first["logits_square"])
    assert {"tokens_per_second", "tflops_per_second", "step_seconds", "time/input"} <= set(first)


def test_state_updates_of_layers_reach_the_state(unbroken):
    _, trainer, _ = unbroken
    assert int(trainer.trainer_state.model["passes"]) == 8
    assert int(trainer.trainer_state.model["steps"]) == 8


def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(unbroken, tmp_path):
    _, trainer, _ = unbroken
    run(tiny.trainer_config(tmp_path, max_step=3))
    resumed, _ = run(tiny.trainer_config(tmp_path))
    assert tiny.losses(tmp_path) == tiny.losses(unbroken[0])
    for path, value in tree.flatten_items(trainer.trainer_state):
        other = dict(tree.flatten_items(resumed.trainer_state))[path]
        assert np.array_equal(value, other), path
    _, finished = run(tiny.trainer_config(tmp_path))
    assert (finished["step"], finished["loss"]) == (8, None)  # Takes no step.


@pytest.mark.slow  # Tests of restored checkpoints and of steps cover each half.
def test_resumed_on_four_of_eight_devices_agrees(unbroken, tmp_path, monkeypatch):
    run(tiny.trainer_config(tmp_path, max_step=4, mesh_shape=(1, 2, 1, 2, 1, 2)))
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *args: four)
    run(tiny.trainer_config(tmp_path, mesh_shape=(1, 1, 1, 4, 1, 1)))
    assert tiny.losses(tmp_path) == pytest.approx(tiny.losses(unbroken[0]), abs=1e-5)


def test_initial_values_do_not_depend_on_the_mesh(tmp_path):
    states = []
    for shape in ((1, 8, 1, 1, 1, 1), (1, 1, 1, 4, 1, 2)):
        trainer = tiny.trainer_config(tmp_path, mesh_shape=shape).instantiate(parent=None)
        trainer.init()
        states.append(trainer.trainer_state.model)
    assert states[1]["table"].sharding.spec == jax.sharding.PartitionSpec("model", "fsdp")
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)  # Rounding of vectorised code.
    jax.tree.map(same, *states)


def test_checkpoint_gives_the_evaluation_point_of_a_schedule_free_optimizer(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=2, evaler=False)
    optimizer = config_for_function(optax.contrib.schedule_free_adamw).set(learning_rate=0.1)
    cfg.learner.optimizer = config_for_function(chain).set(args=[optimizer])
    trainer, _ = run(cfg)
    params = trainer.model_params_for_eval()
    target = jax.eval_shape(lambda: params)
    restored = restore_params_only(str(tmp_path / "checkpoints"), target).state
    assert np.any(trainer.trainer_state.model["head"] != params["head"])
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(same, restored, params)


def test_step_is_lowered_for_given_devices(tmp_path):
    cfg = tiny.trainer_config(tmp_path, mesh_shape=(1, -1, 1, 2, 1, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:4])
    assert dict(trainer.mesh().shape)["data"] == 2
    with trainer.on_mesh():
        assert "num_partitions = 4" in trainer.trace_train_step().lower().as_text()


def test_after_a_nan_the_same_folder_continues_with_a_lower_rate(tmp_path):
    cfg = tiny.trainer_config(tmp_path, save_every=2, evaler=False)
    run(cfg.clone(max_step=2))
    cfg.learner.optimizer.learning_rate = 1e30
    with pytest.raises(NonFiniteError, match=r"step 4:.* step 2,.*start the run again"):
        run(cfg)
    cfg.learner.optimizer.learning_rate = 1e-3
    assert run(cfg)[1]["step"] == 8
    changed = [e for e in RunFolder(tmp_path).events() if e["event"] == "changed"]
    rates = [(e["step"], e["before"], e["now"]) for e in changed if "rate" in e["path"]]
    assert rates == [(2, "0.02", "1e+30"), (2, "0.02", "0.001")]


def test_nan_in_the_step_to_be_saved_is_never_saved(tmp_path):
    cfg = tiny.trainer_config(tmp_path, save_every=2).set(stop_on_nan=False)
    cfg.model.nan_at = 5
    with pytest.raises(CheckpointSaveError, match="step 8"):
        run(cfg)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00000002", "step_00000004"]


def test_full_disk_does_not_stop_training(unbroken, tmp_path, caplog, monkeypatch):
    trainer = tiny.trainer_config(tmp_path, evaler=False).instantiate(parent=None)
    trainer.checkpointer._writer = DiskWriter()  # The next save has another one.
    monkeypatch.setattr(trainer.checkpointer._writer, "start", _full_disk)
    assert trainer.run()["step"] == 8
    assert "NO CHECKPOINT of step 4" in caplog.text
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000008"]
    assert tiny.losses(tmp_path) == tiny.losses(unbroken[0])


def test_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    trainer = tiny.trainer_config(tmp_path, max_step=3, evaler=False).instantiate(parent=None)
    monkeypatch.setattr(DiskWriter, "start", _full_disk)
    with pytest.raises(CheckpointSaveError, match="step 3"):
        trainer.run()


def test_a_run_whose_folder_is_moved_saves_nothing_more(tmp_path):
    cfg = tiny.trainer_config(tmp_path / "run", max_step=2, save_every=1, evaler=False)
    cfg.checkpointer.wait = "after_save"
    trainer = cfg.instantiate(parent=None)
    take_step = trainer.run_step

    def move_then_step(*args, **kwargs):
        if trainer.step == 1:
            (tmp_path / "run").rename(tmp_path / "moved")
        return take_step(*args, **kwargs)

    trainer.run_step = move_then_step
    with pytest.raises(UserError, match="run was moved"):
        trainer.run()
    assert not (tmp_path / "run").exists()
    assert os.listdir(tmp_path / "moved" / "checkpoints") == ["step_00000001"]


def _full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_end_of_input_saves(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=100, evaler=False)
    cfg.input = tiny.input_config(mode=tiny.InputMode.EVALUATE).set(max_batches=3)
    _, out = run(cfg)
    assert (out["step"], out["stopped_by"]) == (3, "end of input")
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000003"]


def test_a_refused_start_changes_nothing_of_the_run(tmp_path):
    run(tiny.trainer_config(tmp_path, max_step=1, evaler=False))
    before = (tmp_path / "config.txt").read_text()
    other = tiny.trainer_config(tmp_path, max_step=2, evaler=False)
    other.model.dim = 8
    with pytest.raises(TrainerDirConflictError, match=r"model.dim.*16.*8"):
        run(other)
    assert (tmp_path / "config.txt").read_text() == before
    assert [run.state for run in list_runs([str(tmp_path)])] == ["finished"]
    os.remove(tmp_path / "config.txt")  # The checkpoint has the config, too.
    with pytest.raises(TrainerDirConflictError, match=r"model.dim.*16.*8"):
        run(other)
    wanted = r"'model/head'.*float32\[16, 32\].*float32\[8, 32\]"
    with pytest.raises(CheckpointMismatchError, match=wanted):
        run(other.set(accept_changes=["config"]))
    cfg = tiny.trainer_config(tmp_path, max_step=2, evaler=False).set(log_every_n_steps=2)
    assert run(cfg)[1]["step"] == 2


def test_corrected_config_runs_after_a_first_start_that_failed(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=2)
    cfg.model.nan_at = 1
    with pytest.raises(NonFiniteError, match="step 1"):
        run(cfg)
    cfg = tiny.trainer_config(tmp_path, max_step=2)
    cfg.model.dim = 8
    assert run(cfg)[1]["step"] == 2
    assert list(tiny.losses(tmp_path)) == [1, 2]
    assert parse((tmp_path / "config.txt").read_text()) == cfg


def test_changes_are_those_since_the_checkpoint_that_is_restored(tmp_path, caplog):
    run(tiny.trainer_config(tmp_path, max_step=2, save_every=1, evaler=False))
    cfg = tiny.trainer_config(tmp_path, max_step=2, save_every=1, evaler=False)
    cfg.set(mesh_shape=(1, 2, 1, 2, 1, 2), num_microbatches=2, accept_changes=["accumulation"])
    for _ in range(2):  # A start that takes no step leaves the checkpoint as it was.
        caplog.clear()
        run(cfg)
        changed = [line.message.split()[0] for line in caplog.records if "was" in line.message]
        assert changed == ["num_microbatches", "mesh"]
    newest = str(tmp_path / "checkpoints/step_00000002")
    dataclasses.replace(CheckpointRecord.read(newest), config=cfg.debug_string()).write(newest)
    truncate_arrays(newest)
    with pytest.raises(TrainerDirConflictError, match="num_microbatches is 1"):
        run(cfg.set(accept_changes=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["input.global_batch_size=6"], r"global_batch_size.*6.*data 8, 8 parts"),
        (
            ["mesh_shape=[1, 1, 1, 1, 8, 1]", "input.seq_len=12"],
            r"^input\.seq_len is 12, .*8 parts.*'sequence'.*seq 8.*mesh_shape",
        ),
        (
            ["mesh_shape=[1, 1, 1, 1, 2, 4]", "evalers.val.input.seq_len=12"],
            r"^evalers\.val\.input\.seq_len is 12, .*'residual_sequence'.*seq 2, model 4",
        ),
        (["mesh_shape=[8, 1, 1, 1, 1, 1]"], "pipeline=8"),
        (["mesh_shape=[-1]", "mesh_axis_names=('dta',)"], "dta=8"),
        (["sharding_rules={'expert': ('data',)}"], r"'expert'.*'experts'"),
        (["sharding_rules={'experts': ('dta',)}"], r"'experts'.*'dta'"),
        (["sharding_rules={'batch': ('fsdp',)}"], "data=8"),
    ],
)
def test_what_the_mesh_does_not_divide_or_know_is_refused(tmp_path, settings, message):
    cfg = tiny.trainer_config(tmp_path)
    for setting in settings:
        set_from_text(cfg, setting)
    with pytest.raises(ValueError, match=message):
        run(cfg)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_sharding_rule_that_splits_nothing_is_refused(tmp_path, num_devices):
    cfg = tiny.trainer_config(tmp_path).set(sharding_rules={"embed": (), "experts": ("expert",)})
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:num_devices])
    with pytest.raises(ValueError, match="'experts'"):
        trainer.trace_train_step()


def moe_config(directory, *rules):
    cfg = tiny.trainer_config(directory, max_step=2, evaler=False, mesh_shape=(1, 2, 2, 1, 1, 2))
    cfg.set(model=tiny.model_config(), checkpointer=None)
    for rule in rules:
        set_from_text(cfg, rule)
    return cfg


@pytest.mark.slow
def test_experts_folded_over_other_axes_give_the_same_losses(tmp_path):
    fold = "sharding_rules={'experts': ('expert', 'model'), 'expert_ffn': ()}"
    cfg = moe_config(tmp_path / "folded", fold)
    assert parse(cfg.debug_string()) == cfg
    trainer, _ = run(cfg)
    up = tree.flatten_items(trainer.trainer_state.model)
    splits = [x.sharding.spec[1] for path, x in up if path.endswith("/experts/up")]  # [L, E, ...
    assert splits == [("expert", "model")]
    run(moe_config(tmp_path / "default"))
    losses, expected = tiny.losses(tmp_path / "folded"), tiny.losses(tmp_path / "default")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 2


def test_inputs_know_the_vocabulary_of_the_model(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=1)
    before = identity(cfg.debug_string(), cfg)
    beyond = InMemoryTokens.default_config().set(documents=[[7, 40]] * 99, vocab_size=41, eos_id=0)
    cfg.input = LMInput.default_config().set(global_batch_size=8, seq_len=16, source=beyond)
    with pytest.raises(ValueError, match=r"40.*32"):
        run(cfg)
    cfg = tiny.trainer_config(tmp_path)
    cfg.evalers["val"].input.vocab_size = None
    trainer = cfg.instantiate(parent=None)
    assert trainer.evalers["val"].config.input.vocab_size == 32
    assert trainer.config.evalers["val"].input.vocab_size is None
    assert identity(trainer.config.debug_string(), cfg) == before


def test_the_step_is_compiled_with_the_options_of_the_devices_and_the_config(tmp_path):
    cfg = tiny.trainer_config(tmp_path)
    assert cfg.instantiate(parent=None).compiler_options() == {}
    cfg.compiler_options = {"xla_no_such_option": "true"}
    with pytest.raises(UserError, match="xla_no_such_option"):
        cfg.instantiate(parent=None).compile_train_step()


def test_the_collectives_of_a_step_on_simulated_devices_have_channels_of_their_own(tmp_path):
    cfg = flame_moe.named_trainer_configs()["flame-moe-tiny"]()
    cfg.set(dir=str(tmp_path), mesh_shape=mesh_shape_from_axes(data=2, fsdp=4))
    text = cfg.instantiate(parent=None).compile_train_step().as_text()
    channels = re.findall(r"channel_id=(\d+)", text)
    assert len(channels) > 10
    assert len(set(channels)) == len(channels)


def test_the_compiler_reads_booleans_of_either_spelling():
    options = spelled({"xla_cpu_enable_fast_min_max": "true", "xla_cpu_max_isa": "AVX"})
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)
    assert options == {"xla_cpu_enable_fast_min_max": "True", "xla_cpu_max_isa": "AVX"}


def test_an_option_that_the_compiler_refuses_is_named():
    option = {"xla_cpu_enable_fast_math": "maybe"}
    with pytest.raises(UserError, match="xla_cpu_enable_fast_math=maybe: ") as error:
        compile_with(jax.jit(jnp.sin).lower(1.0), option)
    assert "\n" not in str(error.value)


def test_gpus_recompute_what_a_process_cannot_hold():
    percentage = default_options("NVIDIA H100 80GB HBM3")["xla_gpu_memory_limit_slop_factor"]
    assert GPU_MEMORY_SHARE - 0.01 < 0.8 * int(percentage) / 100 <= GPU_MEMORY_SHARE


def test_on_v6e_gathers_run_on_the_sparse_cores(tmp_path):
    pytest.importorskip("libtpu")
    cfg = tiny.trainer_config(tmp_path, mesh_shape=mesh_shape_from_axes(fsdp=-1), evaler=False)
    cfg.compiler_options = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    trainer = cfg.instantiate(parent=None, devices=topology("v6e:2x2x1").devices)
    options = trainer.compiler_options()
    assert options["xla_tpu_enable_sparse_core_collective_offload_all_gather"] == "True"
    assert options["xla_tpu_scoped_vmem_limit_kib"] == "65536"


def test_building_a_trainer_initializes_no_device():
    code = (
        "from experiments import flame_moe;"
        "flame_moe.tiny().set(dir='unused').instantiate(parent=None)"
    )
    finish(start("-c", code, JAX_PLATFORMS="no_such_platform"))


def test_only_gpus_need_options_to_be_deterministic():
    assert deterministic_options("TPU v5p") == deterministic_options("cpu") == {}
    assert deterministic_options("NVIDIA H100")["xla_gpu_deterministic_ops"] == "True"


def test_the_compiler_knows_the_deterministic_options():
    lowered = jax.jit(jnp.sum).lower(np.ones(4, np.float32))
    assert compile_with(lowered, deterministic_options("NVIDIA H100"))(np.ones(4, np.float32)) == 4


def test_an_option_that_contradicts_determinism_is_refused(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path).set(deterministic=True)
    cfg.compiler_options = {"xla_gpu_autotune_level": "4", "xla_gpu_deterministic_ops": "true"}
    trainer = cfg.instantiate(parent=None)
    gpu = np.array([SimpleNamespace(device_kind="NVIDIA H100")])
    monkeypatch.setattr(type(trainer), "mesh", lambda self: SimpleNamespace(devices=gpu))
    with pytest.raises(ValueError, match=r"xla_gpu_autotune_level=4.*deterministic=True"):
        trainer.compiler_options()
    del trainer.config.compiler_options["xla_gpu_autotune_level"]
    assert trainer.compiler_options().items() >= spelled(deterministic_options("NVIDIA")).items()


@pytest.mark.slow
def test_a_step_lowers_for_two_slices():
    pytest.importorskip("libtpu")
    cfg = flame_moe.tiny().set(
        dir="unused",
        mesh_shape=HybridMeshShape(
            ici=mesh_shape_from_axes(expert=2, fsdp=2), dcn=mesh_shape_from_axes(data=2)
        ),
    )
    trainer = cfg.instantiate(parent=None, devices=two_slices())
    with trainer.on_mesh():
        text = trainer.trace_train_step().lower().as_text()
    assert '"data"=2, "expert"=2, "fsdp"=2' in text
    rows = trainer.batch_sharding.devices_indices_map((8, 128))
    by_slice = {0: set(), 1: set()}
    for device, (where, _) in rows.items():
        by_slice[device.slice_index].add(where.start)
    assert by_slice == {0: {None, 1, 2, 3}, 1: {4, 5, 6, 7}} or by_slice[0] == {0, 1, 2, 3}
