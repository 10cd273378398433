"""New runs that start from the checkpoint of another run."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointRecord,
    DamagedCheckpointError,
)
from moelib.core.errors import UserError
from moelib.launch import TrainFlags
from moelib.runs.folder import RunFolder
from moelib.train.init_from import InitFrom, sources
from tests import tiny
from tests.checkpoint.small import truncate_arrays


def config(directory, **fields):
    cfg = tiny.trainer_config(directory, save_every=2)
    cfg.learner.ema.decay = 0.9
    cfg.checkpointer.set(best_metric="val/loss", best_mode="max", keep_last_n=None)
    return cfg.set(**fields)


def start(run, **fields):
    return InitFrom.default_config().set(run=str(run), **fields)


def run(cfg):
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    return trainer


def initialized(cfg):
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    return trainer


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run of 8 steps: its folder and trainer."""
    folder = tmp_path_factory.mktemp("other")
    return folder, run(config(folder))


def test_a_branch_also_resumed_equals_the_continuation_bit_for_bit(other, tmp_path):
    folder, unbroken = other
    run(config(tmp_path, max_step=6, init_from=start(f"{folder}@4", state="all")))
    branch = run(config(tmp_path, init_from=start("nowhere")))
    tiny.assert_trees_equal(branch.trainer_state, unbroken.trainer_state)
    assert branch.input_state == unbroken.input_state
    want = {step: loss for step, loss in tiny.losses(folder).items() if step > 4}
    assert tiny.losses(tmp_path) == want
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    at_risk = {x["step"]: x.get("checkpoint/steps_at_risk") for x in lines if "loss" in x}
    assert (at_risk[5], at_risk[6]) == (1, 2)
    origin = {"run": str(folder), "step": 4, "state": "all"}
    record = CheckpointRecord.read(str(tmp_path / "checkpoints/step_00000008"))
    assert record.origin == origin
    assert "init_from.run: 'nowhere'" in (tmp_path / "config.txt").read_text()
    (event,) = (e for e in RunFolder(tmp_path).events() if e["event"] == "init_from")
    assert event | origin == event


def test_a_warm_start_on_another_mesh_has_the_averages_and_a_new_learner(other, tmp_path):
    folder, unbroken = other
    cfg = config(tmp_path, mesh_shape=(1, 2, 2, 2, 1, 1), init_from=start(folder), prng_seed=3)
    trainer = initialized(cfg)
    state, learner = trainer.trainer_state, trainer.learner
    tiny.assert_trees_equal(state.model, unbroken.model_params_for_eval())
    assert (trainer.step, int(state.step), trainer.input_state) == (0, 0, None)
    tiny.assert_trees_equal(state.learner, jax.jit(learner.init)(state.model))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert shardings == trainer.trainer_state_shardings


def test_the_best_checkpoint_is_that_of_the_other_run(other, tmp_path):
    folder, unbroken = other
    best = unbroken.best_step()
    assert best != 8  # The largest loss, by best_mode.
    cfg = config(tmp_path, init_from=start(f"{folder}@best"))
    cfg.checkpointer.best_metric = None
    assert initialized(cfg)._origin["step"] == best


@pytest.mark.slow
def test_a_hugging_face_model_is_a_start_too(tmp_path):
    from tests.train.small_run import make_hub

    (tmp_path / "hub").mkdir()
    make_hub(tmp_path / "hub")
    cfg = config(tmp_path / "run", init_from=start(tmp_path / "hub"))
    cfg.model = tiny.dense_model(288, num_layers=2, dim=8)
    cfg.input.vocab_size = 288
    found = initialized(cfg)
    tiny.assert_trees_equal(found.trainer_state.learner.ema.params, found.trainer_state.model)
    with pytest.raises(UserError, match="is no run"):
        initialized(cfg.set(init_from=start(tmp_path / "hub", state="all")))


class Renamed(tiny.TinyModel):
    """A model whose head has another name."""

    def _create_layer_parameter_specs(self):
        specs = super()._create_layer_parameter_specs()
        specs["output"] = specs.pop("head")
        return specs


def test_renamed_parameters(other, tmp_path):
    folder, unbroken = other
    rules = ["head -> output", "passes ->", "-> pas.*"]
    cfg = config(tmp_path, init_from=start(folder, rules=rules))
    cfg.model = Renamed.default_config()
    found, want = initialized(cfg).trainer_state.model, unbroken.model_params_for_eval()
    np.testing.assert_array_equal(found["output"], want["head"])
    np.testing.assert_array_equal(found["table"], want["table"])
    assert (float(found["passes"]), float(want["passes"])) == (0, 8)


