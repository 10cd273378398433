import mmap

import pytest

from moelib.core import memory_maps


def test_a_new_map_is_counted():
    before = memory_maps.count()
    maps = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ * (i % 2)) for i in range(100)]
    assert memory_maps.count() >= before + 90
    del maps


@pytest.mark.parametrize(("share", "warns"), [(1.2, True), (1.3, False)])
def test_four_fifths_of_the_limit_are_warned_of(share, warns, tmp_path, monkeypatch, caplog):
    limit = tmp_path / "max_map_count"
    limit.write_text(f"{int(share * memory_maps.count())}\n")
    monkeypatch.setattr(memory_maps, "_LIMIT", limit)
    memory_maps.warn_if_many()
    assert [limit.read_text().strip() in caplog.text, "clear_caches" in caplog.text] == [warns] * 2


def test_another_system_has_no_count(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(memory_maps, "_MAPS", tmp_path / "absent")
    memory_maps.warn_if_many()
    assert memory_maps.count() == 0
    assert not caplog.text
