"""`evaluate`: checkpoints of a run and converted models on tasks and texts; the files it writes."""

import csv
import dataclasses
import importlib.util
import json
import math
import pathlib
import shutil
import string

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import END_OF_TEXT, Tokenizer
from moelib.evaluation.evaler import TaskEvaler
from moelib.evaluation.evaluate import evaluate
from moelib.evaluation.evaluations import Metric
from moelib.evaluation.perplexity import perplexities
from moelib.evaluation.report import results_of, results_table, write_results
from moelib.evaluation.scoring import Score
from moelib.runs.loading import load_model
from moelib.runs.phases import Phase, applied
from moelib.train import convert
from tests import tiny
from tests.evaluation import folders

DATA = str(folders.DATA)
CORPUS = str(folders.DATA / "corpus.jsonl")
HUGGING_FACE = pathlib.Path(__file__).parents[1] / "huggingface/fixtures"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of three steps, each saved, the second and third evaluated."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer.default_config().set(path=DATA).instantiate()
    texts = [f"document number {i} of many" for i in range(60)]
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    prepare(source, tokenizer, str(folder / "store"))
    cfg = tiny.trainer_config(folder / "run", max_step=3, save_every=1, evaler=False)
    cfg.checkpointer.keep_last_n = 3
    cfg.train_dtype = jnp.bfloat16
    cfg.model = tiny.dense_model(folders.PADDED_VOCAB_SIZE, dim=8)
    cfg.input = LMInput.default_config().set(
        source=TokenStore.default_config().set(path=str(folder / "store")),
        seq_len=64,
        global_batch_size=8,
    )
    # --8<-- [start:evaler]
    cfg.evalers["val"] = TaskEvaler.default_config().set(
        input=cfg.input.clone(mode=InputMode.EVALUATE),
        tasks=["openbookqa", "piqa"],
        data_dir=DATA,
        num_fewshot=0,
        limit=3,
    )
    cfg.evalers["val"].eval_policy.set(n=2)
    # --8<-- [end:evaler]
    with jax.numpy_dtype_promotion("standard"):  # For Optax.
        cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    return folder / "run"


@pytest.fixture(scope="module")
def model(run):
    """Returns the model of the second step."""
    return load_model(str(run), step=2)


def values(results):
    """Returns {(step, task, metric): value}."""
    return {(r.step, r.task, r.metric): r.value for r in results}


def test_checkpoints_give_what_the_evaler_gave_in_training(run, model, tmp_path, capsys):
    tasks = {"tasks": ["openbookqa", "piqa"], "data_dir": DATA, "num_fewshot": 0, "limit": 3}
    results = evaluate(model, **tasks, steps=[2, 3], output=str(tmp_path / "out"))
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {
        (line["step"], *name.split("/")[1:]): value
        for line in logged
        for name, value in line.items()
        if name.startswith(("val/openbookqa/", "val/piqa/"))
    }
    assert len(expected) == 2 * 2 * 2
    assert values(results) == expected
    assert model.dtype == "bfloat16"
    content = json.loads((tmp_path / "out/results.json").read_text())
    assert content["results"] == [result._asdict() for result in results]
    assert content["max_length"] == 64
    picture = (tmp_path / "out/results.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    with open(tmp_path / "out/results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: str(x) for name, x in r._asdict().items()} for r in results]
    assert {row["tokens"] for row in rows} == {str(2 * 8 * 64), str(3 * 8 * 64)}


