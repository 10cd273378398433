"""A run of the tests ends, and says which file or test needs too much."""

import pathlib
import subprocess
import sys
import types

import jax
import pytest

from moelib.runtime import memory_maps
from tests.compiled_programs import CompiledPrograms
from tests.limits import Limits

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n1", "--max-worker-restart=0"], "crashed while running 'test_hangs.py::test_planted'"),
        (["-p", "no:xdist"], "in test_planted"),
    ],
)
def test_a_test_that_hangs_ends_the_run_with_its_name(tmp_path, arguments, named):
    (tmp_path / "test_hangs.py").write_text(
        "import time\n\ndef test_planted():\n    time.sleep(1000)\n\ndef test_later(): pass\n"
    )
    settings = [f"--config-file={_ROOT / 'pyproject.toml'}", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *settings, "-o", "faulthandler_timeout=1"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, "test_hangs.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert named in ended.stdout + ended.stderr
    assert "Timeout" in ended.stderr


def _end_of_file(limits: Limits) -> None:
    item = types.SimpleNamespace(
        path=pathlib.Path("test_a.py"),
        nodeid="test_a.py::test",
        get_closest_marker=lambda name: None,
    )
    limits.pytest_runtest_teardown(item, types.SimpleNamespace(path=item.path))
    limits.pytest_runtest_teardown(item, None)


def test_many_maps_or_bytes_free_the_programs_and_too_many_name_the_file(monkeypatch):
    cleared, limits = [], Limits(types.SimpleNamespace())
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    for maps, resident in ((12_000, 3 << 29), (12_001, 0), (0, (3 << 29) + 1)):
        monkeypatch.setattr(memory_maps, "count", lambda maps=maps: maps)
        monkeypatch.setattr("tests.limits._resident", lambda resident=resident: resident)
        _end_of_file(limits)
    assert len(cleared) == 2
    monkeypatch.setattr(memory_maps, "count", lambda: 30_001)
    with pytest.raises(pytest.fail.Exception, match=r"test_a\.py: 30,001"):
        _end_of_file(limits)


def test_the_first_file_above_the_memory_is_named(monkeypatch):
    limits = Limits(types.SimpleNamespace())
    monkeypatch.setattr("tests.limits._MAX_MEMORY", 1)
    with pytest.raises(pytest.fail.Exception, match=r"test_a\.py: .* GiB"):
        _end_of_file(limits)
    _end_of_file(limits)


def test_complete_programs_are_kept_for_the_next_process(tmp_path, monkeypatch):
    folder = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    try:
        for present in ([], ["new-cache"]):
            programs = CompiledPrograms()
            programs.pytest_configure()
            own = pathlib.Path(jax.config.jax_compilation_cache_dir)
            assert [path.name for path in own.iterdir()] == present
            (own / "new-cache").write_bytes(b"program")
            (own / "incomplete-cache").touch()
            programs.pytest_unconfigure()
            assert not own.exists()
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
