"""Checks of a trainer's config, and the fields that are filled in."""

import contextlib
import re

import pytest

from moelib.core.config import (
    REQUIRED,
    Configurable,
    RequiredFieldMissingError,
    config_class,
    config_for_function,
)
from moelib.core.errors import UserError
from moelib.data.input import Input
from moelib.data.synthetic import SyntheticInput
from moelib.learner.schedules import cosine
from moelib.models.causal_lm import CausalLM
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.sharding import SplitError
from moelib.train.settings import (
    check_batch,
    check_config,
    completed,
    schedule_on,
    warn_unused_schedule,
)
from tests import tiny


@pytest.fixture
def cfg(tmp_path):
    return tiny.trainer_config(tmp_path)


def test_valid_config_is_unchanged(cfg):
    cfg.checkpointer.best_metric = "val/loss"
    cfg.input.vocab_size = None
    before = cfg.debug_string()
    check_config(cfg)
    assert cfg.debug_string() == before


@pytest.mark.parametrize("name", ["max_step", "log_every_n_steps", "num_microbatches"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused(cfg, name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value};"):
        check_config(cfg.set(**{name: value}))


def test_micro_batches_that_do_not_divide_the_batch_are_refused(cfg):
    with pytest.raises(UserError, match=r"global_batch_size.*8.*num_microbatches, 3"):
        check_config(cfg.set(num_microbatches=3))


@pytest.mark.parametrize("of_run", [True, False])
def test_checkpoints_on_a_store_that_takes_no_arrays_are_refused(cfg, of_run):
    holder = cfg if of_run else cfg.checkpointer
    holder.set(dir="s3://bucket/run")
    check_config(cfg)
    holder.set(dir="memory://run")
    with pytest.raises(UserError, match=r"checkpointer\.dir is 'memory://run'.*s3://"):
        check_config(cfg)


def test_traces_in_a_remote_folder_are_refused(cfg):
    with pytest.raises(UserError, match=r"start_trace_steps is \[2\].*'s3://bucket/run'"):
        check_config(cfg.set(dir="s3://bucket/run", start_trace_steps=(2,)))


def test_metric_of_an_unknown_evaler_is_refused(cfg):
    cfg.checkpointer.best_metric = "vla/loss"
    wanted = r"best_metric.*'vla/loss'.*'vla'.*'val'\?"
    with pytest.raises(ValueError, match=wanted):
        check_config(cfg)


@pytest.mark.parametrize("path", ["input", "evalers.val.input"])
def test_unset_fields_of_an_input_are_named_by_their_path(cfg, path):
    holder = cfg if path == "input" else cfg.evalers["val"]
    holder.input = SyntheticInput.default_config()
    wanted = f"{path}.seq_len, {path}.global_batch_size must be set before the input"
    with pytest.raises(RequiredFieldMissingError, match=re.escape(wanted)):
        check_config(cfg)
    holder.input = REQUIRED
    with pytest.raises(RequiredFieldMissingError, match=f"^{re.escape(path)} must be set before"):
        check_config(cfg)


@pytest.mark.parametrize("path", ["input", "evalers.val.input"])
def test_vocabulary_of_an_input_beyond_the_models_is_refused(cfg, path):
    holder = cfg if path == "input" else cfg.evalers["val"]
    holder.input.vocab_size = 33
    wanted = re.escape(f"{path}.vocab_size is 33, beyond model.vocab_size, which is 32")
    with pytest.raises(UserError, match=wanted):
        completed(cfg)


@pytest.mark.parametrize(("own", "expected"), [(None, 32), (32, 32), (20, 20)])
def test_an_input_gets_the_vocabulary_of_the_model_unless_it_has_one(cfg, own, expected):
    cfg.input.vocab_size = own
    assert completed(cfg).input.vocab_size == expected
    assert cfg.input.vocab_size == own


class Plain(Configurable):
    """Has no vocabulary."""

    @config_class
    class Config(Configurable.Config):
        size: int = 3


def test_inputs_and_models_without_a_vocabulary_are_unchanged(cfg):
    for own in (None, 99):
        cfg.input.vocab_size = own
        assert completed(cfg.clone(model=Plain.default_config())).input == cfg.input
    cfg.input = PlainInput.default_config().set(seq_len=4, global_batch_size=8)
    assert completed(cfg).input == cfg.input


class PlainInput(Input):
    """Has no vocabulary."""


MESH = {"pipeline": 1, "data": 2, "expert": 1, "fsdp": 4, "seq": 1, "model": 1}


def test_micro_batches_that_the_mesh_does_not_divide_are_refused(cfg):
    wanted = r"global_batch_size.*8.*num_microbatches.*2:.*data 2, fsdp 4, 8.*16"
    with pytest.raises(SplitError, match=wanted):
        check_batch(cfg.set(num_microbatches=2), MESH)


def test_a_chunk_of_the_loss_larger_than_a_micro_batch_is_refused(cfg):
    cfg.input.set(global_batch_size=16, seq_len=32)
    cfg.set(num_microbatches=2).model = CausalLM.default_config().set(loss_chunk_size=32)
    check_batch(cfg, MESH)
    cfg.model.loss_chunk_size = 33
    with pytest.raises(UserError, match=r"loss_chunk_size is 33.* 32 "):
        check_batch(cfg, MESH)


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "mesh", "fits"),
    [
        (8, 1, MESH, True),
        (16, 2, MESH, True),
        (24, 2, MESH, False),  # 12 sequences over 8 parts.
        (8, 2, MESH | {"fsdp": 1, "seq": 2, "model": 2}, True),  # These do not split the batch.
        (8, 4, MESH | {"fsdp": 1, "expert": 2}, False),
        (3, 3, {}, True),
    ],
)
def test_only_axes_that_split_the_batch_count(cfg, batch_size, num_microbatches, mesh, fits):
    cfg.set(num_microbatches=num_microbatches).input.global_batch_size = batch_size
    with contextlib.nullcontext() if fits else pytest.raises(SplitError, match="micro-batches"):
        check_batch(cfg, mesh)


