"""`moelib prepare`: tokenizes a corpus into a token store, and can train the tokenizer first.

    moelib prepare --source=corpus/ --output=data/text --train_bpe=32768
    moelib prepare --source=tfds:c4/en --output=data/c4 --tokenizer=tokenizer.json
    moelib prepare --verify --output=data/text

A run that was killed resumes when the same command is run again.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from moelib.core.errors import UsageError
from moelib.runtime.command_line import flag, no_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    source: str | None = flag(
        None,
        "Corpus: a file, folder or pattern of text, JSON lines (.jsonl, .gz, .zst), Parquet or "
        "Arrow; tfds:NAME[@SPLIT] for a TFDS data set; python for Python's standard library.",
    )
    output: str | None = flag(None, "Folder of the token store.")
    tokenizer: str | None = flag(None, "A tokenizer.json, or `bytes` for one token per byte.")
    eos_token: str | None = flag(
        None, "End-of-text token of --tokenizer; <|endoftext|> if it is not set."
    )
    train_bpe: int | None = flag(None, "Size of a byte-level BPE to train on the corpus.")
    train_bpe_mb: int = flag(
        20, "MB of text to train the BPE on, from the split train.", lower_bound=1
    )
    text_field: str = flag("text", "Field or column that holds the document.")
    tfds_data_dir: str | None = flag(None, "Folder of TFDS data sets; TFDS's own if not set.")
    num_processes: int | None = flag(
        None, "Number of worker processes; by default one per CPU core.", lower_bound=1
    )
    skip_bad_lines: bool = flag(False, "Skip and count broken records instead of failing.")
    accept_lossy_tokenizer: bool = flag(
        False, "Accept a tokenizer that loses more than 1 % of the text."
    )
    append_eos: bool = flag(True, "End each document with the end-of-text token.")
    splits: str = flag("train=1", "Fraction of documents per split: train=0.95,validation=0.05.")
    split_seed: int = flag(0, "Seed that assigns documents to splits.")
    verify: bool = flag(False, "Only check that the files of the store at --output are undamaged.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prepares the store."""
    no_arguments(arguments, Flags)
    if flags.verify and flags.output is not None:
        from moelib.data.tokens.prepare import verify_store

        verify_store(flags.output)
        return
    if flags.source is None or flags.output is None:
        name = "output" if flags.source or flags.verify else "source"
        raise UsageError(f"--{name} must be set; see `moelib prepare --help`.")
    if (flags.tokenizer is None) == (flags.train_bpe is None):
        raise UsageError("set either --tokenizer or --train_bpe.")
    if flags.eos_token is not None and flags.tokenizer in (None, "bytes"):
        raise UsageError("--eos_token names a token of a tokenizer.json: set --tokenizer to one.")

    from moelib.data.tokens.prepare import prepare
    from moelib.data.tokens.token_store import check_splits

    splits = read_splits(flags.splits)
    check_splits(splits)  # Before a tokenizer is trained, which takes minutes.
    source = source_for(flags, flags.source).instantiate()
    prepare(
        source,
        _tokenizer(flags, flags.output, source, splits),
        flags.output,
        num_processes=flags.num_processes or os.cpu_count() or 1,
        append_eos=flags.append_eos,
        skip_bad_records=flags.skip_bad_lines,
        accept_lossy_tokenizer=flags.accept_lossy_tokenizer,
        splits=splits,
        split_seed=flags.split_seed,
    )


def source_for(flags: Flags, name: str) -> Any:
    """Returns the config of the source that --source names."""
    from moelib.data.sources.files import PythonSourceCode
    from moelib.data.sources.source_for_path import source_for_path
    from moelib.data.sources.tfds import TFDSSource

    if name == "python":
        return PythonSourceCode.default_config()
    if name.startswith("tfds:"):
        data_set, _, split = name.removeprefix("tfds:").partition("@")
        cfg = TFDSSource.default_config().set(name=data_set, split=split or "train")
        return cfg.set(data_dir=flags.tfds_data_dir, text_field=flags.text_field)
    return source_for_path(name, text_field=flags.text_field)


def read_splits(text: str) -> dict[str, float]:
    """Returns {"train": 0.95, ...} from "train=0.95,..."."""
    splits: dict[str, float] = {}
    for item in text.split(","):
        name, _, fraction = item.partition("=")
        try:
            if not name.strip() or name in splits:
                raise ValueError
            splits[name] = float(fraction)
        except ValueError:
            raise UsageError(
                f"--splits {item:.80}: expected name=fraction, each name once."
            ) from None
    return splits


def _tokenizer(flags: Flags, output: str, source: Any, splits: dict[str, float]) -> Any:
    from moelib.data.tokens.corpus_tokenizer import corpus_tokenizer
    from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer

    if flags.tokenizer == "bytes":
        return ByteTokenizer.default_config().instantiate()
    if flags.tokenizer is not None:
        cfg = Tokenizer.default_config().set(path=flags.tokenizer)
        return cfg.set(eos_token=flags.eos_token or cfg.eos_token).instantiate()
    assert flags.train_bpe is not None
    return corpus_tokenizer(
        source,
        flags.train_bpe,
        output.rstrip("/") + ".tokenizer.json",
        num_bytes=flags.train_bpe_mb * 1_000_000,
        splits=splits,
        split_seed=flags.split_seed,
        flag="--train_bpe",
    )
