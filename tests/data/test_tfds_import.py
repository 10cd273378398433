import subprocess
import sys

_PROGRAM = """
import pathlib, sys
import moelib.data
names = sorted(path.stem for path in pathlib.Path(moelib.data.__file__).parent.glob("*.py"))
heavy = {"jax", "tensorflow", "tensorflow_datasets", "pyarrow", "tokenizers", "rich"}
for name in names:
    if name not in ("__init__", "tfds_builder"):
        __import__(f"moelib.data.{name}")
        assert not heavy & set(sys.modules), (name, heavy & set(sys.modules))
"""


def test_no_module_imports_what_only_some_uses_need():
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
