"""Measure speedup and acceptance by category on a suite of questions, answered without and with drafts."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.app.options import SuiteOptions
from redrafter.bench.options import BenchOptions
from redrafter.bench.speedup import Equality, compare_texts, describe_equality
from redrafter.data.suites import Dialogues, Question, Suite
from redrafter.engine.call import GenerateStats
from redrafter.measure.report import Report
from redrafter.measure.run import PromptIds, RepeatedRuns, Run, Workload, run_in_turn
from redrafter.measure.suite_table import SuiteTable, describe_acceptance, mean_of, write_tables


@dataclass
class Answers:
    """The timed answers to the turns of some questions, without and with drafts."""

    plain: RepeatedRuns = field(default_factory=RepeatedRuns)
    drafted: RepeatedRuns = field(default_factory=RepeatedRuns)
    skipped: int = 0  # turns that do not fit the context
    equality: list[Equality] = field(default_factory=list)  # entries that `compare_texts` returned

    def add(self, more: "Answers") -> None:
        """Add the answers of further turns with the same number of repeats."""
        self.plain.add(more.plain)
        self.drafted.add(more.drafted)
        self.skipped += more.skipped
        self.equality += more.equality

    def row(self) -> dict[str, Any]:
        """Return the row of a table. Speeds are medians over repeats; other values are from the first repeat."""
        runs = self.drafted.repeats[0] if self.drafted.repeats else []
        turns = [row for run in runs for row in run.stats.rows]
        row = {"skipped": self.skipped, "tokens": sum(run.count for run in runs)}
        row |= describe_acceptance(GenerateStats.from_rows(turns, None), turns)
        if not turns:
            return row
        return row | {
            "plain_tokens_per_second": statistics.median(self.plain.tokens_per_second),
            "tokens_per_second": statistics.median(self.drafted.tokens_per_second),
            "speedup": self.drafted.speedup(self.plain),
            "differing_texts": sum(entry["divergent"] for entry in self.equality),
        }


def answer_questions(
    work: Workload, questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, rows: int, repeats: int
) -> Answers:
    """Answer all turns of some questions without and with drafts, `rows` questions at once.

    Both ways decode the same prompts, which include the answers of plain decoding. Each turn is decoded `repeats`
    times; turn i of all turns has the workload's seed plus i.
    """

    def way(speculate: bool) -> Callable[[PromptIds, int], Run]:
        return lambda batch, first: turn.run_batch(batch, speculate, seed=first)

    answers, asked = Answers(), 0
    dialogues = Dialogues(questions, tokenizer, work.most_prompt_tokens)
    while prompts := dialogues.next_prompts():
        # Seeds continue over turns, so that no two turns share noise.
        turn = replace(work, prompts=prompts, seed=work.seed + asked)
        asked += len(prompts)
        batches = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        plain, drafted = run_in_turn([way(False), way(True)], batches, repeats, alternate=True)
        answers.add(Answers(plain, drafted, 0, [compare_texts(turn, plain.texts(), drafted.texts())]))
        # Plain answers for both ways: a near-tie must not give the ways different conversations.
        dialogues.answer(plain.texts())
    answers.skipped = dialogues.skipped
    return answers


def run_suite(
    report: Report,
    work: Workload,
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    options: BenchOptions,
    facts: Sequence[str],
    files: SuiteOptions,
) -> None:
    """Answer a suite at each batch size, and add a table of its categories to the report and to `files`.

    `facts` are lines about the measurement for the Markdown file; `files` names the CSV and Markdown files.
    """
    tables: list[SuiteTable] = []
    for rows in options.batch_sizes:
        by_category: dict[str, Answers] = {}
        asked = 0
        # Warm up, so that no timed run captures or compiles.
        report.progress(f"batch {rows}: warming up")
        for speculate in (False, True):
            work.run_batch([work.prompts[row % len(work.prompts)] for row in range(rows)], speculate)
        for category, questions in suite.categories.items():
            with report.section(f"batch {rows}, {category}: {len(questions)} questions"):
                this = replace(work, seed=work.seed + asked)
                by_category[category] = answers = answer_questions(this, questions, tokenizer, rows, options.repeats)
                asked += sum(entry["rows"] for entry in answers.equality)
                report.add("suite", {"batch_size": rows, "category": category} | answers.row())
                report.add("equality", {"batch_size": rows, "category": category, "turns": answers.equality})
        whole = Answers()
        for answers in by_category.values():
            whole.add(answers)
        entries = {category: answers.row() for category, answers in by_category.items()}
        if len(entries) > 1:
            entries["mean of categories"] = mean_of(list(entries.values()))
        entries["all turns"] = whole.row()
        conditions = {"batch_size": rows, "temperature": work.temperature}
        tables.append(SuiteTable(f"batch size {rows}, temperature {work.temperature:g}", conditions, entries))
        report.line(*tables[-1].lines())
        for category, answers in by_category.items():
            report.line(
                *(f"  {category}: {line.strip()}" for each in answers.equality for line in describe_equality(each))
            )
        write_tables(tables, facts, files.csv, files.markdown)
