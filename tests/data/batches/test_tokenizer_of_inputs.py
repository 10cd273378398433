"""Every input names the tokenizer of its text, without opening its data."""

import pytest

from moelib.data.batches.input import Input, load_tokenizer
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.streaming import StreamingInput
from moelib.data.batches.synthetic import SyntheticInput
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import NoTokenizerError, Tokenizer, train_bpe

TEXTS = ["one text", "another text"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    source = InMemorySource.default_config().set(texts=TEXTS).instantiate()
    prepare(source, train_bpe(TEXTS, 260, str(folder / "bpe.json")), str(folder / "store"))
    for tokens in (folder / "store").glob("tokens-*"):
        tokens.unlink()  # Data that are gone: a tokenizer is read without them.
    return str(folder / "store")


def _inputs(store: str) -> dict[str, Input.Config]:
    source = TokenStore.default_config().set(path=store)
    mixture = Mixture.default_config().set(
        sources={"a": source, "b": source.clone()}, weights={"a": 1.0, "b": 1.0}
    )
    stream = StreamingInput.default_config().set(
        source=JsonLines.default_config().set(paths=["gone"]),
        tokenizer=Tokenizer.default_config().set(path=store),
    )
    lm_input = LMInput.default_config()
    return {
        "store": lm_input.clone(source=source),
        "mixture": lm_input.clone(source=mixture),
        "stream": stream,
    }


@pytest.mark.parametrize("kind", ["store", "mixture", "stream"])
def test_an_input_names_its_tokenizer(store, kind):
    want = Tokenizer.default_config().set(path=store).instantiate().fingerprint
    assert load_tokenizer(_inputs(store)[kind]).fingerprint == want


def test_an_input_without_text_has_no_tokenizer():
    with pytest.raises(NoTokenizerError, match="SyntheticTokens"):
        load_tokenizer(SyntheticInput.default_config())
