"""The settings that a resumed run may change, and those that it may not."""

import dataclasses
import pathlib

import pytest

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.moments import MomentFormat
from moelib.runs import identity as identity_lib
from moelib.runs.folder import CONFIG_FILE, RunFolder
from moelib.runs.identity import (
    TrainerDirConflictError,
    check_directory,
    check_processes,
    identity,
)
from moelib.runtime.versions import library_versions
from tests import tiny


@pytest.fixture
def folder(tmp_path):
    """A folder with the config of a run."""
    RunFolder(tmp_path).write_config(tiny.trainer_config("somewhere"))
    return tmp_path


def changed(path, value):
    cfg = tiny.trainer_config("somewhere")
    cfg.set_recursively(path, value=value)
    return cfg


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("max_step", 99),  # The rate is constant.
        ("mesh_shape", (1, 1, 1, 8, 1, 1)),
        ("log_every_n_steps", 7),
        ("checkpointer.keep_last_n", 9),
        ("learner.offload_state", True),
    ],
)
def test_setting_that_may_change(folder, path, value):
    check_directory(changed(path, value), RunFolder(folder))


def scheduled(**fields):
    """Returns the config of a run whose rate falls to 0 at its last step."""
    cfg = tiny.trainer_config("somewhere", max_step=8).set(**fields)
    rate = config_for_function(schedules.cosine).set(peak_lr=0.1, warmup_steps=1)
    cfg.learner.optimizer.learning_rate = rate
    return cfg


@pytest.mark.parametrize(
    ("path", "was", "value", "name"),
    [
        ("max_step", "8", 16, "schedule"),
        ("learner.optimizer.learning_rate.max_step", "not set", 4, "schedule"),
        ("train_dtype", "not set", "bfloat16", "train_dtype"),
        ("num_microbatches", "1", 2, "accumulation"),
        ("model.dim", "16", 24, "config"),
        ("prng_seed", "0", 3, "config"),
        ("input.seq_len", "16", 32, "data"),
        ("learner.optimizer.weight_decay", "0.0", 0.5, "config"),
        ("learner.ema.decay", "not set", 0.9, "config"),
    ],
)
def test_a_change_of_all_further_steps_must_be_accepted(path, was, value, name, tmp_path, caplog):
    RunFolder(tmp_path).write_config(scheduled())
    cfg = scheduled()
    check_directory(cfg, RunFolder(tmp_path))
    cfg.set_recursively(path, value=value)
    message = f"{path} is {was} .* and {value!r} in .*--accept_changes={name}"
    with pytest.raises(TrainerDirConflictError, match=message):
        check_directory(cfg, RunFolder(tmp_path))
    assert not caplog.records
    check_directory(cfg.set(accept_changes=[name]), RunFolder(tmp_path))
    assert path in caplog.records[0].message
    RunFolder(tmp_path).write_config(cfg.set(accept_changes=None))
    check_directory(cfg, RunFolder(tmp_path))


def with_clipping(**fields):
    """Returns the config of a run whose gradients are clipped."""
    cfg = scheduled(**fields)
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(
        args=[clip, cfg.learner.optimizer]
    )
    return cfg


def test_rates_clipping_skipping_and_operation_change_with_an_event(tmp_path, caplog):
    RunFolder(tmp_path).write_config(with_clipping())
    cfg = with_clipping(log_every_n_steps=7, stop_on_nan=False, dir="moved")
    first, second = cfg.learner.optimizer.args
    first.max_norm = 0.5
    second.learning_rate.peak_lr = 0.01
    cfg.learner.skip = config_for_function(transforms.skip_bad_steps).set(drop_norm=2.0)
    record = dataclasses.replace(record_of(with_clipping()), mesh={"fsdp": 8})
    for _ in range(2):  # A start that takes no step logs no event again.
        caplog.clear()
        check_directory(cfg, RunFolder(tmp_path), record, mesh={"fsdp": 4})
        events = [e for e in RunFolder(tmp_path).events() if e["event"] == "changed"]
        found = {event["path"]: (event["before"], event["now"]) for event in events}
        assert found | {"log_every_n_steps": ("1", "7")} == found
        assert found["learner.optimizer.args[0].max_norm"] == ("1.0", "0.5")
        assert found["learner.optimizer.args[1].learning_rate.peak_lr"] == ("0.1", "0.01")
        assert found["learner.skip.drop_norm"] == ("not set", "2.0")
        assert found["mesh"] == ("fsdp=8", "fsdp=4")
        assert {event["step"] for event in events} == {7}
        assert "dir" not in found
        assert len(found) == len(events) == len(caplog.records)


