"""`moelib evaluate`: the checkpoints of a run on tasks and texts, and what it leaves."""

import csv
import importlib.util
import json
import math
import pathlib
import shutil
import string
import subprocess
import sys
import types

import pytest
import tokenizers

from moelib.cli import convert, evaluate
from moelib.core.errors import UsageError
from moelib.data.lm_input import InputMode, LMInput
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.token_store import TokenStore
from moelib.data.tokenizer import END_OF_TEXT, Tokenizer
from moelib.evaluation.evaler import TaskEvaler
from tests import tiny
from tests.evaluation import folders

DATA = str(folders.DATA)
HUGGING_FACE = pathlib.Path(__file__).parents[1] / "models/huggingface/fixtures"


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
    cfg.instantiate(parent=None).run()
    return folder / "run"


def read(folder):
    """Returns {(step, task, metric): value} of results.json."""
    results = json.loads((folder / "results.json").read_text())["results"]
    return {(r["step"], r["task"], r["metric"]): r["value"] for r in results}


def test_checkpoints_give_what_the_evaler_gave_in_training(run, tmp_path, capsys):
    evaluate.evaluate_run(
        str(run),
        steps=evaluate.find_steps(str(run), "2,3"),
        tasks=["openbookqa", "piqa"],
        data_dir=DATA,
        num_fewshot=0,
        limit=3,
        output=str(tmp_path / "out"),
    )
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {
        (line["step"], *name.split("/")[1:]): value
        for line in logged
        for name, value in line.items()
        if name.startswith(("val/openbookqa/", "val/piqa/"))
    }
    assert len(expected) == 2 * 2 * 2
    assert read(tmp_path / "out") == expected
    shown = capsys.readouterr()
    assert "step 3: 18 of 18" in shown.err
    assert f"wrote {tmp_path}/out/results.png" in shown.out
    assert (tmp_path / "out/results.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "out/results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["tokens"] for row in rows} == {str(2 * 8 * 64), str(3 * 8 * 64)}


