"""`moelib generate`: the model and the tokenizer of a run, and text from them."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from moelib.cli import generate
from moelib.core.errors import UsageError
from moelib.data.lm_input import LMInput
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.token_store import TokenStore
from moelib.data.tokenizer import END_OF_TEXT, NoTokenizerError, Tokenizer, train_bpe
from moelib.train.pretrained import save_pretrained
from tests import tiny

TEXTS = [f"document number {i} of many" for i in range(60)]
END = "<end>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of one step, of a model of 400 tokens on text of 280."""
    folder = tmp_path_factory.mktemp("run")
    file = folder / "tokenizer.json"
    train_bpe(TEXTS, 280, str(file))
    file.write_text(file.read_text().replace(END_OF_TEXT, END))
    tokenizer = Tokenizer.default_config().set(path=str(file), eos_token=END).instantiate()
    source = InMemorySource.default_config().set(texts=TEXTS).instantiate()
    prepare(source, tokenizer, str(folder / "store"))
    cfg = tiny.trainer_config(folder / "run", max_step=1, save_every=1, evaler=False)
    cfg.model = tiny.dense_model(400, dim=8)
    cfg.input = LMInput.default_config().set(
        source=TokenStore.default_config().set(path=str(folder / "store")),
        seq_len=16,
        global_batch_size=8,
    )
    cfg.instantiate(parent=None).run()
    return folder


@pytest.mark.slow
def test_a_padded_model_writes_only_what_its_tokenizer_knows(run, capsys):
    loaded = generate.load_for_inference(str(run / "run"))
    assert (loaded.model.config.vocab_size, loaded.tokenizer.vocab_size) == (400, 280)
    settings = {"max_new_tokens": 60, "temperature": 9.0, "top_p": 1.0, "seed": 0}
    generate.stream_text(loaded, "document", **settings)
    assert capsys.readouterr().out.startswith("document")


def test_the_tokenizer_is_the_stores_with_its_end_of_text(run):
    tokenizer = generate.load_for_inference(str(run / "run")).tokenizer
    assert tokenizer.decode([tokenizer.eos_id]) == END


def test_a_run_is_used_without_its_data(run):
    (run / "store").rename(run / "moved")
    try:
        loaded = generate.load_for_inference(str(run / "run"))
    finally:
        (run / "moved").rename(run / "store")
    assert loaded.tokenizer.eos_token == END
    assert loaded.seq_len == 16
    assert not loaded.adds_special_tokens


def test_a_tokenizer_that_changed_since_is_refused(run):
    (run / "run" / "tokenizer.json").unlink()  # As in runs of older versions.
    file = run / "store" / "tokenizer.json"
    text = file.read_text()
    try:
        train_bpe(TEXTS, 270, str(file))
        file.write_text(file.read_text().replace(END_OF_TEXT, END))
        with pytest.raises(ValueError, match=r"tokenizer.json of token store .* has changed"):
            generate.load_for_inference(str(run / "run"))
    finally:
        file.write_text(text)
        (run / "run" / "tokenizer.json").write_text(text)


