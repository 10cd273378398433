"""Versions of libraries."""

from moelib.core.versions import library_versions


def test_libraries_that_affect_the_numbers_have_versions():
    versions = library_versions()
    assert {"python", "moelib", "jax", "orbax-checkpoint"} <= versions.keys()
    assert all(version[0].isdigit() for version in versions.values())
