import pathlib

import numpy as np
import pytest

from moelib.data.describe import describe_batch
from moelib.data.input import load_tokenizer
from moelib.data.lm_input import LMInput
from moelib.data.packing import DocumentBoundary, Packing
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.token_store import TokenStore
from moelib.data.tokenizer import ByteTokenizer, train_bpe


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LMInput.Config:
    path = str(tmp_path_factory.mktemp("data") / "store")
    source = InMemorySource.default_config().set(texts=["ab", "Grüße", "x" * 30]).instantiate()
    prepare(source, ByteTokenizer.default_config().instantiate(), path)
    return LMInput.default_config().set(
        source=TokenStore.default_config().set(path=path),
        packing=Packing.BEST_FIT,
        seq_len=12,
        global_batch_size=4,
    )


def test_documents_are_shown_with_their_boundaries(config: LMInput.Config):
    text = describe_batch(config.instantiate().batch(0), load_tokenizer(config))
    lines = text.splitlines()
    assert "  1: 12 tokens, positions 0 to 11: 'xxxxxxxxxxxx' > 'x'" in lines
    assert any(line.endswith("tokens, positions 0 to 1: 'ab' > '<|endoftext|>'") for line in lines)
    assert any(line.endswith(": 'Grüße' > '<|endoftext|>'") for line in lines)
    assert sum(line.startswith("sequence ") for line in lines) == 4


def test_ids_are_shown_without_a_tokenizer_and_long_texts_shortened(config: LMInput.Config):
    stream = config.clone(
        packing=Packing.CONCAT_AND_SPLIT, document_boundary=DocumentBoundary.CONTINUE
    )
    batch = stream.instantiate().batch(0)
    text = describe_batch(batch, max_sequences=1)
    assert text.count("\n") == 1
    assert " ".join(map(str, batch["input_ids"][0])) in text
    assert " ... " in describe_batch(batch, max_chars=10)


def test_another_tokenizer_is_refused(config: LMInput.Config, tmp_path: pathlib.Path):
    batch = config.instantiate().batch(0)
    batch["input_ids"] = np.full_like(batch["input_ids"], 270)
    tokenizer = train_bpe(["some text"], 260, str(tmp_path))
    with pytest.raises(ValueError, match="id 270"):
        describe_batch(batch, tokenizer)