def test_a_corpus_beside_a_task_and_what_was_cut(run, tmp_path):
    corpus = str(folders.DATA / "corpus.jsonl")
    evaluate.evaluate_run(
        str(run),
        steps=evaluate.find_steps(str(run), None),
        tasks=["arc_easy"],
        data_dir=DATA,
        limit=2,
        corpus=[corpus],
        output=str(tmp_path),
    )
    found = read(tmp_path)
    assert {step for step, _, _ in found} == {3}
    assert 1 < found[3, corpus, "byte_perplexity"] < 1000
    tasks = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert tasks["arc_easy"] == {"num_fewshot": 10, "num_questions": 2, "num_cut": 7}
    assert tasks[corpus] == {"num_documents": 2, "num_cut": 0}
    assert not (tmp_path / "results.png").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Returns the folder of a model of Hugging Face, converted."""
    hub, to = (tmp_path_factory.mktemp("converted") / name for name in ("hub", "run"))
    shutil.copytree(HUGGING_FACE / "qwen3_moe", hub)
    vocab = {token: i for i, token in enumerate([END_OF_TEXT, " ", *string.ascii_lowercase])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    tokenizer.save(str(hub / "tokenizer.json"))
    (hub / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    convert.from_hugging_face(str(hub), str(to))
    return to


def test_a_converted_model_is_evaluated_though_it_has_no_input(converted, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("letters and spaces alone are known to a model of so few tokens")
    evaluate.evaluate_run(
        str(converted),
        steps=evaluate.find_steps(str(converted), None),
        corpus=[str(corpus)],
        max_length=64,
        output=str(tmp_path),
    )
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {(r["step"], r["tokens"], r["task"]) for r in results} == {(0, None, str(corpus))}
    assert all(math.isfinite(r["value"]) for r in results)


def test_a_converted_model_does_not_say_how_much_it_reads(converted, tmp_path):
    with pytest.raises(UsageError, match=r"has no input\.seq_len; set --max_length to"):
        evaluate.evaluate_run(str(converted), steps=[0], corpus=["x"], output=str(tmp_path))


def test_steps_are_all_or_named_or_the_newest(run, tmp_path):
    assert evaluate.find_steps(str(run), "all") == [1, 2, 3]
    assert evaluate.find_steps(str(run), "3,1") == [1, 3]
    assert evaluate.find_steps(str(run), None) == [3]
    with pytest.raises(UsageError, match="no checkpoint of step 4, 7; there are steps 1, 2, 3"):
        evaluate.find_steps(str(run), "1,4,7")
    with pytest.raises(UsageError, match="--steps last: write all, or steps such as"):
        evaluate.find_steps(str(run), "last")
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        evaluate.find_steps(str(tmp_path), "all")


def test_results_are_not_overwritten(run, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UsageError, match=r"results\.json is there already; set --output"):
        evaluate.evaluate_run(str(run), steps=[3], corpus=["x"], output=str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trainer_dir": None}, "--trainer_dir must be set"),
        ({"tasks": []}, "--tasks or --corpus must be set"),
        ({"data_dir": None}, "--tasks needs --data_dir"),
        ({"lm_eval": True}, "--lm_eval needs --tasks, and takes no --data_dir"),
        ({"include_path": "x"}, "--include_path is for --lm_eval"),
        ({"step": 1, "steps": "all"}, "--step and --steps are both set"),
        ({"tasks": ["pica"]}, "There is no task 'pica'; did you mean 'piqa'"),
        ({"data_dir": "gone"}, "There is no gone/piqa/valid.jsonl; put the benchmark's own file"),
        ({"step": 9}, "has no checkpoint of step 9"),
        ({"max_length": 0}, "max_length is 0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_what_cannot_be_done_is_said(flags, message, run, tmp_path, monkeypatch):
    given = {"trainer_dir": str(run), "tasks": ["piqa"], "data_dir": DATA, "output": str(tmp_path)}
    names = ("step", "steps", "num_fewshot", "limit", "include_path", "max_length")
    unset = {**dict.fromkeys(names), "corpus": [], "lm_eval": False, "batch_tokens": 512}
    values = {"fewshot_seed": 0, **unset, **given, **flags}
    monkeypatch.setattr(evaluate, "FLAGS", types.SimpleNamespace(**values))
    with pytest.raises(UsageError, match=message):
        evaluate.run([])


@pytest.mark.slow
def test_the_command_reads_its_flags(run, tmp_path):
    flags = ["--trainer_dir", str(run), "--step=1", "--tasks=openbookqa", f"--data_dir={DATA}"]
    done = subprocess.run(
        [sys.executable, "-m", "moelib.cli.main", "evaluate", *flags, f"--output={tmp_path}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path).keys() == {(1, "openbookqa", "acc"), (1, "openbookqa", "acc_norm")}
    assert "openbookqa" in done.stdout


HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed: the extra lm-eval has it")
@pytest.mark.filterwarnings("default")
def test_lm_eval_finds_what_we_find(run, tmp_path):
    from tests.evaluation.lm_eval_reference import write_tasks

    write_tasks(str(tmp_path / "tasks"))
    shots = {"steps": [2, 3], "num_fewshot": 2, "limit": 3}
    ours = {**shots, "tasks": ["winogrande", "piqa"], "data_dir": DATA}
    theirs = {**shots, "tasks": ["winogrande", "piqa"], "include_path": str(tmp_path / "tasks")}
    evaluate.evaluate_run(str(run), **ours, output=str(tmp_path / "ours"))
    evaluate.evaluate_run(str(run), **theirs, lm_eval=True, output=str(tmp_path / "theirs"))
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named(run, tmp_path):
    with pytest.raises(UsageError, match=r"--lm_eval needs lm-eval .*pip install 'moelib\[lm-eval"):
        evaluate.evaluate_run(
            str(run), steps=[3], tasks=["arc_easy"], lm_eval=True, output=str(tmp_path)
        )
