"""Evaluation: totals over the whole set, not means of batches."""

import math

import jax
import numpy as np
import optax
import pytest

from moelib.checkpoint.contents import list_checkpoints
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.data.batches.input import PADDING_LABEL
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import Packing
from moelib.data.batches.synthetic import SyntheticTokens
from moelib.data.tokens.token_store import TokenStore
from moelib.runs.folder import RunFolder
from moelib.train.evaler import SpmdEvaler
from tests import tiny


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = tiny.trainer_config(tmp_path_factory.mktemp("run")).instantiate(parent=None)
    trainer.init()
    return trainer


def evaluate(trainer, cfg):
    evaler = SpmdEvaler.default_config().set(name="val", input=cfg)
    evaler = evaler.instantiate(parent=None, model=trainer.model)
    with jax.set_mesh(trainer.mesh()):
        return evaler.evaluate(trainer.trainer_state.model, trainer.mesh())


def test_means_are_over_all_tokens(trainer):
    cfg = tiny.input_config(mode=InputMode.EVALUATE, seed=1)
    lm_input = cfg.instantiate()
    batches = [lm_input.batch(i) for i in range(lm_input.num_batches)]
    valid = [int(np.sum(batch["target_labels"] != PADDING_LABEL)) for batch in batches]
    assert valid[-1] < valid[0]  # The last batch is padded: a mean of means would be wrong.
    table, head = (np.asarray(trainer.trainer_state.model[name]) for name in ("table", "head"))
    nats, largest = 0.0, []
    for batch in batches:
        logits, labels = table[batch["input_ids"]] @ head, batch["target_labels"]
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        nats += float(np.sum(losses, where=labels != PADDING_LABEL))
        largest.append(np.max(logits))
    num_bytes = sum(int(batch["target_num_bytes"].sum()) for batch in batches)
    found = evaluate(trainer, cfg)
    assert found["num_tokens"] == sum(valid)
    assert found["loss"] == pytest.approx(nats / sum(valid), rel=1e-5)
    assert found["logits_max"] == pytest.approx(float(max(largest)), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / sum(valid)), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_input_without_a_token_to_predict_is_refused(trainer):
    cfg = tiny.input_config(mode=InputMode.EVALUATE).set(max_batches=0)
    with pytest.raises(ValueError, match="val"):
        evaluate(trainer, cfg)


def test_an_input_without_an_end_is_refused_before_the_first_step(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path)
    cfg.evalers["val"].input = tiny.input_config()
    trainer = cfg.instantiate(parent=None)
    monkeypatch.setattr(trainer, "run_step", lambda *args, **kwargs: pytest.fail("took a step"))
    with pytest.raises(UserError, match=r"evalers\.val\.input never ends.* mode to EVALUATE, or"):
        trainer.run()


def test_average_of_the_parameters_is_evaluated(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=3, save_every=3)
    cfg.learner.ema.decay = 0.9
    trainer = cfg.instantiate(parent=None)
    out = trainer.run()
    average = trainer.model_params_for_eval()
    assert not np.array_equal(average["head"], trainer.trainer_state.model["head"])
    with jax.set_mesh(trainer.mesh()):
        again = trainer.evalers["val"].evaluate(average, trainer.mesh())
    assert out["evaler_summaries"]["val"] == again


def test_best_metric_that_no_evaluation_has_is_refused(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=1)
    cfg.checkpointer.set(best_metric="val/perplexty", keep_best_n=1)
    with pytest.raises(ValueError, match=r"best_metric.*'val/perplexty'.*'val/perp"):
        cfg.instantiate(parent=None).run()
    # The step is not lost.
    assert list_checkpoints(RunFolder(cfg.dir).checkpoints).keys() == {1}


def test_best_checkpoint_is_kept(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=4, save_every=1)
    cfg.checkpointer.set(best_metric="val/loss", best_mode="max", keep_best_n=1, keep_last_n=1)
    cfg.instantiate(parent=None).run()
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["step_00000001", "step_00000004"]  # The loss falls.


def test_inputs_of_evalers_are_opened_before_the_first_step(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path)
    nowhere = TokenStore.default_config().set(path=str(tmp_path / "nowhere"))
    cfg.evalers["val"].input = LMInput.default_config().set(
        global_batch_size=8, seq_len=16, source=nowhere, mode=InputMode.EVALUATE
    )
    trainer = cfg.instantiate(parent=None)
    monkeypatch.setattr(trainer, "run_step", lambda *args, **kwargs: pytest.fail("took a step"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        trainer.run()


def mixed_input():
    """Returns an evaluation of two batches of a mixture, and none of the source `rare`."""
    sources = {
        name: SyntheticTokens.default_config().set(
            vocab_size=32, num_documents=64, max_document_tokens=size, seed=size
        )
        for name, size in {"web": 20, "code": 40, "rare": 30}.items()
    }
    weights = {"web": 3.0, "code": 1.0, "rare": 0.001}
    mixture = Mixture.default_config().set(sources=sources, weights=weights)
    cfg = LMInput.default_config().set(source=mixture, packing=Packing.BEST_FIT, max_batches=2)
    return cfg.set(seq_len=16, global_batch_size=8)


def test_losses_by_source_are_those_of_its_sequences_and_sum_to_the_whole():
    cfg = mixed_input()
    model = tiny.dense_model(32, dim=8).instantiate(parent=None)
    evaler = SpmdEvaler.default_config().set(name="val", input=cfg)
    mesh, params = tiny.mesh(data=2, seq=2, model=2), tiny.initial(model)
    evaler = evaler.instantiate(parent=None, model=model)
    with jax.set_mesh(mesh):
        found = evaler.evaluate(params, mesh)
    lm_input = cfg.instantiate()
    forward = jax.jit(lambda batch: functional(model, None, params, (batch,), is_training=False))
    for k, name in enumerate(lm_input.source_names):
        nats = tokens = 0.0
        for position in range(2):
            batch = lm_input.batch(position)
            other = lm_input.source_ids(position) != k
            batch["target_labels"][other] = PADDING_LABEL
            (loss, _), _ = forward(batch)
            nats, tokens = nats + float(loss.mean * loss.weight), tokens + float(loss.weight)
        assert found[f"num_tokens/{name}"] == tokens
        if tokens:
            assert found[f"cross_entropy/{name}"] == pytest.approx(nats / tokens, rel=1e-5)
    assert "cross_entropy/rare" not in found  # It has no sequence among the first 16.
    assert found["num_tokens/rare"] == 0
    parts = [(found[f"num_tokens/{n}"], found[f"cross_entropy/{n}"]) for n in ("web", "code")]
    assert sum(num for num, _ in parts) == found["num_tokens"]
    assert min(num for num, _ in parts) > 20
    total = sum(num * mean for num, mean in parts)
    assert total / found["num_tokens"] == pytest.approx(found["loss"], rel=1e-6)
    assert not any("by_source" in name for name in found)
