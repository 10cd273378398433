"""Bad steps: taken again, skipped if the data are to blame, reported if the hardware is."""

import math

import jax
import jax.numpy as jnp
import pytest

from moelib.core.config import config_class
from moelib.core.config_text import parse, set_from_text
from moelib.core.errors import UserError
from moelib.data.batches.synthetic import SyntheticInput
from moelib.runs.folder import RunFolder
from moelib.train.failures import BadStepError, NonFiniteError
from moelib.train.metrics import NON_FINITE
from moelib.train.watchers.bad_steps import SUSPECTED, BadSteps, counts
from tests import tiny

MARK = 31  # A batch that begins with this word twice has a loss that is not finite.


class MarkedInput(SyntheticInput):
    """A synthetic input with marked batches."""

    @config_class
    class Config(SyntheticInput.Config):
        marked: tuple[int, ...] = ()

    def batch(self, step, rows=None):
        batch = super().batch(step, rows)
        batch["input_ids"][0, :2] = MARK if step in self.config.marked else 1
        return batch


class MarkedModel(tiny.TinyModel):
    """A model whose loss is not finite on marked batches."""

    def forward(self, batch):
        loss, metrics = super().forward(batch)
        bad = jnp.all(batch["input_ids"][0, :2] == MARK)
        return loss._replace(mean=loss.mean * jnp.where(bad, jnp.nan, 1.0)), metrics


def config(directory, *, marked=(), save_every=2, max_step=8, **policy):
    cfg = tiny.trainer_config(directory, max_step=max_step, save_every=save_every, evaler=False)
    cfg.model = MarkedModel.default_config()
    values = {name: value for name, value in cfg.input.items() if name != "klass"}
    cfg.input = MarkedInput.default_config().set(**values, marked=marked)
    cfg.watchers["bad_steps"] = BadSteps.default_config().set(**policy)
    return cfg


def run(cfg, change=lambda x: x, at=0):
    """Runs a config; once, after step `at`, `change` is applied to the parameters."""
    trainer, left = cfg.instantiate(parent=None), [at]

    def change_head(_):
        if trainer.step in left:
            left.remove(trainer.step)
            state = trainer.trainer_state
            head = state.model["head"]
            model = {**state.model, "head": jax.device_put(change(head), head.sharding)}
            trainer._state = state._replace(model=model)

    tiny.after_each_step(trainer, change_head)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The state and the losses of a run without bad steps."""
    folder = tmp_path_factory.mktemp("unbroken")
    state = run(config(folder).set(watchers={})).trainer_state
    return state, tiny.losses(folder)


def bad_steps_of(directory):
    """Returns (step, action) of the bad steps in a run's log."""
    events = RunFolder(directory).events()
    return [(e["step"], e["action"]) for e in events if e["event"] == "bad_step"]


def test_batches_back_to_the_durable_checkpoint_are_skipped_after_local_ones(tmp_path):
    cfg = config(tmp_path / "run", marked=(8,), save_every=5, max_step=10, skip_before=3)
    cfg.checkpointer.set(local_dir=str(tmp_path / "local"), local_every_n_steps=1)
    run(cfg)
    assert bad_steps_of(tmp_path / "run") == [(9, "rewind"), (9, "skip_batches")]
    event = [e for e in RunFolder(tmp_path / "run").events() if e["event"] == "bad_step"][-1]
    assert (event["first"], event["stop"]) == (5, 9)


@pytest.mark.parametrize("save_every", [2, 100])
def test_a_run_that_meets_bad_data_equals_one_that_skips_them(tmp_path, capsys, save_every):
    found = run(config(tmp_path / "a", marked=(4,), save_every=save_every))
    assert bad_steps_of(tmp_path / "a") == [(5, "rewind"), (5, "skip_batches")]
    first, second = (e for e in RunFolder(tmp_path / "a").events() if e["event"] == "bad_step")
    assert (second["position"], second["first"], second["stop"]) == (4, 4, 5)
    assert second["same_bits"]
    assert (first["loss"], second["loss_before"]) == ("nan", "nan")
    assert "1 taken again, 1 on data that are skipped" in capsys.readouterr().out
    assert list(tiny.losses(tmp_path / "a")) == list(range(1, 9))

    cfg = config(tmp_path / "b", save_every=save_every).set(skip_batches=["4:5"], watchers={})
    tiny.assert_trees_equal(found.trainer_state, run(cfg).trainer_state)
    assert tiny.losses(tmp_path / "a") == tiny.losses(tmp_path / "b")
    assert found.input_state["step"] == 9


def test_a_bad_step_that_is_good_the_second_time_is_one_of_the_hardware(unbroken, tmp_path, capsys):
    found = run(config(tmp_path), lambda x: x.at[0, 0].set(jnp.nan), at=3)
    tiny.assert_trees_equal(found.trainer_state, unbroken[0])
    assert tiny.losses(tmp_path) == unbroken[1]
    (event,) = (e for e in RunFolder(tmp_path).events() if e["event"] == SUSPECTED)
    assert (event["step"], event["position"], event["loss_before"]) == (4, 3, "nan")
    assert math.isfinite(float(event["loss"]))
    assert len(event["devices"]) == jax.device_count()
    printed = capsys.readouterr()
    assert "SILENT DATA CORRUPTION SUSPECTED: step 4" in printed.err
    assert "1 taken again, 1 of suspected data corruption" in printed.out


