"""Rows of data sources: which files are read, and in which order."""

import json

from redrafter.data.rows import read_rows


def test_a_directory_of_files_is_read_in_the_order_of_their_names(tmp_path):
    for name, text in (("b.jsonl", "two"), ("a.jsonl", "one"), ("c.jsonl.part", "no"), ("c.txt", "no")):
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    assert [row.text for row in read_rows([tmp_path])] == ["one", "two"]


def test_tools_and_variables_of_the_template_reach_the_row(tmp_path):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    row = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}}
    texts = {"tools": json.dumps([tool]), "chat_template_kwargs": json.dumps(row["chat_template_kwargs"])}
    rows = [row | {"tools": [tool]}, row | texts, {"messages": row["messages"], "tools": []}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_rows([file])
    assert first.tools == second.tools == [tool]
    assert first.template_kwargs == second.template_kwargs == {"enable_thinking": False}
    assert third.tools is third.template_kwargs is None
