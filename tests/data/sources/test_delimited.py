import csv
import gzip
import io

import pytest

from moelib.core.errors import UserError
from moelib.data.sources.delimited import Delimited
from moelib.data.sources.source import BadRecordError, BadRecords
from tests.data.sources.test_json_lines import _zstd

TEXTS = [
    "plain",
    'quotes "inside", and a comma',
    "two\nlines\r\nand a\ttab",
    "",
    '"quoted"',
    "Grüße 東京",
    "long " * 100_000,  # Beyond the default limit of the module csv.
]


def _source(path: object, **fields: str) -> Delimited:
    return Delimited.default_config().set(paths=[str(path)], **fields).instantiate()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, _zstd])
@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_every_packing_gives_the_texts_that_were_written(tmp_path, ending, pack):
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter={".csv": ",", ".tsv": "\t"}[ending])
    writer.writerows([["id", "body"], *enumerate(TEXTS)])
    packed = {bytes: "", gzip.compress: ".gz", _zstd: ".zst"}[pack]
    (tmp_path / f"a{ending}{packed}").write_bytes(pack(table.getvalue().encode()))
    assert list(_source(tmp_path, column="body").documents()) == TEXTS


def test_a_mark_of_byte_order_and_blank_lines_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,id\r\n\r\na,1\r\n\r\nb,2")
    assert list(_source(tmp_path).documents()) == ["a", "b"]


def test_rows_with_other_numbers_of_fields_are_bad_records(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,"a\nb"\n2\n3,c,d\n4,e\n')
    with pytest.raises(BadRecordError, match=r"a\.csv:4: 1 fields, .* 2"):
        list(_source(tmp_path).documents())
    bad = BadRecords()
    assert list(_source(tmp_path).documents(bad)) == ["a\nb", "e"]
    assert bad.count == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,a\n", r"0 columns are named 'text' .*\['id', 'body'\]"),
        (b"text,text\n1,a\n", "2 columns are named 'text'"),
        (b"", "0 columns are named 'text'"),
        (b'text\n"cut off', r"a\.csv:2: .*unexpected end"),
        (b'text\n"a"b\n', r"a\.csv:2: .*expected after"),
        (b"text\n\xff\n", r"a\.csv:.*0xff"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(_source(tmp_path).documents(BadRecords()))


def test_a_truncated_archive_is_refused(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text\n" + b"a\n" * 99)[:-9])
    with pytest.raises(UserError, match=r"a\.csv\.gz cannot be decompressed"):
        list(_source(tmp_path).documents())
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(UserError, match=r"b\.txt: .*\.csv"):
        _source(tmp_path / "b.txt").parts()