def test_a_spike_is_taken_again_and_the_last_step_is_judged_too(unbroken, tmp_path):
    policy = {"spike": "rewind", "spike_window": 3}
    found = run(config(tmp_path, **policy), lambda x: 50 * x, at=7)
    assert bad_steps_of(tmp_path) == [(8, "rewind")]
    tiny.assert_trees_equal(found.trainer_state, unbroken[0])


def test_rewinds_are_bounded_over_all_starts_of_a_run(tmp_path):
    cfg = config(tmp_path, marked=(2, 5), max_rewinds=3)
    for actions in (["rewind", "skip_batches", "rewind", "stop"], ["stop"]):
        with pytest.raises(NonFiniteError, match=r"step 5:.*step 4, in"):
            run(cfg)
        done = [action for _, action in bad_steps_of(tmp_path)]
        assert done[-len(actions) :] == actions
    cfg.watchers["bad_steps"] = BadSteps.default_config().set(max_rewinds=5)
    run(cfg)
    assert list(tiny.losses(tmp_path)) == list(range(1, 9))


def test_skipped_steps_are_those_of_the_learner(tmp_path):
    run(config(tmp_path, marked=(2,), non_finite="skip", max_step=3))
    events = [e for e in RunFolder(tmp_path).events() if e["event"] == "skipped_step"]
    assert [(e["step"], e["position"]) for e in events] == [(3, 2)]


def test_bad_steps_need_a_checkpointer(tmp_path):
    with pytest.raises(UserError, match=r"watchers\.\w+ .*checkpointer is None"):
        config(tmp_path).set(checkpointer=None).instantiate(parent=None)


def test_the_policy_of_the_docs_is_part_of_the_config(tmp_path):
    cfg = tiny.trainer_config(tmp_path)
    # --8<-- [start:policy]
    policy = BadSteps.default_config().set(spike="rewind", spike_sigmas=8.0)
    cfg.watchers["bad_steps"] = policy
    # --8<-- [end:policy]
    assert parse(cfg.debug_string()) == cfg
    set_from_text(cfg, "watchers.bad_steps=moelib.train.watchers.bad_steps:BadSteps")
    assert cfg.watchers["bad_steps"] == BadSteps.default_config()


# -- Decisions -----------------------------------------------------------------------------------


def policy(**fields):
    return BadSteps.default_config().set(**fields).instantiate()


def judge(policy, step, loss, *, first=0):
    scalars = {"objective": loss, "gradient_norm": 1.0, NON_FINITE: float(not math.isfinite(loss))}
    return policy.judge(step, step - 1, scalars, first=first)


def test_a_restart_continues_with_the_events_of_the_log(tmp_path):
    RunFolder(tmp_path).log(**judge(policy(), 7, math.nan))
    log = RunFolder(tmp_path).events()
    bad, good = policy(), policy()
    bad.resume(4, log)
    assert judge(bad, 7, math.nan)["action"] == "skip_batches"
    good.resume(4, log)
    assert judge(good, 6, 1.0) is None
    assert judge(good, 7, 1.5)["event"] == SUSPECTED
    assert judge(good, 7, 1.5) is None
    changed = policy()  # Of a run with another learning rate, which may well be good now.
    changed.resume(4, [*log, {"event": "changed"}])
    assert judge(changed, 7, 1.5) is None


def test_a_step_that_is_bad_with_other_bits_says_so():
    found = policy(spike="rewind", spike_window=2)
    for step, loss in enumerate([1.0, 1.1], 1):
        assert judge(found, step, loss) is None
    event = judge(found, 3, 9.0)
    assert event["action"] == "rewind"
    assert float(event["limit"]) == pytest.approx(1.35)
    found.resume(1, [event])
    again = judge(found, 3, 8.0)
    assert (again["action"], again["same_bits"], again["loss_before"]) == (
        *("skip_batches", False),
        "9.0",
    )


def test_a_spike_is_judged_by_the_steps_before_it():
    found = policy(spike="stop", spike_window=3, spike_sigmas=2.0)
    losses = [9.0, 1.0, 1.2, 1.4]  # The first is not in the window of the last.
    assert [judge(found, step, loss) for step, loss in enumerate(losses, 1)] == [None] * 4
    assert judge(found, 5, 1.5) is None  # 1.2 + 2 * 0.163
    assert counts([judge(found, 6, 9.0)]) == "1 stopped"
    assert judge(policy(), 6, 9.0) is None


@pytest.mark.parametrize(
    ("first", "action", "skipped"),
    [
        (0, "skip_batches", (3, 7)),
        (5, "skip_batches", (5, 7)),
        (9, "skip_batches", (6, 7)),
        (None, "stop", (None, None)),  # The input cannot skip.
    ],
)
def test_batches_before_a_bad_one_are_skipped_as_far_as_the_checkpoint(first, action, skipped):
    found = policy(skip_before=3)
    found.resume(0, [judge(found, 7, math.nan)])
    event = judge(found, 7, math.nan, first=first)
    assert (event["action"], (event.get("first"), event.get("stop"))) == (action, skipped)


@pytest.mark.parametrize("field", ["spike_window", "spike_sigmas", "max_rewinds", "skip_before"])
def test_numbers_out_of_their_range_are_refused(field):
    with pytest.raises(UserError, match=f"{field}=-1"):
        policy(**{field: -1})


def test_a_spike_that_stops_is_no_error_of_floats():
    assert issubclass(NonFiniteError, BadStepError)
    assert not issubclass(BadStepError, FloatingPointError)