def test_folders_are_inside_that_of_the_run_unless_they_are_set(cfg):
    cfg.set(dir="run").summary_writer.set(dir="mine")
    made = completed(cfg)
    assert (made.summary_writer.dir, made.summary_writer.jsonl_path) == (
        "mine",
        "run/metrics.jsonl",
    )
    assert made.checkpointer.dir == "run/checkpoints"
    assert cfg.summary_writer.jsonl_path is REQUIRED


def test_schedules_end_with_the_run_unless_they_have_an_end(cfg):
    cfg.learner.optimizer.learning_rate = config_for_function(cosine)
    assert completed(cfg.set(max_step=70)).learner.optimizer.learning_rate.max_step == 70
    assert cfg.learner.optimizer.learning_rate.max_step is REQUIRED
    cfg.learner.optimizer.learning_rate.max_step = 50
    assert completed(cfg).learner == cfg.learner


def test_policies_know_the_last_step_unless_they_have_one(cfg):
    cfg.max_step = 70
    made = completed(cfg)
    assert made.checkpointer.save_policy.max_step == 70
    assert made.evalers["val"].eval_policy.max_step == 70
    assert cfg.checkpointer.save_policy.max_step is None
    cfg.checkpointer.save_policy.max_step = 50
    assert completed(cfg).checkpointer.save_policy.max_step == 50
    cfg.checkpointer.save_policy = config_for_function(_never)
    assert completed(cfg).checkpointer.save_policy == cfg.checkpointer.save_policy


def _never():
    return lambda *, step, summaries: False


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "float64"])
def test_dtype_that_no_step_computes_in_is_refused(cfg, dtype):
    with pytest.raises(UserError, match=f"train_dtype is {dtype}"):
        check_config(cfg.set(train_dtype=dtype))


@pytest.mark.parametrize(
    ("schedule", "mesh", "has_effect"),
    [
        (Schedule.GPIPE, {"data": 8}, False),
        (Schedule.GPIPE, {"pipeline": 1, "expert": 8}, False),
        (Schedule.DUALPIPE_V, {"data": 8}, False),
        (Schedule.DUALPIPE_V, {"data": 4, "expert": 2}, True),
        (Schedule.ZB_V, {"pipeline": 2, "data": 4}, True),
    ],
)
def test_schedule_without_effect_is_reported(cfg, caplog, schedule, mesh, has_effect):
    cfg.pipeline_schedule = schedule
    assert schedule_on(cfg, mesh) == (schedule if has_effect else None)
    warn_unused_schedule(cfg, mesh)
    found = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
    assert len(found) == (not has_effect)
    assert has_effect or f"pipeline_schedule is {schedule.name}, but" in found[0]


def test_a_mesh_without_a_schedule_is_not_reported(cfg, caplog):
    warn_unused_schedule(cfg, MESH)
    assert not caplog.records
