"""`moelib prepare`: tokenizes a corpus into a token store, and can train the tokenizer first.

    moelib prepare --source=corpus/ --output=data/text --train_bpe=32768
    moelib prepare --source=tfds:c4/en --output=data/c4 --tokenizer=tokenizer.json
    moelib prepare --source=web/ --output=data/web --tokenizer=tokenizer.json --share=2/8
    moelib prepare --verify --output=data/text

A run that was killed resumes when the same command is run again.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moelib.core.errors import UsageError
from moelib.runtime.command_line import check_used, flag, no_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    source: str | None = flag(
        None,
        "Corpus: a file, folder or pattern of text, JSON lines, CSV or TSV (also .gz and .zst), "
        "Parquet or Arrow; tfds:NAME[@SPLIT] for a TFDS data set; python for Python's standard "
        "library.",
    )
    output: str | None = flag(None, "Folder of the token store.")
    tokenizer: str | None = flag(None, "A tokenizer.json, or `bytes` for one token per byte.")
    eos_token: str | None = flag(
        None, "End-of-text token of --tokenizer; <|endoftext|> if it is not set."
    )
    train_bpe: int | None = flag(
        None, "Size of a byte-level BPE to train on the corpus.", of=("text",)
    )
    train_bpe_mb: int = flag(
        20, "MB of text to train the BPE on, from the split train.", lower_bound=1
    )
    format: Literal["text", "chat"] = flag(
        "text", "Kind of records: text, or chat for conversations, whose answers are the labels."
    )
    chat_template: str | None = flag(
        None,
        "Chat template: a file of Jinja, chatml, llama3 or plain; by default that next to "
        "--tokenizer.",
        of=("chat",),
    )
    seq_len: int | None = flag(
        None,
        "Tokens of the longest conversation; longer ones are cut after an answer.",
        of=("chat",),
    )
    leave_out_long: bool = flag(
        False, "Leave out conversations above --seq_len, uncut.", of=("chat",)
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
    prepend_bos: bool = flag(
        False, "Begin each document, and later each prompt, with BOS of --tokenizer's settings."
    )
    append_eos: bool = flag(True, "End each document with the end-of-text token.")
    splits: str = flag("train=1", "Fraction of documents per split: train=0.95,validation=0.05.")
    split_seed: int = flag(0, "Seed that assigns documents to splits.")
    share: str | None = flag(
        None,
        "Share of the work on several machines: 1/8 to 8/8, or auto in a job array of SLURM, or "
        "auto/8 in an indexed job of Kubernetes. The last share to end completes the store.",
    )
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
    if flags.prepend_bos and flags.tokenizer in (None, "bytes"):
        raise UsageError("--prepend_bos takes BOS of a tokenizer.json: set --tokenizer to one.")
    check_used(flags, "--format", flags.format)
    share = None if flags.share is None else read_share(flags.share, os.environ)

    from moelib.data.tokens.preparation import plan_store
    from moelib.data.tokens.prepare import prepare, prepare_share
    from moelib.data.tokens.token_store import check_splits

    splits = read_splits(flags.splits)
    check_splits(splits)  # Before a tokenizer is trained, which takes minutes.
    source = source_for(flags, flags.source).instantiate()
    tokenizer = _tokenizer(flags, flags.output, source, splits)
    chat = _chat_options(flags, tokenizer, source) if flags.format == "chat" else None
    settings: dict[str, Any] = {
        "append_eos": flags.append_eos and chat is None,
        "prepend_bos": flags.prepend_bos,
        "skip_bad_records": flags.skip_bad_lines,
        "chat": chat,
        "splits": splits,
        "split_seed": flags.split_seed,
    }
    work = {
        "num_processes": flags.num_processes or _num_cores(),
        "accept_lossy_tokenizer": flags.accept_lossy_tokenizer,
    }
    if share is None:
        prepare(source, tokenizer, flags.output, **settings, **work)
    else:
        preparation = plan_store(source, tokenizer, flags.output, **settings)
        prepare_share(preparation, tokenizer, share, **work)


def _chat_options(flags: Flags, tokenizer: Any, source: Any) -> Any:
    """Returns the settings of conversations. Raises UsageError without a template."""
    from moelib.data.tokens.chat.labels import chat_options
    from moelib.data.tokens.chat.template import find_template, warn_of_long_end

    path = flags.tokenizer or ""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    template = find_template(folder, flags.chat_template, tokenizer)
    if template is None:
        raise UsageError(
            f"--format=chat: {folder} has no chat template; set --chat_template to chatml, llama3, "
            "plain or a file of Jinja."
        )
    warn_of_long_end(template, tokenizer)
    long = "leave_out" if flags.leave_out_long else "cut"
    return chat_options(template, source, max_length=flags.seq_len, long=long)


def _num_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_share(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns (index from 0, number of shares) from "2/8", "auto", or "auto/8".

    `auto` is the index in the array of a job of SLURM, or in an indexed job of Kubernetes, which
    does not tell the number.
    """
    number, _, count = text.partition("/")
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT")]
    if number == "auto" and all(name in environ for name in names):
        task, first, num_tasks = (int(environ[name]) for name in names)
        number, count = str(task - first + 1), count or str(num_tasks)
    elif number == "auto" and "JOB_COMPLETION_INDEX" in environ:
        number = str(int(environ["JOB_COMPLETION_INDEX"]) + 1)
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(
            f"--share={text}: the share is {number}/{count or 'unknown'}; set 1/8 to 8/8, auto in "
            "a job array of SLURM without gaps, or auto/8 in an indexed job of Kubernetes."
        )
    return int(number) - 1, int(count)


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
    field = None if flags.format == "chat" else flags.text_field
    return source_for_path(name, text_field=field)


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
    from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer, bos_token_of

    if flags.tokenizer == "bytes":
        return ByteTokenizer.default_config().instantiate()
    if flags.tokenizer is not None:
        cfg = Tokenizer.default_config().set(path=flags.tokenizer)
        if flags.prepend_bos:
            cfg.set(bos_token=bos_token_of(flags.tokenizer))
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
        num_processes=flags.num_processes or _num_cores(),
        wait=flags.share is not None,
    )
