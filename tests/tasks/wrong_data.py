"""Wrong data files: a name for the fault, the file, its bytes, the task and what the message must say."""

from __future__ import annotations

from petune.tasks.configs import MAX_LINE_BYTES

GOOD = b'{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n{"text": "fine", "label": "a"}\n{"text": "poor", "label": "b"}\n'
FILL = ("fill it, delete the row, or data.on_bad_line=skip (at most 5%)",)


def with_line(line: bytes) -> bytes:
    return GOOD + line + b"\n" + GOOD.replace(b"good", b"well")


# name, file, its bytes, task, what the message must say
WRONG: list[tuple[str, str, bytes, str, list[str]]] = [
    ("bad JSON", "d.jsonl", with_line(b'{"text": "x" "label": "a"}'), "classify", ["d.jsonl:5:14", "not JSON"]),
    ("an array for a row", "d.jsonl", with_line(b'["x", "a"]'), "classify", ["d.jsonl:5", "an object", "an array"]),
    ("a scalar for a row", "d.jsonl", with_line(b"7"), "classify", ["d.jsonl:5", "a whole number"]),
    ("a last line cut off", "d.jsonl", GOOD + b'{"text": "x", "lab', "classify", ["d.jsonl:5:", "cut off", "copied whole"]),
    ("invalid UTF-8", "d.jsonl", with_line(b'{"text": "\xe9t\xe9", "label": "a"}'), "classify", ["d.jsonl:5:11", "0xe9", "UTF-8"]),
    (
        "a line without end",
        "d.jsonl",
        with_line(b'{"text": "' + b"x" * MAX_LINE_BYTES + b'"}'),
        "classify",
        ["d.jsonl:5", "longer than 16 MiB"],
    ),
    ("a CSV line without end", "d.csv", b"text,label\n" + b"x" * (MAX_LINE_BYTES + 1), "classify", ["d.csv:2", "longer than 16 MiB"]),
    (
        "a duplicate key",
        "d.jsonl",
        with_line(b'{"text": "x", "text": "y", "label": "a"}'),
        "classify",
        ["d.jsonl:5", "'text' appears twice"],
    ),
    ("a label that becomes a number", "d.jsonl", with_line(b'{"text": "x", "label": 1}'), "classify", ["d.jsonl:5", "type", "d.jsonl:1"]),
    ("a text that becomes a list", "d.jsonl", with_line(b'{"text": ["x"], "label": "a"}'), "classify", ["d.jsonl:5", "an array"]),
    (
        "a column missing from one row",
        "d.jsonl",
        with_line(b'{"text": "x", "lable": "a"}'),
        "classify",
        ["d.jsonl:5", "did you mean: lable"],
    ),
    (
        "a column missing from all",
        "d.jsonl",
        GOOD.replace(b"label", b"lable"),
        "classify",
        ["d.jsonl:1", "columns text, lable", "data.columns.label=lable"],
    ),
    (
        "cells between semicolons",
        "d.csv",
        b"text;label\nx;a\ny;b\n",
        "classify",
        ["d.csv:1", "one column", "semicolons", "save it with commas"],
    ),
    ("cells between tabs", "d.csv", b"text\tlabel\nx\ta\n", "classify", ["d.csv:1", "found tabs", "name it .tsv"]),
    ("cells between commas", "d.tsv", b"text,label\nx,a\n", "classify", ["d.tsv:1", "found commas", "name it .csv"]),
    (
        "two labels in a list",
        "d.jsonl",
        b'{"text": "x", "labels": ["a", "b"]}\n',
        "classify",
        ["column 'labels' is an array", "name or number of a class"],
    ),
    ("tags in a text", "d.jsonl", b'{"tokens": ["x"], "tags": "O"}\n', "tokens", ["column 'tags' is a string", "a tag for every word"]),
    ("turns in a text", "d.jsonl", b'{"messages": "hello"}\n', "chat", ["column 'messages' is a string", "a list of turns"]),
    ("an empty file", "d.jsonl", b"", "classify", ["d.jsonl", "empty"]),
    ("only blank lines", "d.jsonl", b"\n\n \n", "classify", ["d.jsonl", "3 blank lines"]),
    ("one row", "d.jsonl", b'{"text": "x", "label": "a"}\n', "classify", ["d.jsonl:1", "too few rows", "1 row"]),
    ("one row, repeated", "d.jsonl", b'{"text": "x"}\n' * 9, "causal", ["d.jsonl:1", "9 rows, 1 distinct"]),
    ("an empty label", "d.jsonl", with_line(b'{"text": "x", "label": " "}'), "classify", ["d.jsonl:5", "'label' is empty", *FILL]),
    ("a null label", "d.jsonl", with_line(b'{"text": "x", "label": null}'), "classify", ["d.jsonl:5", "null", *FILL]),
    ("one class only", "d.jsonl", GOOD.replace(b'"b"', b'"a"'), "classify", ["d.jsonl:", "same label", "at least 2 classes"]),
    (
        "a class per row",
        "d.jsonl",
        b"".join(b'{"text": "%d", "label": "n%d"}\n' % (n, n) for n in range(9)),
        "classify",
        ["label of its own"],
    ),
    ("NaN", "d.jsonl", with_line(b'{"text": "x", "label": NaN}'), "classify", ["d.jsonl:5", "NaN is not a JSON value"]),
    ("a label called nan", "d.csv", b"text,label\ngood,a\nbad,nan\n", "classify", ["d.csv:3", "is nan", *FILL]),
    ("an empty text", "d.jsonl", with_line(b'{"text": "", "label": "a"}'), "classify", ["d.jsonl:5", "'text' is empty", *FILL]),
    ("half of a surrogate pair", "d.jsonl", with_line(b'{"text": "\\ud83d", "label": "a"}'), "classify", ["d.jsonl:5", "surrogate"]),
    ("nesting without end", "d.jsonl", with_line(b"[" * 100_000), "classify", ["d.jsonl:5", "nested too deeply"]),
    ("a label with a fraction", "d.jsonl", b'{"text": "x", "label": 0.5}\n', "classify", ["d.jsonl:1", "fraction"]),
    (
        "a Git LFS pointer",
        "d.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "classify",
        ["Git LFS", "git lfs pull"],
    ),
    ("an HTML page", "d.jsonl", b"<!DOCTYPE html><html></html>", "classify", ["HTML page"]),
    (
        "an HTML page in small letters",
        "d.jsonl",
        b"\n  <!doctype html>\n<title>404</title>",
        "classify",
        ["HTML page", "fetch the file again"],
    ),
    ("markup", "d.json", b"<div>not found</div>", "classify", ["HTML or XML page"]),
    ("Parquet by another name", "d.jsonl", b"PAR1\0\0", "classify", ["a Parquet file", "name it .parquet"]),
    ("a last line that is no JSON", "d.jsonl", GOOD + b"hello there", "classify", ["d.jsonl:5:1", "not JSON"]),
    ("a last line with a slip", "d.jsonl", GOOD + b'{"text": "x" "label": "a"}', "classify", ["d.jsonl:5:14", "not JSON"]),
    ("a last value cut off", "d.jsonl", GOOD + b'{"text": "x", "label": tr', "classify", ["d.jsonl:5:", "cut off"]),
    ("UTF-16", "d.csv", "text,label\n".encode("utf-16"), "classify", ["UTF-16", "save it as UTF-8"]),
    ("a pretty-printed array", "d.jsonl", b'[\n  {"text": "x"}\n]\n', "causal", ["d.jsonl:1", "name a pretty-printed array .json"]),
    ("an array not closed", "d.json", b'[{"text": "x"},\n {"text": "y"}', "causal", ["d.json:2", "] after a row"]),
    ("a scalar in an array", "d.json", b'[{"text": "x"},\n {"text": "y"},\n 3]', "causal", ["d.json:3", "a whole number"]),
    ("a CSV row too wide", "d.csv", b"text,label\ngood,a\nbad, really,b\n", "classify", ["d.csv:3", "2 cells", "3"]),
    ("a CSV quote not closed", "d.csv", b'text,label\ngood,a\n"bad,b\n', "classify", ["d.csv:3", "not CSV"]),
    ("a CSV name used twice", "d.csv", b"text,text\ngood,a\n", "classify", ["d.csv:1", "'text' appears twice"]),
    ("a CSV of bad bytes", "d.csv", b"text,label\ngood,a\nb\xe4d,b\n", "classify", ["d.csv:3:2", "UTF-8"]),
    ("a Parquet file cut off", "d.parquet", b"PAR1" + b"\0" * 50, "classify", ["d.parquet", "not a whole Parquet file"]),
    ("a pickle", "d.pkl", b"\x80\x04.", "classify", ["d.pkl", ".jsonl"]),
    ("no assistant", "d.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}\n', "chat", ["d.jsonl:1", "nothing to train"]),
    ("an unknown speaker", "d.jsonl", b'{"messages": [{"role": "robot", "content": "hi"}]}\n', "chat", ["d.jsonl:1", "turn 1", "'robot'"]),
    (
        "content that is a list",
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": []}]}\n',
        "chat",
        ["d.jsonl:1", "turn 1", "an array"],
    ),
    ("a turn that is a string", "d.jsonl", b'{"conversations": [{"from": "human", "value": "x"}, "y"]}\n', "chat", ["d.jsonl:1", "turn 2"]),
]
