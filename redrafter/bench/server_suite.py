"""Measure servers on a suite of questions as chats, whose turns include the server's own previous answers.

A server of this library is measured twice, without and with drafts. Other servers are compared with the first one
given, which may be the same engine without drafts.
"""

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from redrafter.app.options import SuiteOptions
from redrafter.bench.server_load import Completion, ServerUnderTest, chat_fields, run_load
from redrafter.data.suites import Question, Suite
from redrafter.engine.call import GenerateStats
from redrafter.measure.report import Report
from redrafter.measure.suite_table import SuiteTable, describe_acceptance, mean_of, write_tables

OWN_KIND = "redrafter"  # `owned_by` of models on this library's servers, which support `speculate`


@dataclass(frozen=True)
class ChatLoad:
    """A load of chats; request i asks all turns of question i, modulo their number."""

    questions: Sequence[Question]
    max_new_tokens: int  # of each answer, which an end token may end earlier
    temperature: float  # 0 for greedy decoding
    seed: int  # of question 0; question i has this plus i
    speculate: bool | None = None  # field of requests to this library's servers; None for other servers

    def route(self, index: int) -> str:
        """Return the path that all turns are sent to."""
        return "/v1/chat/completions"

    def exchange(self, index: int, model: str) -> Generator[bytes, Completion, None]:
        """Yield the JSON body of each turn of question `index`; the turns end with one that fails."""
        question, messages = self.questions[index % len(self.questions)], list[dict[str, Any]]()
        body: dict[str, object] = chat_fields(question.row, []) | {
            "model": model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.speculate is not None:
            # Drafts must not come from other conversations' answers, such as the undrafted run of these questions.
            body |= {"speculate": self.speculate, "cache_salt": uuid4().hex}
        for number, turn in enumerate(question.turns):
            messages += turn
            completion = yield json.dumps(body).encode()
            completion.turn = number
            # Later turns refer to an answer that does not exist.
            if completion.error is not None:
                return
            messages.append({"role": "assistant", "content": completion.text})


@dataclass
class Chats:
    """The answers of a server to some questions, and their statistics."""

    turns: int = 0  # of all questions, sent or not
    seconds: float = 0.0
    completions: list[Completion] = field(default_factory=list)

    def add(self, more: "Chats") -> None:
        """Add the results of other questions, measured at another time."""
        self.turns, self.seconds = self.turns + more.turns, self.seconds + more.seconds
        self.completions = self.completions + more.completions

    @property
    def answered(self) -> list[Completion]:
        """The turns that were answered."""
        return [one for one in self.completions if one.error is None]

    @property
    def errors(self) -> list[str]:
        """Errors of failed turns, except for prompts that are too long."""
        return [one.error for one in self.completions if one.error is not None and not one.too_long]

    def row(self, plain: "Chats | None") -> dict[str, Any]:
        """Return the row of a table; `plain` holds the undrafted results of the same questions, if measured."""
        stats = [one.stats for one in self.answered if one.stats is not None]
        tokens = sum(one.completion_tokens for one in self.answered)
        row = describe_acceptance(GenerateStats.from_rows(stats, None), stats) | {
            "turns": len(self.answered),
            # Turns whose prompt is too long, and turns that follow one of these or a failed one.
            "skipped": self.turns - len(self.answered) - len(self.errors),
            "failed": len(self.errors),
            "tokens": tokens,
            "tokens_per_second": tokens / self.seconds if tokens else None,
        }
        if plain is None or not plain.answered or not tokens:
            return row
        row["plain_tokens_per_second"] = speed = sum(one.completion_tokens for one in plain.answered) / plain.seconds
        row["speedup"] = row["tokens_per_second"] / speed
        expected = {(one.index, one.turn): one.text for one in plain.answered}
        same = (one.text == expected.get((one.index, one.turn), one.text) for one in self.answered)
        row["differing_texts"] = sum(not equal for equal in same)
        return row


def ask(server: ServerUnderTest, load: ChatLoad, concurrency: int, *, warm_up: bool) -> Chats:
    """Send all questions of a load to a server, `concurrency` at once.

    Raises:
        LoadError: All warm-up questions failed.
    """
    count = len(load.questions)
    run = asyncio.run(run_load(server, load, min(concurrency, count), count, warm_up=warm_up))
    turns = sum(len(question.turns) for question in load.questions)
    return Chats(turns, run.ended - run.began, run.completions)


def run_server_suite(
    report: Report,
    servers: Sequence[ServerUnderTest],
    suite: Suite,
    load: ChatLoad,
    concurrencies: Sequence[int],
    facts: Sequence[str],
    files: SuiteOptions,
) -> None:
    """Measure each server on a suite, category by category, at each concurrency, and add tables to the report.

    `load` provides the settings; its questions are replaced by the suite's. `facts` are lines about the measurement for
    the Markdown file; `files` names the CSV and Markdown files.
    """
    tables: list[SuiteTable] = []
    for concurrency in concurrencies:
        reference: dict[str, Chats] = {}  # of the first server, by category; undrafted if it supports that
        for number, server in enumerate(servers, start=1):
            name = f"server {number} ({server.url}), {concurrency} at once"
            by_category: dict[str, tuple[Chats, Chats | None]] = {}
            for category, questions in suite.categories.items():
                with report.section(f"{name}, {category}"):
                    # Undrafted first: its answers are the reference of the drafted run.
                    ways = [
                        ask(
                            server,
                            replace(load, questions=questions, speculate=way),
                            concurrency,
                            # Only the first category of a server meets cold connections.
                            warm_up=not by_category,
                        )
                        for way in ((False, True) if server.kind == OWN_KIND else (None,))
                    ]
                    plain = ways[0] if len(ways) > 1 else reference.get(category)
                    by_category[category] = chats, _ = ways[-1], plain
                    if number == 1:
                        reference[category] = ways[0]
                    condition = {"server": number, "concurrency": concurrency, "category": category}
                    report.add("suite", condition | chats.row(plain))
                    if errors := [error for way in ways for error in way.errors]:
                        message = f"{len(errors)} requests failed; the first: {errors[0]}"
                        report.line(f"{name}, {category}: {message}")
                        report.add("errors", {"section": f"{name}, {category}", "error": message})
            if by_category:
                tables.append(_table(name, load, by_category, server=number, concurrency=concurrency))
                report.line(*tables[-1].lines())
                write_tables(tables, facts, files.csv, files.markdown)


def _table(
    name: str,
    load: ChatLoad,
    by_category: Mapping[str, tuple[Chats, Chats | None]],
    server: int,
    concurrency: int,
) -> SuiteTable:
    """Return the table of a server, with a row for all categories together."""
    rows = {category: chats.row(plain) for category, (chats, plain) in by_category.items()}
    if len(rows) > 1:
        rows = rows | {"mean of categories": mean_of(list(rows.values()))}
    whole, compared = Chats(), Chats()
    for chats, plain in by_category.values():
        whole.add(chats)
        compared.add(plain or Chats())
    differing = {"differing_texts": sum(row.get("differing_texts", 0) for row in rows.values())}
    rows["all turns"] = whole.row(compared) | (differing if compared.answered else {})
    conditions = {"server": server, "concurrency": concurrency, "temperature": load.temperature}
    return SuiteTable(f"{name}, temperature {load.temperature:g}", conditions, rows)
