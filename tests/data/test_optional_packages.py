"""Optional packages: imported only on use, and a message names the extra of a missing one."""

import pytest

from tests.data.sources.tfds_corpus import write_corpus
from tests.python_process import finish, start

_NAMES = """
import pathlib, sys
import moelib.data
root = pathlib.Path(moelib.data.__file__).parent
paths = sorted(path.relative_to(root).with_suffix("") for path in root.rglob("*/*.py"))
heavy = {"jax", "tensorflow", "tensorflow_datasets", "pyarrow", "tokenizers", "rich"}
for name in (".".join(path.parts) for path in paths):
    __import__(f"moelib.data.{name}")
    assert not heavy & set(sys.modules), (name, heavy & set(sys.modules))
"""

_BLOCKED = """
import sys
from importlib.machinery import PathFinder

find_spec, missing = PathFinder.find_spec, sys.argv[1].split(",")

def find_all_but_missing(name, path=None, target=None):
    return None if name.partition(".")[0] in missing else find_spec(name, path, target)

PathFinder.find_spec = find_all_but_missing

from moelib.data.sources.tfds import TFDSSource

source = TFDSSource.default_config().set(name=sys.argv[2]).instantiate()
try:
    print(sorted(source.documents()))
except ModuleNotFoundError as error:
    print(type(error).__name__, error)
"""


def _run(program: str, *args: str) -> list[str]:
    return finish(start("-W", "ignore", "-c", program, *args))[0][0].splitlines()


def test_no_module_imports_what_only_some_uses_need():
    _run(_NAMES)


@pytest.mark.filterwarnings("ignore")  # TFDS uses deprecated functions.
@pytest.mark.parametrize("missing", ["tensorflow_datasets", "array_record"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, missing):
    folder = write_corpus(["b", "a"], str(tmp_path / "tfds"))
    (line,) = _run(_BLOCKED, f"{missing},tensorflow", folder)
    assert line.startswith("MissingPackageError ")
    assert f"needs {missing}, which is not installed" in line
    assert "pip install 'moelib[tfds]'" in line
