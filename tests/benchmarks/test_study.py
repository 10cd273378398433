"""The study: its plan, its page, and what is skipped."""

import gzip
import json

import pytest

from benchmarks import study
from moelib.analysis.training_runs import MIN_STEPS
from moelib.core.errors import UserError
from moelib.models.cost import model_cost
from moelib.operations.dense_twin import dense_twin


def test_all_runs_are_long_enough_and_twins_have_equal_flops():
    planned = study.runs(study.Flags())
    assert len(planned) == 2 * 3 * len(study.SIZES)
    assert min(run.steps for run in planned) >= MIN_STEPS
    assert [run.steps for run in planned[::2]] == [run.steps for run in planned[1::2]]
    assert len({run.name for run in planned}) == len(planned)
    ten = study.runs(study.Flags(scale=10.0, num_sizes=2))
    assert ten[0].steps == pytest.approx(10 * planned[0].steps, rel=0.01)
    assert len(ten) == 12


@pytest.mark.parametrize("size", study.SIZES)
def test_every_model_has_its_twin(size):
    moe, dense = (study.config(size, kind) for kind in study.KINDS)
    assert dense_twin(moe).config == dense
    costs = [
        model_cost(cfg.model.clone(name="model").instantiate(parent=None), seq_len=study.SEQ_LEN)
        for cfg in (moe, dense)
    ]
    flops = [cost.train_flops_per_token for cost in costs]
    assert flops[1] == pytest.approx(flops[0], rel=0.02)
    assert costs[0].total_parameters > costs[1].total_parameters


def test_a_run_is_finished_after_its_last_evaluation(tmp_path):
    flags = study.Flags(output=str(tmp_path))
    run = study.Run("a", "moe-32x3", 1.0, 20)
    assert not study.is_finished(flags, run)
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"step": 20, "mean_loss": 3.0}) + "\n")
    assert not study.is_finished(flags, run)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 20, study.METRIC: 3.0}) + "\n")
    assert study.is_finished(flags, run)
    assert not study.is_finished(flags, run._replace(steps=21))


def test_measured_steps_are_read_again_for_the_planned_models(tmp_path):
    flags = study.Flags(output=str(tmp_path), num_sizes=1)
    seconds = dict.fromkeys(study.named_trainer_configs(), 0.1)
    (tmp_path / "step_seconds.json").write_text(json.dumps(seconds))
    planned = study.runs(flags)
    assert study.step_seconds(flags, planned) == {"moe-24x2": 0.1, "dense-24x2": 0.1}
    assert "32x3" not in str(study.estimate(flags, planned).rows)


def test_the_results_replace_those_of_before(tmp_path):
    page = tmp_path / "study.md"
    study.write_page(str(page), ["first"])
    page.write_text("Above\n" + page.read_text() + "Below\n")
    study.write_page(str(page), ["second", "third"])
    text = page.read_text()
    assert text.startswith("Above\n")
    assert text.endswith("Below\n")
    assert "first" not in text
    assert "second\n\nthird" in text
    page.write_text("no comments")
    with pytest.raises(UserError, match=r"study.md: it lacks the lines"):
        study.write_page(str(page), [])


def test_text_of_packages_is_decompressed(tmp_path):
    (tmp_path / "words.dict.dz").write_bytes(gzip.compress("naïve".encode()))
    study._extract(str(tmp_path / "words.dict.dz"), str(tmp_path), "words")
    assert (tmp_path / "words.txt").read_text(encoding="utf-8") == "naïve"
    (tmp_path / "data.adj").write_text("00001740 00 a 01 able 0 005 = 052 | having means  \n")
    study._extract(str(tmp_path / "data.adj"), str(tmp_path), "wordnet-adj")
    assert (tmp_path / "wordnet-adj.txt").read_text() == "having means"
    with pytest.raises(UserError, match="other: the package has no such file"):
        study._extract(str(tmp_path / "none"), str(tmp_path), "other")
