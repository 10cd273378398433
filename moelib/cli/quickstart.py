"""`moelib quickstart`: the whole way on a laptop, from text to a trained model and a sample.

Without `--data_dir` it trains on the sources of Python's standard library, which every machine that
runs this has: nothing is downloaded.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from moelib import launch
from moelib.core.config import config_origin
from moelib.core.errors import UsageError

FLAGS = flags.FLAGS

SPLITS = {"train": 0.97, "validation": 0.03}
BPE_BYTES = 8_000_000  # Of the text, for the tokenizer to learn from.
PROMPT = "def main("


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_train_flags()
    flags.DEFINE_string("prompt", None, "What the sample at the end begins with.")
    flags.DEFINE_integer("vocab_size", 8192, "Tokens of the BPE that is trained on the text.")
    FLAGS.set_default("module", "experiments.flame_moe")
    FLAGS.set_default("config", "flame-moe-tiny")
    FLAGS.set_default("trainer_dir", "runs/quickstart")


def run(args: Sequence[str]) -> None:
    """Prepares the text, trains, compares with simple models and prints a sample."""
    if args:
        raise UsageError(f"{args[0]!r} is no flag; --data_dir names text of your own.")
    launch.set_up_devices()
    store_dir = os.path.join(FLAGS.trainer_dir, "data", "text")
    text = FLAGS.data_dir
    train, validation = prepare_text(text, store_dir, FLAGS.vocab_size)
    cfg = launch.load_config(
        FLAGS.module,
        FLAGS.config,
        sets=FLAGS.set,
        data_dir=os.path.dirname(store_dir),
        max_step=FLAGS.max_step,
        mesh_selector=FLAGS.mesh_selector,
    )
    run_dir = os.path.join(FLAGS.trainer_dir, "run")
    cfg.set(dir=run_dir)
    with config_origin("--trainer_prng_seed"):
        if FLAGS.trainer_prng_seed is not None:
            cfg.prng_seed = FLAGS.trainer_prng_seed
    result = launch.train(cfg)
    if result["stopped_by"] is not None:
        print(f"Stopped by {result['stopped_by']}; the same command goes on from there.")
        return
    _compare(_last_bits_per_byte(run_dir), train, validation)
    default_prompt = PROMPT if text is None else _first_words(validation)
    _sample(run_dir, FLAGS.prompt or default_prompt)


def _last_bits_per_byte(run_dir: str) -> float:
    """Returns the last validation's figure, also where a finished run had nothing left to do."""
    with open(os.path.join(run_dir, "metrics.jsonl"), encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    name = "validation/bits_per_byte"
    return next(record[name] for record in reversed(records) if name in record)


def _first_words(store: Any) -> str:
    return " ".join(next(iter(store.texts())).split()[:4])


def prepare_text(text: str | None, store_dir: str, vocab_size: int) -> tuple[Any, Any]:
    """Returns the train and validation splits of a store of the text, made if it is not there."""
    from moelib.data.corpus_tokenizer import corpus_tokenizer
    from moelib.data.files import PythonSourceCode, TextFiles
    from moelib.data.prepare import prepare
    from moelib.data.source_for_path import source_for_path
    from moelib.data.token_store import TokenStore

    cfg = PythonSourceCode.default_config() if text is None else source_for_path(text)
    if isinstance(cfg, TextFiles.Config):  # One long file can be held out in part.
        cfg.max_document_chars = 1 << 12
    source = cfg.instantiate()
    tokenizer = corpus_tokenizer(
        source,
        vocab_size,
        store_dir + ".tokenizer.json",
        num_bytes=int(BPE_BYTES * SPLITS["train"]),
        splits=SPLITS,
        allow_fewer=True,
        flag="--vocab_size",
    )
    prepare(source, tokenizer, store_dir, num_processes=os.cpu_count() or 1, splits=SPLITS)
    store = TokenStore.default_config().set(path=store_dir)
    train, validation = (store.clone(split=split).instantiate() for split in SPLITS)
    return train, validation


def _compare(bits_per_byte: float, train: Any, validation: Any) -> None:
    """Prints the model's bits per byte beside those of simple models."""
    from rich.console import Console
    from rich.table import Table

    from moelib.data.baselines import gzip_bits_per_byte, unigram_bits_per_byte

    table = Table("text it has not seen", "bits per byte")
    table.add_row("this model", f"{bits_per_byte:.3f}")
    table.add_row("gzip -9", f"{gzip_bits_per_byte(validation):.3f}")
    table.add_row("unigram model", f"{unigram_bits_per_byte(train, validation):.3f}")
    Console().print(table)


def _sample(run_dir: str, prompt: str) -> None:
    """Prints how the trained model continues a prompt."""
    from moelib.cli.generate import load_for_inference, stream_text

    model = load_for_inference(run_dir)
    print(f"\nA sample, after {prompt!r}:\n")
    stream_text(model, prompt, max_new_tokens=160, temperature=0.7, top_p=0.95, seed=0)
    print(f"\nmoelib generate --trainer_dir {run_dir} --prompt ... gives more.")
