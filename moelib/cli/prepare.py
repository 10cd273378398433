"""`moelib prepare`: tokenizes a corpus into a token store, and can train the tokenizer first."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from moelib.core.errors import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "source",
        None,
        "File, folder or pattern of text, JSON lines (.gz, .zst) or Parquet; tfds:NAME[@SPLIT] for "
        "a TFDS data set; python for the Python standard library's own sources.",
    )
    flags.DEFINE_string("output", None, "Folder of the token store.")
    flags.DEFINE_string("tokenizer", None, "A tokenizer.json, or `bytes`.")
    flags.DEFINE_string("eos_token", None, "End-of-text token of --tokenizer, if no <|endoftext|>.")
    flags.DEFINE_integer("train_bpe", None, "Trains a byte-level BPE of as many tokens first.")
    flags.DEFINE_integer("train_bpe_mb", 20, "How many MB to train the BPE on, of the split train.")
    flags.DEFINE_string("text_field", "text", "Field or column that holds a document.")
    flags.DEFINE_string("tfds_data_dir", None, "Where TFDS data sets lie.")
    flags.DEFINE_integer("num_processes", os.cpu_count() or 1, "Worker processes.")
    flags.DEFINE_bool("skip_bad_lines", False, "Counts broken records in place of failing.")
    flags.DEFINE_bool("append_eos", True, "Ends each document with the end-of-text token.")
    flags.DEFINE_list("splits", ["train=1"], "Fractions: train=0.95,validation=0.05.")
    flags.DEFINE_integer("split_seed", 0, "Decides which documents are in which split.")


def run(args: Sequence[str]) -> None:
    """Prepares the store.

    Raises:
        UsageError: If a flag is missing or cannot be carried out.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; name the corpus with --source.")
    for name in ("source", "output"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} must be set; `moelib prepare --help` says to what.")
    if (FLAGS.tokenizer is None) == (FLAGS.train_bpe is None):
        raise UsageError("one of --tokenizer and --train_bpe must be set.")
    if FLAGS.eos_token is not None and FLAGS.tokenizer in (None, "bytes"):
        raise UsageError(
            "--eos_token names a token of a file: set --tokenizer to a tokenizer.json."
        )
    try:
        _prepare()
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _prepare() -> None:
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

    if name == "python":
        return PythonSourceCode.default_config()
    if name.startswith("tfds:"):
        from moelib.data.tfds_source import TFDSSource

        data_set, _, split = name.removeprefix("tfds:").partition("@")
        return TFDSSource.default_config().set(
            name=data_set,
            split=split or "train",
            data_dir=FLAGS.tfds_data_dir,
            text_field=FLAGS.text_field,
        )
    return source_for_path(name, text_field=FLAGS.text_field)


def read_splits(items: Sequence[str]) -> dict[str, float]:
    """Returns {"train": 0.95, ...} from ["train=0.95", ...]."""
    splits = {}
    for item in items:
        name, _, fraction = item.partition("=")
        try:
            splits[name] = float(fraction)
        except ValueError:
            raise UsageError(f"--splits {item}: expected name=fraction.") from None
    return splits


def _tokenizer(source: Any, splits: Mapping[str, float]) -> Any:
    from moelib.data.tokenizer import ByteTokenizer, Tokenizer, check_vocab_size, train_bpe

    if FLAGS.tokenizer == "bytes":
        return ByteTokenizer.default_config().instantiate()
    if FLAGS.tokenizer is not None:
        cfg = Tokenizer.default_config().set(path=FLAGS.tokenizer)
        return cfg.set(eos_token=FLAGS.eos_token or cfg.eos_token).instantiate()
    path = FLAGS.output.rstrip("/") + ".tokenizer.json"
    if os.path.exists(path):
        tokenizer = Tokenizer.default_config().set(path=path).instantiate()
    else:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        tokenizer = train_bpe(_texts_for_bpe(source, splits), FLAGS.train_bpe, path)
    check_vocab_size(tokenizer, FLAGS.train_bpe, path, flag="--train_bpe")
    return tokenizer


def _texts_for_bpe(source: Any, splits: Mapping[str, float]) -> Iterator[str]:
    """Returns what the tokenizer learns from: text of the split train; of all if there is none."""
    from moelib.data.prepare import documents_of_split
    from moelib.data.source import sample_documents, spread

    num_bytes = FLAGS.train_bpe_mb * 1_000_000
    if len(splits) == 1 or "train" not in splits:
        return sample_documents(source, num_bytes)
    train = documents_of_split(source, splits, "train", split_seed=FLAGS.split_seed)
    num_train = splits["train"] * sum(part.num_bytes for part in source.parts())
    return spread(train, num_bytes / max(num_train, 1))
