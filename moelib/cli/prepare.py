"""`moelib prepare`: tokenizes a corpus into a token store, and can train the tokenizer first."""

import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from moelib.core.errors import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "source",
        None,
        "Corpus: a file, folder or pattern of text, JSON lines (.jsonl, .gz, .zst), Parquet or "
        "Arrow; tfds:NAME[@SPLIT] for a TFDS data set; python for Python's standard library.",
    )
    flags.DEFINE_string("output", None, "Folder of the token store.")
    flags.DEFINE_string("tokenizer", None, "A tokenizer.json, or `bytes` for one token per byte.")
    flags.DEFINE_string(
        "eos_token", None, "End-of-text token of --tokenizer; <|endoftext|> if unset."
    )
    flags.DEFINE_integer("train_bpe", None, "Size of a byte-level BPE to train on the corpus.")
    flags.DEFINE_integer("train_bpe_mb", 20, "MB of text of the split train to train the BPE on.")
    flags.DEFINE_string("text_field", "text", "Field or column that holds the document.")
    flags.DEFINE_string("tfds_data_dir", None, "Folder of TFDS data sets; TFDS's own if unset.")
    flags.DEFINE_integer("num_processes", os.cpu_count() or 1, "Number of worker processes.")
    flags.DEFINE_bool("skip_bad_lines", False, "Skip and count broken records instead of failing.")
    flags.DEFINE_bool("append_eos", True, "End each document with the end-of-text token.")
    flags.DEFINE_list(
        "splits", ["train=1"], "Fraction of documents per split: train=0.95,validation=0.05."
    )
    flags.DEFINE_integer("split_seed", 0, "Seed that assigns documents to splits.")


def run(args: Sequence[str]) -> None:
    """Prepares the store.

    Raises:
        UserError: If a flag is missing or cannot be carried out.
    """
    if args:
        raise UsageError(f"unknown argument {args[0]!r}; name the corpus with --source.")
    for name in ("source", "output"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} must be set; see `moelib prepare --help`.")
    if (FLAGS.tokenizer is None) == (FLAGS.train_bpe is None):
        raise UsageError("set either --tokenizer or --train_bpe.")
    if FLAGS.eos_token is not None and FLAGS.tokenizer in (None, "bytes"):
        raise UsageError("--eos_token names a token of a tokenizer.json: set --tokenizer to one.")

    from moelib.data.prepare import prepare
    from moelib.data.token_store import check_splits

    splits = read_splits(FLAGS.splits)
    check_splits(splits)  # Before a tokenizer is trained, which takes minutes.
    source = source_for(FLAGS.source).instantiate()
    prepare(
        source,
        _tokenizer(source, splits),
        FLAGS.output,
        num_processes=FLAGS.num_processes,
        append_eos=FLAGS.append_eos,
        skip_bad_records=FLAGS.skip_bad_lines,
        splits=splits,
        split_seed=FLAGS.split_seed,
    )


def source_for(name: str) -> Any:
    """Returns the config of the source that --source names."""
    from moelib.data.files import PythonSourceCode
    from moelib.data.source_for_path import source_for_path
    from moelib.data.tfds_source import TFDSSource

    if name == "python":
        return PythonSourceCode.default_config()
    if name.startswith("tfds:"):
        data_set, _, split = name.removeprefix("tfds:").partition("@")
        cfg = TFDSSource.default_config().set(name=data_set, split=split or "train")
        return cfg.set(data_dir=FLAGS.tfds_data_dir, text_field=FLAGS.text_field)
    return source_for_path(name, text_field=FLAGS.text_field)


def read_splits(items: Sequence[str]) -> dict[str, float]:
    """Returns {"train": 0.95, ...} from ["train=0.95", ...]."""
    splits: dict[str, float] = {}
    for item in items:
        name, _, fraction = item.partition("=")
        try:
            if not name or name in splits:
                raise ValueError
            splits[name] = float(fraction)
        except ValueError:
            raise UsageError(f"--splits {item}: expected name=fraction, each name once.") from None
    return splits


def _tokenizer(source: Any, splits: dict[str, float]) -> Any:
    from moelib.data.corpus_tokenizer import corpus_tokenizer
    from moelib.data.tokenizer import ByteTokenizer, Tokenizer

    if FLAGS.tokenizer == "bytes":
        return ByteTokenizer.default_config().instantiate()
    if FLAGS.tokenizer is not None:
        cfg = Tokenizer.default_config().set(path=FLAGS.tokenizer)
        return cfg.set(eos_token=FLAGS.eos_token or cfg.eos_token).instantiate()
    return corpus_tokenizer(
        source,
        FLAGS.train_bpe,
        FLAGS.output.rstrip("/") + ".tokenizer.json",
        num_bytes=FLAGS.train_bpe_mb * 1_000_000,
        splits=splits,
        split_seed=FLAGS.split_seed,
        flag="--train_bpe",
    )
