"""The cache of reports: keys of entries, and folders that cannot be written."""

import importlib
import sys

import pytest

from moelib.planning.compiled import cache as report_cache

_REQUEST = {"config": "klass: own_layers:Layer\ndim: 4", "topology": "v6e:2x2"}


def test_a_key_stays_as_long_as_nothing_changes():
    assert report_cache.key(_REQUEST) == report_cache.key(dict(reversed(_REQUEST.items())))


def test_a_key_changes_with_the_users_own_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "own_layers.py"
    source.write_text("class Layer: pass")
    importlib.import_module("own_layers")
    before = report_cache.key(_REQUEST)
    source.write_text("class Layer: dim = 1")
    assert report_cache.key(_REQUEST) != before
    monkeypatch.delitem(sys.modules, "own_layers")


def test_a_key_changes_with_the_compilers_version(monkeypatch):
    before = report_cache.key(_REQUEST)
    monkeypatch.setattr(report_cache, "_versions", lambda: [("jax", "0.0")])
    assert report_cache.key(_REQUEST) != before


def test_a_key_changes_with_the_library(monkeypatch):
    before = report_cache.key(_REQUEST)
    monkeypatch.setattr(report_cache, "_hash_of_moelib", lambda: "another")
    assert report_cache.key(_REQUEST) != before


@pytest.mark.parametrize("value", [{"a": [1, "x"]}, {}])
def test_entries_are_read_back(tmp_path, value):
    report_cache.write(str(tmp_path / "new"), "k", value)
    assert report_cache.read(str(tmp_path / "new"), "k") == value
    assert report_cache.read(str(tmp_path / "new"), "other") == {}


def test_a_folder_that_cannot_be_written_is_warned_about(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    report_cache.write(str(tmp_path / "file"), "k", {})
    assert "the report is not cached" in caplog.text


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64"])
def test_a_key_changes_with_the_flags_in_the_environment(monkeypatch, name):
    before = report_cache.key(_REQUEST)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")  # The worker takes none of these.
    assert report_cache.key(_REQUEST) == before
    monkeypatch.setenv(name, "another")
    assert report_cache.key(_REQUEST) != before
