import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.data.batches.describe import batch_of_step, describe_batch
from moelib.data.batches.input import load_tokenizer
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.packing import DocumentBoundary, Packing
from moelib.data.batches.skip_batches import SkippingBatches
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import ByteTokenizer, train_bpe


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


def test_documents_are_shown_with_their_boundaries(config):
    text = describe_batch(config.instantiate().batch(0), load_tokenizer(config))
    lines = text.splitlines()
    assert "  1: 12 tokens, positions 0 to 11: 'xxxxxxxxxxxx' > 'x'" in lines
    assert any(line.endswith("tokens, positions 0 to 1: 'ab' > '<|endoftext|>'") for line in lines)
    assert any(line.endswith(": 'Grüße' > '<|endoftext|>'") for line in lines)
    assert sum(line.startswith("sequence ") for line in lines) == 4


def test_ids_are_shown_without_a_tokenizer_and_long_texts_shortened(config):
    stream = config.clone(
        packing=Packing.CONCAT_AND_SPLIT, document_boundary=DocumentBoundary.CONTINUE
    )
    batch = stream.instantiate().batch(0)
    text = describe_batch(batch, max_sequences=1)
    assert text.count("\n") == 1
    assert " ".join(map(str, batch["input_ids"][0])) in text
    assert " ... " in describe_batch(batch, max_chars=10)


def test_another_tokenizer_and_a_step_after_the_end_are_refused(config, tmp_path):
    batch = config.instantiate().batch(0)
    batch["input_ids"] = np.full_like(batch["input_ids"], 270)
    with pytest.raises(ValueError, match="id 270"):
        describe_batch(batch, train_bpe(["some text"], 260, str(tmp_path)))
    with pytest.raises(UserError, match=r"step=4.*batch 3"):
        batch_of_step(config.clone(max_batches=3).instantiate(), 4)


def test_documents_of_one_segment_end_after_the_end_of_text(config):
    stream = config.clone(
        packing=Packing.CONCAT_AND_SPLIT, document_boundary=DocumentBoundary.CONTINUE, seq_len=41
    )
    opened = stream.instantiate()
    text = describe_batch(
        opened.batch(0), load_tokenizer(config), end_id=opened.eos_id, max_sequences=1
    )
    header, *documents = text.splitlines()
    assert header.startswith("sequence 0: 3 documents, 41 of 41 tokens")
    assert [line.split(": ")[0] for line in documents] == ["  1", "  2", "  3"]
    assert sum("<|endoftext|>' > '" in line for line in documents) == 2  # It is read and predicted.


def test_tokens_without_a_target_and_sources_are_marked(config):
    batch = config.instantiate().batch(0)
    ids = np.array([[*b"Hi there", 0, 0, 0, 0]], np.int32)
    batch = {name: array[:1].copy() for name, array in batch.items()}
    batch |= {"input_ids": ids, "segment_ids": (ids > 0).astype(np.int32)}
    batch["target_labels"] = np.array([[-1, -1, *b"here!", -1, -1, -1, -1, -1]], np.int32)
    lines = describe_batch(batch, load_tokenizer(config), sources=["web"]).splitlines()
    assert lines[0].startswith("sequence 0 of web: 1 documents, 8 of 12 tokens")
    assert "8 tokens, 5 with a target, " in lines[1]
    assert lines[1].endswith(": [['Hi']] ' ther' [['e']] > (none)")


def test_the_batch_of_a_step_is_the_one_that_the_run_reads(config):
    ranges = [[1, 3], [4, 6], [6, 7]]
    batches = SkippingBatches(config.instantiate().iterator(), ranges)
    for step in range(1, 6):
        want = next(batches)
        position, got = batch_of_step(config.instantiate(), step, ranges)
        assert position == batches.state()["step"] - 1
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def test_a_batch_after_another_batch_size_is_the_one_that_the_run_reads(config):
    before, after = (config.clone(global_batch_size=size).instantiate() for size in (2, 4))
    batches = before.iterator()
    _ = next(batches), next(batches)
    position, got = batch_of_step(after, 4, before=batches.state())
    assert position == 3
    # Sequences 0 to 3 are those of two batches of two, and 4 to 7 of step 3.
    want = config.clone(global_batch_size=4).instantiate().batch(2)
    np.testing.assert_array_equal(got["input_ids"], want["input_ids"])