def test_both_rates_of_muon_change_with_an_event(tmp_path):
    cfg = tiny.trainer_config("somewhere")
    cfg.learner.optimizer = config_for_function(optimizers.muon_optimizer)
    cfg.learner.optimizer.set(learning_rate=0.1, adam_learning_rate=0.01)
    RunFolder(tmp_path).write_config(cfg)
    before = record_of(cfg)
    cfg.learner.optimizer.set(learning_rate=0.2, adam_learning_rate=0.02)
    check_directory(cfg, RunFolder(tmp_path), before)
    changed = {e["path"] for e in RunFolder(tmp_path).events() if e["event"] == "changed"}
    rates = {"learner.optimizer.learning_rate", "learner.optimizer.adam_learning_rate"}
    assert changed == rates


def test_many_changes_are_events_and_some_lines(tmp_path, caplog):
    RunFolder(tmp_path).write_config(tiny.trainer_config("somewhere", evaler=False))
    check_directory(tiny.trainer_config("somewhere"), RunFolder(tmp_path))
    num = len(RunFolder(tmp_path).events())
    assert num > 10
    assert len(caplog.records) == 11
    assert f"{num - 10} more changes of the config are in events.jsonl" in caplog.text


def test_moments_in_8_bits_are_not_converted(folder):
    cfg = changed("learner.first_moment", MomentFormat.EIGHT_BIT).set(accept_changes=["config"])
    message = r"learner\.first_moment is .*FLOAT32.*EIGHT_BIT in this config, but stored moments"
    with pytest.raises(TrainerDirConflictError, match=message):
        check_directory(cfg, RunFolder(folder))
    cfg.learner.first_moment = MomentFormat.BFLOAT16
    check_directory(cfg, RunFolder(folder))


def test_other_libraries_than_at_the_checkpoint_are_logged(tmp_path, caplog):
    cfg = scheduled()
    record = dataclasses.replace(record_of(cfg), versions=library_versions() | {"jax": "0.1"})
    RunFolder(tmp_path).write_config(cfg)  # As of a start with these libraries that took no step.
    check_directory(cfg, RunFolder(tmp_path), record)
    (line,) = (line.message for line in caplog.records)
    assert line.startswith("jax was 0.1 in ")
    assert "step 7" in line
    caplog.clear()
    check_directory(cfg, RunFolder(tmp_path), record_of(cfg), mesh={"fsdp": 4})  # Without a mesh.
    assert not caplog.records


def test_the_class_of_the_trainer_and_its_own_fields_may_not_change():
    cfg = tiny.trainer_config("somewhere")
    own = f"{cfg.debug_string()}own_rate: 3\n"
    assert identity(own, cfg)["own_rate"] == "3"
    assert identity(own, cfg)["klass"] == "moelib.train.trainer:SpmdTrainer"
    names = "".join(f"{name}: 1\n" for name, _ in cfg.items())
    assert identity(names, cfg).keys() - {"klass"} == {"model", "learner", "input", "prng_seed"}


def test_all_processes_have_the_same_config_except_for_paths(monkeypatch):
    digests = []
    monkeypatch.setattr(identity_lib, "gather_json", lambda x: digests.append(x) or [x, x])
    check_processes(changed("dir", "here"))
    check_processes(changed("dir", "there"))
    assert digests[0] == digests[1]
    third = lambda x: "digest" if isinstance(x, str) else {**x, "learner.optimizer.b1": "0.5"}
    monkeypatch.setattr(identity_lib, "gather_json", lambda x: [x, x, third(x)])
    with pytest.raises(UserError, match=r"b1 is 0\.9 in process 0, and 0\.5 in process 2;"):
        check_processes(changed("dir", "here"))


