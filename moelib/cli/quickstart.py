"""`moelib quickstart`: trains a small model on text of this machine, and prints a sample from it.

    moelib quickstart
    moelib quickstart --data_dir=notes.txt --trainer_dir=runs/notes --max_step=2000

By default the text is the source code of Python's standard library, so that nothing is downloaded.
"""

import dataclasses
import gzip
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelib import launch
from moelib.core.config_text import config_origin, sub_configs
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.command_line import flag, no_arguments
from moelib.runtime.table import Table, print_table

SPLITS = {"train": 0.97, "validation": 0.03}
BPE_BYTES = 8_000_000  # Bytes of text that the tokenizer learns from.
PROMPT = "def main("


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.TrainFlags):
    """Flags of the command."""

    module: str | None = flag("experiments.flame_moe", "Module of the config.", short="m")
    config: str | None = flag("flame-moe-tiny", "Name of a config of the module.", short="c")
    trainer_dir: str | None = flag("runs/quickstart", "Folder for the prepared text and the run.")
    data_dir: str | None = flag(None, "File or folder of text to train on.")
    prompt: str | None = flag(None, "Beginning of the sample.")
    vocab_size: int = flag(8192, "Number of tokens of the tokenizer that is trained on the text.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prepares the text, trains, compares with simple models and prints a sample."""
    no_arguments(arguments, Flags)
    flags.set_up()
    store_dir = os.path.join(flags.trainer_dir or "", "data", "text")
    run_dir = os.path.join(flags.trainer_dir or "", "run")
    prepared = dataclasses.replace(flags, data_dir=os.path.dirname(store_dir), trainer_dir=run_dir)
    cfg = prepared.load()
    _shorten_warmup(cfg)
    cfg.instantiate(parent=None)  # Raises errors of the config before minutes of preparation.
    train, validation = prepare_text(flags.data_dir, store_dir, flags.vocab_size)
    with flags.status_page(run_dir):
        result = launch.fit(cfg, dump=flags.dump)
    if result.stopped_by is not None:
        print(f"Stopped by {result.stopped_by}; run the same command again to continue.")
        return
    _compare(_last_bits_per_byte(run_dir), train, validation)
    default_prompt = PROMPT if flags.data_dir is None else _first_words(validation)
    _sample(run_dir, flags.prompt or default_prompt)


def _shorten_warmup(cfg: Any) -> None:
    """Sets a warmup of `max_step` steps or more to half of them, unless --set has set it."""
    for path, inside in sub_configs(cfg.learner):
        steps = dict(inside.items()).get("warmup_steps", 0)
        is_short = not isinstance(steps, int) or steps < cfg.max_step
        if is_short or inside.origin("warmup_steps").startswith("--set"):
            continue
        with config_origin(f"--max_step={cfg.max_step}"):
            inside.set(warmup_steps=cfg.max_step // 2)
        print(f"learner.{path}.warmup_steps is {inside.warmup_steps}, half of --max_step.")


def _last_bits_per_byte(run_dir: str) -> float:
    """Returns the last validation's bits per byte, also for a run that took no step this time."""
    name = "validation/bits_per_byte"
    return [line[name] for line in read_metrics(run_dir, [name]) if name in line][-1]


def _first_words(store: Any) -> str:
    return " ".join(next(iter(store.texts())).split()[:4])


def prepare_text(text: str | None, store_dir: str, vocab_size: int) -> tuple[Any, Any]:
    """Returns the train and validation splits of a token store, which is created if missing.

    The text is that of a file or folder, or by default the source code of Python's standard
    library. The tokenizer is a file next to the store. Raises UserError if the text cannot be read
    or is too short.
    """
    from moelib.data.sources.files import PythonSourceCode, TextFiles
    from moelib.data.sources.source_for_path import source_for_path
    from moelib.data.tokens.corpus_tokenizer import corpus_tokenizer
    from moelib.data.tokens.prepare import prepare
    from moelib.data.tokens.token_store import TokenStore

    cfg = PythonSourceCode.default_config() if text is None else source_for_path(text)
    if isinstance(cfg, TextFiles.Config):  # Splits one long file into documents.
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
    """Prints the model's bits per byte next to those of simple models."""
    values = {
        "this model": bits_per_byte,
        "gzip -9": gzip_bits_per_byte(validation),
        "unigram model": unigram_bits_per_byte(train, validation),
    }
    rows = [(name, f"{value:.3f}") for name, value in values.items()]
    print_table(Table("", ["held-out text", "bits per byte>"], rows))


def gzip_bits_per_byte(store: Any) -> float:
    """Returns the bits per byte of `gzip -9` on the concatenated documents of a store."""
    data = "".join(store.texts()).encode()
    return 8 * len(gzip.compress(data, 9)) / len(data)


def unigram_bits_per_byte(train: Any, validation: Any) -> float:
    """Returns the bits per byte of a model that knows only the frequency of each token.

    The frequencies are those of `train`, with 1 added to each count. As in a language model's loss,
    the targets are all tokens but the first of each document, and bytes are those of the targets.
    """
    learned, counts = np.zeros((2, train.vocab_size), np.int64)
    for source, count in ((train, learned), (validation, counts)):
        for index in range(source.num_documents):
            np.add.at(count, source.document(index)[1:], 1)
    bits = -np.log2((learned + 1) / (learned + 1).sum())
    return float(counts @ bits / (counts @ validation.token_num_bytes.astype(np.int64)))


def _sample(run_dir: str, prompt: str) -> None:
    """Prints how the trained model continues a prompt."""
    from moelib.cli.generate import stream_text
    from moelib.runs.loading import load_model

    model = load_model(run_dir)
    print(f"\nA sample, after {prompt!r}:\n")
    stream_text(model, prompt, max_new_tokens=160, temperature=0.7, top_p=0.95, seed=0)
    print(f"\nmoelib generate --trainer_dir={run_dir} --prompt=... prints more.")
