"""Rows of data sources: which files are read, and in which order."""

import json

from redrafter.data.rows import read_rows


def test_a_directory_of_files_is_read_in_the_order_of_their_names(tmp_path):
    for name, text in (("b.jsonl", "two"), ("a.jsonl", "one"), ("c.jsonl.part", "no"), ("c.txt", "no")):
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    assert [row.text for row in read_rows([tmp_path])] == ["one", "two"]
