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
    packed = {bytes: "", gzip.compress: ".gz", _zstd: ".zst"}[pack]
    if ending == ".csv":
        texts = TEXTS
        csv.writer(table).writerows([["id", "body"], *enumerate(texts)])
    else:
        texts = [x for x in TEXTS if "\t" not in x]
        table.writelines(f"{i}\t{x}\n" for i, x in [("id", "body"), *enumerate(texts)])
    (tmp_path / f"a{ending}{packed}").write_bytes(pack(table.getvalue().encode()))
    assert list(_source(tmp_path, column="body").documents()) == texts


def test_quotes_of_a_tsv_join_no_rows(tmp_path):
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"Yes\n2\tand no"\n3\t"\n"a\tb"\n')
    assert list(_source(tmp_path).documents()) == ['"Yes', 'and no"', '"', 'b"']
    (tmp_path / "a.tsv").write_text('text\n"two\tfields"\n')
    with pytest.raises(BadRecordError, match=r"2 fields, .* a \.tsv has no quotes"):
        list(_source(tmp_path).documents())


def test_a_bad_row_is_skipped_with_the_lines_that_it_takes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\na\n"b"c\nd\n\xff\ne\n"cut\noff')
    bad = BadRecords()
    assert list(_source(path).documents(bad)) == ["a", "d", "e"]
    assert bad.count == 3
    assert "a.csv:3: ',' expected after '\"'" in bad.first
    path.write_bytes(b'text\n"cut\noff\n')
    with pytest.raises(BadRecordError, match=r"a.csv:3: unexpected end .*lines 2 to 3 are one row"):
        list(_source(path).documents())
    (tmp_path / "empty.csv").write_bytes(b"")
    assert list(_source(tmp_path / "empty.csv").documents()) == []


@pytest.mark.parametrize("end", ["", '"quoted",1\n'])
def test_rows_behind_a_quote_that_is_not_closed_are_not_skipped(tmp_path, end):
    rows = "".join(f"row {i},{i}\n" for i in range(100))
    (tmp_path / "a.csv").write_text('text,id\nfine,0\n"unclosed,1\n' + rows + end)
    last = 103 + bool(end)
    with pytest.raises(UserError, match=rf"lines 3 to {last} are one row\); close .* line 3\."):
        list(_source(tmp_path).documents(BadRecords()))


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
        (b"\xff\n1\n", r"a\.csv:1: not UTF-8"),
        (b'"text"x\ntext\na\n', r"a\.csv:1: .*expected after"),  # Not the next row instead.
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