@pytest.mark.parametrize(
    ("at", "fields", "dim", "error", "message"),
    [
        ("@5", {}, 16, CheckpointNotFoundError, "step 5; there are steps 2, 4"),
        ("/none", {}, 16, CheckpointNotFoundError, r"\(--init_from\) is .*there is no folder"),
        ("", {"rules": ["a ->"], "state": "all"}, 16, UserError, r"init_from\.rules"),
        ("", {}, 8, UserError, r"'head' is \[16, 32\] in .*, and \[8, 32\] in"),
        ("", {"state": "all"}, 8, CheckpointMismatchError, "model/head"),
    ],
)
def test_starts_that_are_refused(other, tmp_path, at, fields, dim, error, message):
    cfg = config(tmp_path, init_from=start(f"{other[0]}{at}", **fields))
    cfg.model.dim = dim
    with pytest.raises(error, match=message):
        initialized(cfg)


def test_checksums_are_compared(other, tmp_path):
    shutil.copytree(other[0], tmp_path / "other")
    truncate_arrays(str(tmp_path / "other/checkpoints/step_00000008"))
    with pytest.raises(DamagedCheckpointError):
        initialized(config(tmp_path / "new", init_from=start(tmp_path / "other")))


def test_a_start_killed_before_its_first_checkpoint_begins_from_the_same_step_again(
    other, tmp_path
):
    shutil.copytree(other[0], tmp_path / "other")
    newest, moved = tmp_path / "other/checkpoints/step_00000008", tmp_path / "moved"
    newest.rename(moved)
    cfg = config(tmp_path / "new", max_step=6, init_from=start(tmp_path / "other", state="all"))
    run(cfg)  # Takes no step.
    assert os.listdir(tmp_path / "new/checkpoints") == ["step_00000006"]
    shutil.rmtree(tmp_path / "new/checkpoints")
    moved.rename(newest)
    run(cfg)
    events = RunFolder(tmp_path / "new").events()
    assert [e["step"] for e in events if e["event"] == "init_from"] == [6, 6]


# -- Rules ---------------------------------------------------------------------------------------

THERE, HERE = ["a/w", "a/b", "c/w"], ["x/w", "x/b", "c/w"]


def test_the_first_rule_that_matches_renames():
    assert sources(HERE, HERE, (), "R") == {name: name for name in HERE}
    found = sources(THERE, HERE, [r"a/(\w) -> x/\1"], "R")
    assert found == {"x/w": "a/w", "x/b": "a/b", "c/w": "c/w"}
    found = sources(THERE, HERE, ["a/w->x/w", "a/.*  ->", "->x/b"], "R")
    assert found == {"x/w": "a/w", "c/w": "c/w"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([r"a/(\w) -> x/\1", "d.* -> e"], r"'d\.\* -> e'"),
        (["a/.* ->", "a/b -> x/b", "-> x/.*"], "'a/b -> x/b'"),
        (["a/.* ->", "-> x/.*", "-> y"], "'-> y'"),
        (["a/b -> x/b"], "R has a parameter 'a/w'"),
        (["a/b ->", "a/w -> x/w"], "R has no parameter 'x/b'"),
        ([r"a/(\w) -> x/\1", "-> x/b"], "'-> x/b' keeps .*'x/b', which R has as 'a/b'; .*'a/b ->'"),
        (["a/.* ->", "-> x/.*", "-> c/w"], "'-> c/w' keeps .*'c/w', which R has as 'c/w'"),
        (["a/. -> x/w"], "'a/w' and 'a/b' of R are both 'x/w'"),
        (["a/( -> b"], r"'a/\( -> b': .*unterminated"),
        ([r"a/b -> \1"], r"'a/b -> .*': .*group reference 1"),
        (["a/b"], "'a/b'; set"),
        (["->"], "'->'; set"),
    ],
)
def test_rules_that_do_not_fit_both_sides_are_refused(rules, message):
    with pytest.raises(UserError, match=message):
        sources(THERE, HERE, rules, "R")


def test_set_may_change_what_the_flag_sets():
    flags = TrainFlags(
        module="tests.cli.test_launch",
        config="tiny",
        init_from="runs/dense",
        init_from_state="state",
        set=("init_from.upcycle=moelib.train.upcycle:Upcycle", "init_from.upcycle.seed=3"),
    )
    found = flags.load().init_from
    assert (found.run, found.state, found.upcycle.seed) == ("runs/dense", "state", 3)
