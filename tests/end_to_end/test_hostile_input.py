"""Parsers of what a user or a stranger wrote: any input is read, or refused by a UserError."""

import copy
import json
import math
import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import save_file

from moelib import launch
from moelib.checkpoint.safetensors import TensorFolder, write_tensors
from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.huggingface.families import read_model
from moelib.parallel.mesh import parse_mesh
from moelib.planning.estimate.sweep import read_prices
from moelib.planning.hardware.topologies import describe
from tests import tiny
from tests.checkpoint.test_safetensors import ARRAYS, read_all

ROOT = pathlib.Path(__file__).parents[1]
FIXTURES = ROOT / "huggingface/fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
ASSIGNMENTS = [
    "max_step=3",
    "mesh_shape=fsdp=4,expert=2",
    "train_dtype=bfloat16",
    "learner.optimizer.b1=0.9",
    "learner.ema.decay=0.5",
    "input=tests.tiny:TinyModel",
    "sharding_rules={'embed': ('data', 'fsdp')}",
    "checkpointer.save_policy.n=(1, [2, {'a': set([3])}])",
    "evalers['a'].input.seq_len=-8",
]
PIECES = [
    *("", "\0", "\n", "²", "é", " ", "'", '"', "\\x"),
    *("[", "]", "{", "(", "-", ":", ": ", ",", "=", "."),
    *("nan", "inf", "1e999", "None", "REQUIRED", "<list>", "<tuple>", "<os:system>", "os:system"),
    *("NaN", "Infinity", "null", "true", "../", "/", "-1", "0"),
    *("1" * 30, "re.compile('(')", "x" * 99),
]
LARGE = ["-" * 10_000, "[" * 10_000, "{" * 10_000, "9" * 5000, "a." * 5000, "a[" * 5000, "(" * 300]
VALUES = [
    *(None, True, False, math.nan, math.inf, -math.inf, -1, 0, 1, 0.5, 10**18, 10**400, 1e300),
    *("", "32", "false", "x" * 999, "../x", "\0", [], {}, [[]], [None], ["a"], {"a": []}, [1, 2]),
]


def mutated(rng: random.Random, text: str) -> str:
    """Returns a text with some spans deleted, repeated or replaced."""
    for _ in range(rng.randint(1, 3)):
        begin = rng.randint(0, len(text))
        end = min(begin + int(rng.expovariate(0.2)), len(text))
        middle = rng.choice(
            ["", text[begin:end] * 2, rng.choice(PIECES), chr(rng.randrange(0xD800))]
        )
        if rng.random() < 0.02:
            middle = rng.choice(LARGE)
        text = text[:begin] + middle + text[end:]
    return text


def mutated_json(rng: random.Random, value: Any) -> str:
    """Returns the text of a JSON value with some values replaced, deleted or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder, key = value, None
        while isinstance(holder, dict | list) and len(holder):
            key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if rng.random() < 0.5 or not isinstance(holder[key], dict | list) or not holder[key]:
                break
            holder = holder[key]
        if key is None or not isinstance(holder, dict | list) or not len(holder):
            continue
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(PIECES)] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(value)
    return mutated(rng, text) if rng.random() < 0.3 else text


def read_set(rng: random.Random, folder: pathlib.Path) -> None:
    """Sets a field of a trainer's config."""
    launch.set_field(tiny.trainer_config("x"), mutated(rng, rng.choice(ASSIGNMENTS)))


def read_config_text(rng: random.Random, folder: pathlib.Path) -> None:
    """Parses the config.txt of a run."""
    text = (ROOT / "experiments/golden/flame-moe-tiny.txt").read_text()
    lines = text.splitlines()
    text = "\n".join(lines[: rng.randint(1, len(lines))])
    config_text.parse(mutated(rng, text), source="config.txt:")


def read_tensor_file(rng: random.Random, folder: pathlib.Path) -> None:
    """Reads a safetensors file with another header."""
    path = folder / "model.safetensors"
    save_file(ARRAYS, path)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    text = mutated_json(rng, header).encode("utf-8", "replace")
    size = len(text) if rng.random() < 0.9 else rng.choice([0, 1, 2**40, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", size) + text + data)
    read_all(folder)


def read_index(rng: random.Random, folder: pathlib.Path) -> None:
    """Reads the tensors of an index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        write_tensors(str(folder), ARRAYS.items(), max_file_bytes=60)
        (folder / "sound.json").write_text(path.read_text())
    path.write_text(mutated_json(rng, json.loads((folder / "sound.json").read_text())))
    TensorFolder(str(folder)).__exit__(ValueError)


def read_hugging_face(rng: random.Random, folder: pathlib.Path) -> None:
    """Reads the config.json of a family, and builds the model."""
    family = rng.choice(FAMILIES)
    values = json.loads((FIXTURES / family / "config.json").read_text())
    try:
        values = json.loads(mutated_json(rng, values))
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        read_model(values, "config.json")[1].instantiate(parent=None)


def read_mesh(rng: random.Random, folder: pathlib.Path) -> None:
    """Parses a mesh."""
    parse_mesh(mutated(rng, rng.choice(["fsdp=4,expert=-1", "(1, 1, 2, 4, 1, 1)"])), num_devices=8)


def read_topology(rng: random.Random, folder: pathlib.Path) -> None:
    """Describes a topology."""
    describe(mutated(rng, rng.choice(["v6e:4x4", "h100:2x8", "4*v5p:2x2x2"])))


def read_price_list(rng: random.Random, folder: pathlib.Path) -> None:
    """Reads prices."""
    path = folder / "prices.json"
    path.write_text(mutated_json(rng, {"v6e": 2.7, "h100": 3}), errors="replace")
    read_prices(str(path))


PARSERS: list[Callable[[random.Random, pathlib.Path], None]] = [
    read_set,
    read_config_text,
    read_tensor_file,
    read_index,
    read_hugging_face,
    read_mesh,
    read_topology,
    read_price_list,
]


def check(parser: Callable[[random.Random, pathlib.Path], None], num: int, folder: pathlib.Path):
    accepted = 0
    for seed in range(num):
        try:
            parser(random.Random(seed), folder)
            accepted += 1
        except UserError:
            continue
        except BaseException as error:
            error.add_note(f"{parser.__name__}, seed {seed}")
            raise
    assert 0 < accepted < num


@pytest.mark.filterwarnings("ignore")  # Of Python, about literals.
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
def test_hostile_input_is_read_or_refused(parser, tmp_path):
    check(parser, 200, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
def test_much_hostile_input_is_read_or_refused(parser, tmp_path):
    check(parser, 10_000, tmp_path)
