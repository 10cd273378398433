"""Checks of a trainer's config, and the fields that are filled in."""

import contextlib

import pytest

from moelib.core.config import (
    REQUIRED,
    Configurable,
    RequiredFieldMissingError,
    config_class,
    config_for_function,
)
from moelib.core.config_text import set_from_text
from moelib.core.errors import UserError
from moelib.data.batches.input import Input
from moelib.data.batches.synthetic import SyntheticInput
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
    cfg.set(dir="s3://bucket/run").checkpointer.best_metric = "val/loss"
    cfg.input.vocab_size = None
    before = cfg.debug_string()
    check_config(cfg)
    assert cfg.debug_string() == before


REFUSED = [
    ("num_microbatches=3", r"global_batch_size.*8.*num_microbatches, 3"),
    ("train_dtype=int32", "train_dtype is int32"),
    ("train_dtype=float8_e4m3fn", "train_dtype is float8_e4m3fn"),
    ("train_dtype=float64", "train_dtype is float64"),
    ("dir=memory://run", r"checkpointer\.dir is 'memory://run'"),
    ("checkpointer.dir=memory://run", r"checkpointer\.dir is 'memory://run'"),
    ("checkpointer.best_metric=vla/loss", r"best_metric.*'vla/loss'.*'val'"),
    ("input=REQUIRED", "^input must be set"),
    ("evalers.val.input=REQUIRED", r"^evalers\.val\.input must be set"),
    ("evalers.val.input.seq_len=REQUIRED", r"^evalers\.val\.input\.seq_len must be set"),
    (
        f"input={SyntheticInput.__module__}:SyntheticInput",
        r"^input\.seq_len, input\.global_batch_size must be set",
    ),
]


@pytest.mark.parametrize(("change", "names"), REFUSED)
def test_settings_that_no_run_can_have_are_refused(cfg, change, names):
    set_from_text(cfg, change)
    with pytest.raises((UserError, RequiredFieldMissingError), match=names):
        check_config(cfg)


@pytest.mark.parametrize("name", ["max_step", "log_every_n_steps", "num_microbatches"])
def test_numbers_below_1_are_refused_when_they_are_set(cfg, name):
    with pytest.raises(UserError, match=f"{name}=0: .*int >= 1"):
        set_from_text(cfg, f"{name}=0")


def test_a_change_that_cannot_be_accepted_is_refused_when_it_is_set(cfg):
    with pytest.raises(UserError, match=r"accept_changes=\['model'\]: .*'schedule', 'train_dtype'"):
        cfg.set(accept_changes=["model"])


@pytest.mark.parametrize("path", ["input", "evalers.val.input"])
def test_vocabulary_of_an_input_beyond_the_models_is_refused(cfg, path):
    set_from_text(cfg, f"{path}.vocab_size=33")
    wanted = rf"^{path}\.vocab_size is 33, .*model\.vocab_size, which is 32"
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
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(
            SplitError, match=rf"{batch_size}.*num_microbatches.*{num_microbatches}:"
        )
    ):
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


@pytest.mark.parametrize(
    ("schedule", "mesh", "has_effect"),
    [
        (None, {"data": 8}, True),
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
