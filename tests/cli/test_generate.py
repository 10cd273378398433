"""`moelib generate`: the model and the tokenizer of a run, and text from them."""

import pytest

from moelib.cli import generate
from moelib.data.lm_input import LMInput
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.token_store import TokenStore
from moelib.data.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from moelib.launch import UsageError
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from tests.train import tiny

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
    layer = TransformerLayer.default_config()
    layer.self_attention.num_heads = 2
    layer.feed_forward.hidden_dim = 16
    decoder = ScanStack.default_config().set(num_layers=1, block=[layer])
    cfg = tiny.trainer_config(folder / "run", max_step=1, save_every=1, evaler=False)
    cfg.model = CausalLM.default_config().set(vocab_size=400, dim=8, decoder=decoder)
    cfg.input = LMInput.default_config().set(
        source=TokenStore.default_config().set(path=str(folder / "store")),
        seq_len=16,
        global_batch_size=8,
    )
    cfg.instantiate(parent=None).run()
    return folder


def test_a_padded_model_writes_only_what_its_tokenizer_knows(run, capsys):
    loaded = generate.load_for_inference(str(run / "run"))
    assert (loaded.model.config.vocab_size, loaded.tokenizer.vocab_size) == (400, 280)
    settings = {"max_new_tokens": 60, "temperature": 9.0, "top_p": 1.0, "seed": 0}
    generate.stream_text(loaded, "document", **settings)
    assert capsys.readouterr().out.startswith("document")


def test_the_tokenizer_is_the_stores_with_its_end_of_text(run):
    tokenizer = generate.load_for_inference(str(run / "run")).tokenizer
    assert tokenizer.decode([tokenizer.eos_id]) == END


def test_a_tokenizer_that_changed_since_is_refused(run):
    file = run / "store" / "tokenizer.json"
    text = file.read_text()
    try:
        train_bpe(TEXTS, 270, str(file))
        file.write_text(file.read_text().replace(END_OF_TEXT, END))
        with pytest.raises(ValueError, match=r"tokenizer.json of token store .* has changed"):
            generate.load_for_inference(str(run / "run"))
    finally:
        file.write_text(text)


def test_what_is_no_run_on_a_token_store_is_named(run, tmp_path):
    with pytest.raises(UsageError, match="holds no run: there is no"):
        generate.load_for_inference(str(tmp_path))
    tiny.trainer_config(tmp_path, max_step=1, evaler=False).instantiate(parent=None).run()
    with pytest.raises(UsageError, match=r"input\.source names no token store"):
        generate.load_for_inference(str(tmp_path))
