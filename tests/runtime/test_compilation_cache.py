"""The cache of compiled programs that commands set up."""

import pathlib
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moelib.runtime.compilation_cache import use_compilation_cache
from tests.python_process import finish, start

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Returns a folder for caches, in which JAX has no cache yet."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name in SETTINGS:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run_program():
    """Returns the result of a program, and whether JAX found it in its cache (None: no cache)."""
    events = []

    def listen(event, **unused):
        del unused
        if event.endswith(("/cache_hits", "/cache_misses")):
            events.append(event.endswith("hits"))

    def program(x):  # Another function each time, so that no cache in memory holds its program.
        return jnp.tanh(x @ x).sum()

    x = np.ones((4, 4), np.float32)
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(listen)
    try:
        result = float(jax.jit(program)(x))
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return result, events[0] if events else None


def entries(home):
    """Returns the files of programs in the cache."""
    return sorted(pathlib.Path(home, "moelib/programs").glob("*/*-cache"))


def test_a_program_is_kept_in_a_folder_of_the_user(home):
    use_compilation_cache()
    result, found = run_program()
    assert found is False
    assert run_program() == (result, True)
    (entry,) = entries(home)
    assert jax.config.jax_compilation_cache_dir == str(entry.parent)
    assert jax.config.jax_compilation_cache_max_size == 1 << 30
    assert entry.parent.stat().st_mode & 0o077 == 0


def test_processors_have_folders_of_their_own(home, monkeypatch):
    use_compilation_cache()
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(platform, "processor", lambda: "another one")
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir != folder


def test_an_entry_that_was_not_written_whole_is_replaced(home):
    use_compilation_cache()
    result, _ = run_program()
    (entry,) = entries(home)
    entry.write_bytes(entry.read_bytes()[:100])
    entry.with_name(entry.name.removesuffix("-cache") + "-atime").unlink()
    jax.config.update("jax_compilation_cache_dir", None)
    use_compilation_cache()
    assert run_program() == (result, False)
    assert run_program() == (result, True)


def test_a_damaged_entry_is_a_warning(home):
    use_compilation_cache()
    result, _ = run_program()
    (entry,) = entries(home)
    data = entry.read_bytes()
    entry.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert run_program()[0] == result


def test_a_folder_that_cannot_be_written_is_a_warning(home, caplog):
    (home / "moelib").write_text("A file instead of a folder.")
    use_compilation_cache()
    (record,) = caplog.records
    assert f"{home}/moelib/programs" in record.message
    assert "JAX_COMPILATION_CACHE_DIR" in record.message
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_enable_compilation_cache", False), ("jax_compilation_cache_dir", "mine")],
)
def test_jaxs_own_settings_take_precedence(home, name, value):
    jax.config.update(name, value)
    before = [getattr(jax.config, each) for each in SETTINGS]
    use_compilation_cache()
    assert [getattr(jax.config, each) for each in SETTINGS] == before
    assert not entries(home)


def test_processes_that_start_together_share_the_cache(home):
    code = """
import jax.numpy as jnp
from moelib.runtime.compilation_cache import use_compilation_cache
use_compilation_cache()
for i in range(5):
    print(jnp.ones(i + 2).sum())
"""
    outputs = finish(*(start("-c", code) for _ in range(2)))
    assert outputs == [("".join(f"{i + 2}.0\n" for i in range(5)), "")] * 2
    assert len(entries(home)) >= 5