def test_each_step_is_evaluated_with_the_config_that_trained_it(run, model, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = str(tmp_path / "run/checkpoints/step_00000003")
    record = CheckpointRecord.read(path)
    config = record.config.replace("model.output_norm.eps: 1e-06", "model.output_norm.eps: 1e-01")
    dataclasses.replace(record, config=config).write(path)
    what = {"corpus": [CORPUS], "limit": 1}
    copy = lambda step: load_model(str(tmp_path / "run"), step=step)
    want = values(evaluate(copy(3), **what))
    got = values(evaluate(copy(2), **what, steps=[2, 3]))
    assert got == want | values(evaluate(model, **what))


def test_steps_of_a_phase_have_its_length_and_an_unknown_number_of_tokens(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "run")
    path = str(tmp_path / "run/checkpoints/step_00000003")
    record = CheckpointRecord.read(path)
    short = Phase.default_config().set(after_step=2, changes={"input.seq_len": 32})
    cfg = config_text.parse(record.config, source="").set(phases={"short": short}, phase="short")
    dataclasses.replace(record, config=applied(cfg).debug_string()).write(path)
    copy = lambda step: load_model(str(tmp_path / "run"), step=step)
    want = values(evaluate(copy(3), corpus=[CORPUS], max_length=32))
    assert not caplog.records
    for first in (2, 3):
        out = tmp_path / f"out{first}"
        found = evaluate(copy(first), corpus=[CORPUS], steps=[2, 3], output=str(out))
        assert values(found).items() >= want.items()
        assert {(r.step, r.tokens) for r in found} == {(2, 2 * 8 * 64), (3, None)}
        assert json.loads((out / "results.json").read_text())["max_length"] == {"2": 64, "3": 32}
        assert "{2: 64, 3: 32}, so that" in caplog.text


def test_a_corpus_and_a_task_whose_contexts_are_cut(model, tmp_path):
    results = evaluate(
        model, ["arc_easy"], data_dir=DATA, limit=2, corpus=[CORPUS], output=str(tmp_path)
    )
    assert 1 < values(results)[2, CORPUS, "byte_perplexity"] < 1000
    tasks = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert tasks["arc_easy"] == {"num_fewshot": 10, "num_questions": 2, "num_cut": 7}
    assert tasks[CORPUS] == {"num_documents": 2, "num_cut": 0}
    assert not (tmp_path / "results.png").exists()


@pytest.mark.slow
def test_a_mesh_gives_the_results_of_one_device(run):
    meshes = (None, "data=2,fsdp=2,model=2")  # Roundings to bfloat16 depend on the mesh.
    models = [load_model(str(run), step=2, dtype="float32", mesh=mesh) for mesh in meshes]
    what = {"tasks": ["openbookqa"], "data_dir": DATA, "limit": 3, "corpus": [CORPUS]}
    want, got = (values(evaluate(each, **what)) for each in models)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Returns the folder of a Hugging Face model, converted."""
    hub, to = (tmp_path_factory.mktemp("converted") / name for name in ("hub", "run"))
    shutil.copytree(HUGGING_FACE / "qwen3_moe", hub)
    vocab = {token: i for i, token in enumerate([END_OF_TEXT, " ", *string.ascii_lowercase])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    tokenizer.save(str(hub / "tokenizer.json"))
    (hub / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    convert.from_hugging_face(str(hub), str(to))
    return to


def test_a_converted_model_is_evaluated_without_an_input(converted, tmp_path):
    (tmp_path / "corpus.txt").write_text("letters and spaces alone are known to this model")
    model = load_model(str(converted))
    results = evaluate(model, corpus=[str(tmp_path / "corpus.txt")], max_length=64)
    assert {(r.step, r.tokens) for r in results} == {(0, None)}
    assert all(math.isfinite(r.value) for r in results)
    unknown = dataclasses.replace(model, max_length=None)
    with pytest.raises(UserError, match="--max_length"):
        evaluate(unknown, corpus=["x"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data_dir": None}, "--data_dir"),
        ({"tasks": ["pica"]}, r"'pica'.*'piqa'"),
        ({"tasks": "piqa"}, "tasks='piqa'"),
        ({"corpus": "text.txt"}, "corpus='text.txt'"),
        ({"tasks": []}, "corpus"),
        ({"data_dir": "gone"}, "gone/piqa/valid.jsonl"),
        ({"steps": [9]}, "step 9"),
        ({"max_length": 0}, "max_length is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"model": "runs/t"}, r"'runs/t'.*load_model"),
        ({"output": "."}, r"\./results\.json exists; .*\(--output\)"),
        ({"output": ".", "corpus": ["gone.txt"]}, r"gone\.txt"),
    ],
)
def test_invalid_arguments_are_named(arguments, named, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match=named):
        evaluate(**{"model": model, "tasks": ["piqa"], "data_dir": DATA, **arguments})  # pyrefly: ignore


def test_process_0_alone_writes_results(model, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert evaluate(model, corpus=[CORPUS], limit=1, output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed: the extra lm-eval has it")
@pytest.mark.filterwarnings("default")
def test_lm_eval_gives_our_metrics(model, tmp_path):
    from tests.evaluation.lm_eval_reference import write_tasks

    write_tasks(str(tmp_path / "tasks"))
    what = {"tasks": ["winogrande", "piqa"], "steps": [2, 3], "num_fewshot": 2, "limit": 3}
    ours = evaluate(model, **what, data_dir=DATA)
    theirs = evaluate(model, **what, include_path=str(tmp_path / "tasks"), lm_eval=True)
    assert values(ours) == values(theirs)


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named(model):
    with pytest.raises(UserError, match=r"'moelib\[lm-eval"):
        evaluate(model, ["arc_easy"], lm_eval=True)


def test_an_infinite_perplexity_is_null_in_json(tmp_path):
    found = {"text": perplexities(["word" * 300], [Score(-1000.0, False)])}  # exp(1000) per word.
    write_results(str(tmp_path), "", results_of(1, None, found), {})
    text = (tmp_path / "results.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    values = {each["metric"]: each["value"] for each in content["results"]}
    assert values["word_perplexity"] is None
    assert values["bits_per_byte"] == pytest.approx(1000 / 1200 / math.log(2))


def test_the_table_has_a_row_for_each_task_and_step():
    found = {"piqa": {"acc": Metric(0.5, 0.1)}, "text": {"bits_per_byte": Metric(1.25)}}
    table = results_table("a run", results_of(100, 6400, found) + results_of(200, 12800, found))
    assert (table.title, table.columns) == ("a run", ("task", "step>", "acc>", "bits_per_byte>"))
    assert table.rows == [
        ["piqa", "100", "0.5000 ± 0.1000", ""],
        ["", "200", "0.5000 ± 0.1000", ""],
        [],
        ["text", "100", "", "1.2500"],
        ["", "200", "", "1.2500"],
    ]
