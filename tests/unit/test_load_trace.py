"""Reading traces: the project's columns, the Azure files as published, and faults of a file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from qlm_load.workload import trace
from qlm_load.workload.trace import TraceError, read_trace

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_the_documented_columns_plain_and_packed(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,model,client\n0.5,10,3,m-mid,m-mid/73\n1.25,2,1,,\n"
    plain = read_trace(write(tmp_path, text))
    packed_path = tmp_path / "trace.csv.gz"
    packed_path.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed_path).rows == plain.rows
    first, second = plain.rows
    assert (first.arrival_s, first.input_tokens, first.output_tokens, first.model, first.client) == (0.0, 10, 3, "m-mid", "m-mid/73")
    assert (second.arrival_s, second.model, second.client) == (0.75, None, None)
    assert plain.notes == ()


def test_ignores_unknown_extra_columns_in_any_order(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, "hash_ids,output_tokens,arrival_s,input_tokens\n1 2 3,7,0,900\n")).rows
    assert (rows[0].input_tokens, rows[0].output_tokens) == (900, 7)


def test_reads_the_azure_trace_of_2023_as_published(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE_2023)).rows
    assert [row.input_tokens for row in rows] == [374, 396, 879]
    assert [row.output_tokens for row in rows] == [44, 109, 55]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 4.314579, 4.541977], abs=2e-6)


def test_reads_the_azure_trace_of_2024_as_published(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-11 23:59:59+00:00,100,2\r\n2024-05-12 00:00:00.001163+00:00,101,3\r\n2024-05-12T02:00:01Z,102,4\r\n"
        "2024-05-12 05:00:01+02:00,103,5\r\n2024-05-12 00:30:01-0330,104,6\r\n"
    )
    rows = read_trace(write(tmp_path, "\ufeff" + text)).rows
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 1.001163, 7202.0, 10802.0, 14402.0], abs=2e-6)


def test_an_unsorted_trace_is_sorted_with_a_note(tmp_path: Path) -> None:
    read = read_trace(write(tmp_path, "arrival_s,input_tokens,output_tokens\n5,1,1\n3,2,1\n3,3,1\n9,4,1\n"))
    assert [(row.arrival_s, row.input_tokens) for row in read.rows] == [(0.0, 2), (0.0, 3), (2.0, 1), (6.0, 4)]
    assert "not sorted" in read.notes[0]


def test_bounded_size(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},1,1\n" for n in range(20)))
    read = read_trace(path, rows_max=5)
    assert len(read.rows) == 5
    assert "first 5 rows" in read.notes[0]
    assert len(read_trace(path).head(duration_max_s=7).rows) == 7
    assert len(read_trace(path).head(rows_max=3).rows) == 3
    long_line = write(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1," + "1" * trace.LINE_CHARACTERS_MAX, "long.csv")
    with pytest.raises(TraceError, match="line 2: longer than"):
        read_trace(long_line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nan,1,1", "arrival_s must be finite"),
        ("inf,1,1", "arrival_s must be finite"),
        ("-1,1,1", "arrival_s must be >= 0"),
        ("soon,1,1", "arrival_s must be a number"),
        ("1,0,1", "input_tokens must be a whole number from 1"),
        ("1,-4,1", "input_tokens must be a whole number from 1"),
        ("1,1,nan", "output_tokens must be finite"),
        ("1,1,1.5", "output_tokens must be a whole number"),
        ("1,1,99999999999", "output_tokens must be a whole number"),
        ("1,1", "2 fields where the header has 3"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, f"arrival_s,input_tokens,output_tokens\n0,1,1\n{line}\n")
    with pytest.raises(TraceError, match=rf"trace\.csv, line 3: {says}"):
        read_trace(path)


@pytest.mark.parametrize("moment", ["2023-11-16", "16/11/2023 10:00:00", "2023-13-16 10:00:00.0", "nan", ""])
def test_a_wrong_timestamp_is_named(tmp_path: Path, moment: str) -> None:
    with pytest.raises(TraceError, match="line 2: TIMESTAMP"):
        read_trace(write(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{moment},1,1\n"))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no rows"):
        read_trace(write(tmp_path, "arrival_s,input_tokens,output_tokens\n"))
    with pytest.raises(TraceError, match="line 1: the header must name"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(TraceError, match="line 1: the header must name"):
        read_trace(write(tmp_path, "input_tokens,output_tokens\n1,1\n"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(AZURE_2023.encode() * 50)[:60])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(broken)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"arrival_s,input_tokens,output_tokens\n\xff\xfe,1,1\n")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(binary)


def test_a_quoted_header_is_read(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, '"arrival_s","input_tokens", "output_tokens"\n"0","10","3"\n'.replace(", ", ","))).rows
    assert (rows[0].input_tokens, rows[0].output_tokens) == (10, 3)
    azure = read_trace(write(tmp_path, '"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2023-11-16 18:15:46.68",374,44\n')).rows
    assert azure[0].input_tokens == 374


def test_a_packed_trace_that_is_damaged_anywhere_is_a_trace_error(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{number},{number % 977 + 1},{number % 13 + 1}\n" for number in range(2_000))
    packed = gzip.compress(text.encode())
    path = tmp_path / "trace.csv.gz"
    refused = 0
    for place in range(2, len(packed), max(1, len(packed) // 50)):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :])
        try:
            read_trace(path)
        except TraceError:
            refused += 1
        path.write_bytes(packed[:place])
        with pytest.raises(TraceError):
            read_trace(path)
    assert refused > 35


@pytest.mark.parametrize("text", ["", "\n", '"', '"arrival_s', "\0"])
def test_a_file_that_is_no_trace_is_a_trace_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError):
        read_trace(write(tmp_path, text))