@pytest.mark.parametrize("which", [0, 1])
def test_all_processes_have_the_same_data(which, tmp_path, monkeypatch):
    gathered = []

    def other(values):
        if isinstance(values, dict):
            return {**values, next(name for name in values if "source" in name): "f00"}
        gathered.append(values)  # The digest: of the config, the evaluation's input, the input.
        return "other" if len(gathered) == 2 + which else values

    monkeypatch.setattr(identity_lib, "gather_json", lambda x: [x, other(x)])
    name = [r"evalers\.val\.input", "input"][which]
    match = rf"^{name}\.source.* is .* in process 0, and f00 in process 1; .* same data"
    with pytest.raises(UserError, match=match):
        tiny.trainer_config(tmp_path, max_step=1).instantiate(parent=None).run()


# -- The config in a checkpoint ------------------------------------------------------------------


def record_of(cfg):
    config = cfg.debug_string()
    return CheckpointRecord(7, config=config, arrays={}, checksums={}, versions={})


def test_the_config_of_a_checkpoint_replaces_a_missing_file(tmp_path):
    record = record_of(tiny.trainer_config("somewhere"))
    check_directory(tiny.trainer_config("somewhere"), RunFolder(tmp_path), record)
    with pytest.raises(TrainerDirConflictError, match=r"model.dim.*16.*24"):
        check_directory(changed("model.dim", 24), RunFolder(tmp_path), record)


def test_a_changed_file_is_reported_and_not_used(folder, caplog):
    cfg = tiny.trainer_config("somewhere")
    check_directory(cfg, RunFolder(folder), record_of(cfg))
    assert not caplog.records
    edit(folder, "learning_rate: 0.02", "learning_rate: 0.3")
    check_directory(cfg, RunFolder(folder), record_of(cfg))
    (line,) = (record.message for record in caplog.records)
    assert "learning_rate is 0.3 in the file, and 0.02 here" in line
    caplog.clear()
    warm = changed("learner.optimizer.learning_rate", 0.3)  # A start that takes no step yet.
    check_directory(warm, RunFolder(folder), record_of(cfg))
    assert "in the file" not in caplog.text
    edit(folder, "learning_rate: 0.3", "learning_rate: 0.02")
    caplog.clear()
    edit(folder, "model.dim: 16", "model.dim: 24")
    check_directory(cfg, RunFolder(folder), record_of(cfg))
    (line,) = (record.message for record in caplog.records)
    for part in (f"{folder}/config.txt", "step 7", "model.dim is 24 in the file", "16"):
        assert part in line
    caplog.clear()
    edit(folder, "model.dim: 24", f"model.dim: {'9' * 4000}")
    check_directory(cfg, RunFolder(folder), record_of(cfg))
    assert max(len(record.message) for record in caplog.records) < 1000


def edit(folder, old, new):
    """Replaces a part of config.txt, which must be there."""
    file = pathlib.Path(folder, CONFIG_FILE)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_new_field_at_its_default_is_no_difference(folder):
    edit(folder, "learner.offload_state: False\n", "")
    edit(folder, "model.aux_weight: 0.01\n", "")
    check_directory(tiny.trainer_config("somewhere"), RunFolder(folder))
    with pytest.raises(TrainerDirConflictError, match=r"model.aux_weight.*0\.01"):
        check_directory(changed("model.aux_weight", 0.5), RunFolder(folder))


def test_chunks_of_the_loss_and_the_kind_of_a_dispatcher_may_change_but_not_its_capacity():
    def lines(model):
        cfg = tiny.trainer_config("somewhere").set(model=model)
        return identity(cfg.debug_string(), cfg)

    assert lines(tiny.model_config()) == lines(tiny.model_config(loss_chunk_size=64))
    dispatchers = [
        RaggedDispatcher.default_config(),
        SortedDispatcher.default_config(),
        CapacityDispatcher.default_config().set(capacity_factor=2.0),
    ]
    ragged, by_sort, capacity = (lines(tiny.plain_moe(dispatcher=x)) for x in dispatchers)
    assert ragged == by_sort
    assert capacity.items() - ragged.items() == {("model.dispatcher.capacity_factor", "2.0")}
