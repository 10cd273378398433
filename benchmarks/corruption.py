"""Random corruptions of what a run reads: `python -m benchmarks.corruption [SUBJECT ...]`.

Each case damages a copy of sound files and reads it with the library. The table counts what
happened: the values were exact all the same, an older checkpoint was read after a warning, an error
of one line was raised, a traceback was, or wrong values were returned.
"""

import collections
import dataclasses
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moelib.core.errors import UsageError, UserError
from moelib.runtime import platforms
from moelib.runtime.command_line import flag, run_command
from moelib.runtime.table import Table, print_table

EXACT, OLDER, ERROR, TRACEBACK, WRONG = OUTCOMES = (
    "exact",
    "fell back",
    "error",
    "traceback",
    "SILENTLY WRONG",
)


class Subject(NamedTuple):
    """Files that can be damaged, and their reader."""

    folder: str  # Sound files, which are copied for each case.
    damaged: str  # Folder below it in which files are damaged, such as the newest checkpoint.
    read: Callable[[str], str]  # From a copy of `folder`; returns EXACT, OLDER or WRONG.


# -- Damages -------------------------------------------------------------------------------------


def _overwrite(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_bit(path: str, rng: random.Random) -> None:
    """Flips one bit of a file."""
    offset = rng.randrange(max(os.path.getsize(path), 1))
    with open(path, "rb") as file:
        byte = file.read()[offset : offset + 1] or b"\0"
    _overwrite(path, offset, bytes([byte[0] ^ 1 << rng.randrange(8)]))


def zero_block(path: str, rng: random.Random) -> None:
    """Overwrites one of a file's blocks of 512 bytes with zeros."""
    size = os.path.getsize(path)
    offset = rng.randrange(size // 512 + 1) * 512
    _overwrite(path, offset, bytes(min(512, size - offset)))


def random_page(path: str, rng: random.Random) -> None:
    """Overwrites one of a file's pages of 4,096 bytes with random ones."""
    size = os.path.getsize(path)
    offset = rng.randrange(size // 4096 + 1) * 4096
    _overwrite(path, offset, rng.randbytes(min(4096, size - offset)))


def truncate(path: str, rng: random.Random) -> None:
    """Cuts a file short."""
    os.truncate(path, rng.randrange(max(os.path.getsize(path), 1)))


def delete(path: str, rng: random.Random) -> None:
    """Deletes a file."""
    os.remove(path)


def empty(path: str, rng: random.Random) -> None:
    """Empties a file."""
    os.truncate(path, 0)


def append(path: str, rng: random.Random) -> None:
    """Appends random bytes to a file."""
    _overwrite(path, os.path.getsize(path), rng.randbytes(64))


def link_loop(path: str, rng: random.Random) -> None:
    """Replaces a file by a link to itself."""
    os.remove(path)
    os.symlink(os.path.basename(path), path)


def swap(path: str, rng: random.Random) -> None:
    """Exchanges a file with another one of its folder, or with the folder's parent."""
    folder = os.path.dirname(path)
    others = [each for each in _files(os.path.dirname(folder)) if each != path]
    other = rng.choice(others or [path])
    os.rename(path, path + ".swap")
    if other != path:
        os.rename(other, path)
    os.rename(path + ".swap", other)


def rename(path: str, rng: random.Random) -> None:
    """Renames a file or the folder that holds it."""
    path = rng.choice((path, os.path.dirname(path)))
    os.rename(path, path + "0")


DAMAGES: dict[str, Callable[[str, random.Random], None]] = {
    "one bit": flip_bit,
    "512 zero bytes": zero_block,
    "4096 random bytes": random_page,
    "truncated": truncate,
    "deleted": delete,
    "emptied": empty,
    "appended to": append,
    "link to itself": link_loop,
    "two files exchanged": swap,
    "file or folder renamed": rename,
}


def _files(folder: str) -> list[str]:
    """Returns the paths of all files below a folder, ordered by size: some names are random."""
    paths = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names]
    return sorted(paths, key=lambda path: (os.path.getsize(path), path))


def choose_file(folder: str, rng: random.Random) -> str:
    """Returns a file: each with the same probability, or each byte, one time in two."""
    files = _files(folder)
    sizes = [os.path.getsize(path) + 1 for path in files]
    return rng.choices(files, sizes if rng.random() < 0.5 else None)[0]


# -- Cases ---------------------------------------------------------------------------------------


def outcome_of(subject: Subject, damage: str, seed: int, work: str) -> str:
    """Returns what the reader does with a damaged copy, which is made in the folder `work`."""
    copy = os.path.join(work, "copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(subject.folder, copy, symlinks=True)
    rng = random.Random(f"{damage} {seed}")
    DAMAGES[damage](choose_file(os.path.join(copy, subject.damaged), rng), rng)
    try:
        return subject.read(copy)
    except UserError:
        return ERROR
    except Exception:
        logging.getLogger(__name__).exception("%s, seed %d", damage, seed)
        return TRACEBACK


def table(name: str, subject: Subject, num_cases: int, work: str) -> Table:
    """Returns the table of a subject's outcomes."""
    rows = []
    for index, damage in enumerate(DAMAGES):
        seeds = range(index, num_cases, len(DAMAGES))
        counts = collections.Counter(outcome_of(subject, damage, i, work) for i in seeds)
        rows.append((damage, str(len(seeds)), *(str(counts[each]) for each in OUTCOMES)))
    totals = [str(sum(int(row[i]) for row in rows)) for i in range(1, len(OUTCOMES) + 2)]
    return Table(name, ("damage", "cases", *OUTCOMES), [*rows, (), ("all", *totals)])


# -- Subjects ------------------------------------------------------------------------------------


def checkpoint(folder: str) -> Subject:
    """Writes three checkpoints of a small state; the newest is damaged."""
    import jax
    import numpy as np

    from moelib.checkpoint.checkpointer import Checkpointer
    from moelib.checkpoint.contents import RunRecord
    from moelib.core import tree

    def state(step: int) -> dict[str, Any]:
        draw = np.random.default_rng(step).standard_normal
        return {
            "step": np.int32(step),
            "model": {"w": draw((64, 96), np.float32), "b": draw(96).astype(jax.numpy.bfloat16)},
            "learner": [draw((64, 96), np.float32), np.zeros((32, 32), np.float32)],
        }

    def record(step: int) -> RunRecord:
        position = {"step": step, "document_boundary": "reset"}
        return RunRecord(step, position, metrics={"validation/loss": 1 / step})

    def checkpointer(path: str) -> Any:
        return Checkpointer.default_config().set(dir=path).instantiate(parent=None)

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state(0))
    writer = checkpointer(folder)
    for step in (1, 2, 3):
        writer.save(jax.tree.map(jax.numpy.asarray, state(step)), record(step))
    writer.close()

    def read(path: str) -> str:
        restored = checkpointer(path).restore(target)
        step = restored.record.step
        expected = (record(step).input, record(step).metrics, tree.by_path(state(step)))
        found = (restored.record.input, restored.record.metrics, tree.by_path(restored.state))
        same = found[:2] == expected[:2] and all(
            np.asarray(x).tobytes() == expected[2][name].tobytes() for name, x in found[2].items()
        )
        return WRONG if not same else EXACT if step == 3 else OLDER

    return Subject(folder, "step_00000003", read)


def token_store(folder: str) -> Subject:
    """Prepares a token store of two files of tokens."""
    from moelib.data.sources.source import InMemorySource
    from moelib.data.tokens.prepare import prepare
    from moelib.data.tokens.token_store import TokenStore
    from moelib.data.tokens.tokenizer import ByteTokenizer

    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefg ", k=rng.randrange(1, 200))) for _ in range(100)]
    splits = {"train": 0.75, "validation": 0.25}
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    tokenizer = ByteTokenizer.default_config().instantiate()
    prepare(source, tokenizer, os.path.join(folder, "store"), splits=splits)

    def contents(path: str) -> list[Any]:
        found: list[Any] = []
        cfg = TokenStore.default_config().set(path=os.path.join(path, "store"))
        for split in splits:
            store = cfg.set(split=split).instantiate()
            found += [store.document(index).tolist() for index in range(store.num_documents)]
            found += [store.num_bytes.tolist(), store.token_num_bytes.tolist(), store.eos_id]
            found.append(store.tokenizer().fingerprint)
        return found

    expected = contents(folder)
    return Subject(folder, "store", lambda path: EXACT if contents(path) == expected else WRONG)


def export(folder: str) -> Subject:
    """Exports a small model for transformers, in several files of tensors, with a tokenizer."""
    import jax

    from moelib.data.tokens.tokenizer import train_bpe
    from moelib.huggingface.families import read_model
    from moelib.huggingface.pretrained import save_pretrained

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 300}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    _, cfg = read_model({"model_type": "llama", **sizes, **layers}, "config.json")
    model = cfg.instantiate(parent=None)
    tokenizer = train_bpe([f"document {i} of many" for i in range(60)], 280, f"{folder}.json")
    save_pretrained(
        os.path.join(folder, "model"),
        cfg,
        model.initialize_parameters_recursively(jax.random.key(0)),
        tokenizer=tokenizer,
        more_settings={"max_position_embeddings": 64},
        generation={"eos_token_id": [256, 7]},
        max_file_bytes=1 << 14,
    )

    return _loaded(folder, "model")


def run_folder(folder: str) -> Subject:
    """Converts the exported model to a run: its config, the tokenizer and a checkpoint."""
    from moelib.train.convert import from_hugging_face

    export(folder)
    from_hugging_face(os.path.join(folder, "model"), os.path.join(folder, "run"))
    shutil.rmtree(os.path.join(folder, "model"))
    return _loaded(folder, "run")


def _loaded(folder: str, name: str) -> Subject:
    """Returns the subject of a folder below `folder` that holds a model."""
    import numpy as np

    from moelib.core import tree
    from moelib.runs.loading import load_model

    def contents(path: str) -> list[Any]:
        found = load_model(os.path.join(path, name))
        arrays = tree.by_path(found.parameters)
        return [
            {name: np.asarray(values).tobytes() for name, values in arrays.items()},
            found.model.config.debug_string(),
            found.tokenizer.fingerprint,
            (found.tokenizer.bos_id, found.stop_ids, found.max_length, found.dtype),
        ]

    expected = contents(folder)
    return Subject(folder, name, lambda path: EXACT if contents(path) == expected else WRONG)


SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "checkpoint": checkpoint,
    "token_store": token_store,
    "export": export,
    "run": run_folder,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cases: int = flag(1000, "Number of corruptions of each subject.", lower_bound=1)


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the table of each subject that the arguments name; of all, if there are none."""
    if unknown := [each for each in arguments if each not in SUBJECTS]:
        raise UsageError(f"subject {unknown[0]!r}: name some of {', '.join(SUBJECTS)}.")
    logging.getLogger("moelib").setLevel(logging.ERROR)  # The warning of each fallback.
    for name in arguments or SUBJECTS:
        with tempfile.TemporaryDirectory() as work:
            subject = SUBJECTS[name](os.path.join(work, "sound"))
            print_table(table(name, subject, flags.cases, work))


if __name__ == "__main__":
    platforms.hide_absent_tpus()
    sys.exit(run_command("benchmarks.corruption", Flags, run, sys.argv[1:], __doc__ or ""))