def test_a_folder_without_a_run_or_a_tokenizer_is_named(run, tmp_path):
    with pytest.raises(UsageError, match="holds no run: there is no"):
        generate.load_for_inference(str(tmp_path))
    tiny.trainer_config(tmp_path, max_step=1, evaler=False).instantiate(parent=None).run()
    with pytest.raises(NoTokenizerError, match="SyntheticTokens has no tokenizer"):
        generate.load_for_inference(str(tmp_path))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Returns the folder of a Hugging Face model whose texts begin with token 256."""
    folder = tmp_path_factory.mktemp("hub")
    train_bpe(TEXTS, 280, str(folder))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    begin = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": [END_OF_TEXT]}},
    }
    file.write_text(json.dumps(content))
    cfg = tiny.dense_model(288, num_layers=2, dim=8)
    params = cfg.instantiate(parent=None).initialize_parameters_recursively(jax.random.key(0))
    save_pretrained(
        str(folder),
        cfg,
        params,
        dtype="bfloat16",
        tokenizer_json=file.read_text(),
        eos_token=END_OF_TEXT,
        more_settings={"eos_token_id": 256, "max_position_embeddings": 40},
        generation={"eos_token_id": [256, 7]},
    )
    return folder


def generate_with(*args):
    """Runs the command with flags; those that it defines are taken away again."""
    with flagsaver.flagsaver():
        generate.define_flags()
        generate.run(flags.FLAGS(["moelib generate", *map(str, args)])[1:])


def test_a_model_of_hugging_face_is_read_as_it_was_published(hub):
    loaded = generate.load_hugging_face(str(hub))
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    assert loaded.encode(["document"])[0][0] == 256
    assert loaded.encode(["document"])[0][1:] == loaded.tokenizer.encode("document")
    assert (loaded.stop_ids, loaded.max_length) == ((7, 256), 40)


@pytest.mark.slow
def test_a_model_of_hugging_face_writes_the_same_text_on_a_mesh(hub, tmp_path, capsys):
    flags_of_both = (f"--hf_dir={hub}", "--dtype=float32", "--temperature=0")
    generate_with(*flags_of_both, "--prompt=document")
    text = capsys.readouterr().out
    assert text.startswith("document")
    generate_with(*flags_of_both, "--prompt=document", "--mesh=fsdp=4,model=2")
    assert capsys.readouterr().out == text
    (tmp_path / "in").write_text(lines({"prompt": "document number " * 40}))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}")
    with pytest.raises(UsageError, match=r"in:1: the prompt has .* --max_length is 40"):
        generate_with(*flags_of_both, *files)


def test_a_tokenizer_of_another_model_is_refused(hub, tmp_path):
    shutil.copytree(hub, tmp_path / "hub")
    train_bpe(TEXTS, 300, str(tmp_path / "hub"))
    with pytest.raises(UsageError, match=r"its tokenizer has 300 tokens, and its model 288"):
        generate.load_hugging_face(str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stop="], "--stop is empty"),
        (["--mesh=fsdp"], "--mesh 'fsdp': "),
        (["--mesh=fsdb=8"], "--mesh 'fsdb=8': .*fsdb"),
        (["--mesh=fsdp=3"], "--mesh fsdp=3 .*3 devices"),
        (["--step=3"], "--step goes with --trainer_dir"),
        (["--trainer_dir=x"], "--trainer_dir or --hf_dir must be set"),
    ],
)
def test_flags_of_a_model_that_cannot_be_are_refused(hub, args, message):
    with pytest.raises(UsageError, match=message):
        generate_with(f"--hf_dir={hub}", "--prompt=a", *args)


PROMPTS = ["document", "do", "of many"]


def lines(*records):
    """Returns JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def command(run):
    """Runs the command on the run."""
    return functools.partial(generate_with, f"--trainer_dir={run / 'run'}", "--max_new_tokens=12")


def test_each_prompt_of_a_file_is_continued_as_it_is_alone(command, tmp_path, capsys):
    (tmp_path / "in").write_text(lines(*({"id": i, "prompt": p} for i, p in enumerate(PROMPTS))))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--batch_size=2")
    command(*files, "--temperature=0")
    assert f"{tmp_path / 'out'}: 3 texts" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(record["id"], record["prompt"]) for record in records] == list(enumerate(PROMPTS))
    for record in records:
        assert len(record["tokens"]) <= 12
        command("--prompt", record["prompt"], "--temperature=0")
        assert capsys.readouterr().out == record["prompt"] + record["text"] + "\n"


def test_texts_end_before_a_stop_string(command, tmp_path, capsys):
    drawn = ("--temperature=5", "--top_p=1", "--seed=3", "--max_new_tokens=40")
    command("--prompt=do", *drawn)
    free = capsys.readouterr().out
    stop = free[12:14]
    want = free[: 2 + free[2:].index(stop)]
    command("--prompt=do", f"--stop={stop}", *drawn)
    assert capsys.readouterr().out == want + "\n"
    (tmp_path / "in").write_text(lines({"prompt": "do"}))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--batch_size=1")
    command(*files, f"--stop={stop}", *drawn)
    record = json.loads((tmp_path / "out").read_text())
    assert "do" + record["text"] == want
    assert len(record["tokens"]) < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines({"prompt": "a"}) + '\n{"prompt": "b', ":3 is no line of JSON"),
        (lines({"prompt": "a"}, {"promt": "b"}), ':2 is no JSON object with a text "prompt"'),
        (lines(["prompt"]), ":1 is no JSON object"),
        (lines({"prompt": "a", "text": "b"}), ":1 has a field 'text'"),
        ("\n", "has no lines"),
        (lines({"prompt": "a"}, {"prompt": ""}), ":2: the prompt is empty"),
        (lines({"prompt": "document " * 40}), ":1: the prompt has .* --max_length is 30"),
    ],
)
def test_lines_that_are_no_prompts_are_named(command, tmp_path, text, message):
    (tmp_path / "in").write_text(text)
    with pytest.raises(UsageError, match=message):
        command(f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--max_length=30")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--prompt or --input must be set"),
        (["--prompt="], "--prompt or --input must be set"),
        (["--prompt=a", "--input=b"], "--prompt or --input must be set"),
        (["--input=a"], "--input and --output must be set together"),
        (["--prompt=a", "b"], "'b' is no flag"),
        (["--input=a", f"--output={__file__}"], "exists; remove it"),
        (["--prompt=a", "--top_k=0"], "top_k is 0; set it to 1 or more"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(command, args, message):
    with pytest.raises(UsageError, match=message):
        command(*args)
