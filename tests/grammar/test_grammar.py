"""Guided decoding: what is drawn follows the grammar, and is what plain guided decoding draws."""

import json
import math
import re
import sys
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from helpers.chats import tiny_tokenizer
from helpers.models import paged, scripted_engine, tiny_drafter, tiny_model, with_tree
from redrafter import ArgumentError, DraftTarget, ReDrafter, boxed_pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.errors import MissingDependencyError
from redrafter.grammar.grammar import Grammar, GuidedText
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.host_processors import RowGrammars
from redrafter.sampling.prefixes import Prefixes
from redrafter.tree.token_tree import Tree, chain, tree_of

pytest.importorskip("llguidance")

from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from redrafter.grammar.child import CompiledGrammar, GrammarState

TOKENIZER = tiny_tokenizer()
VOCABULARY = from_tokenizer(TOKENIZER)
KNOWN, VOCAB, EOS, OTHER_END = len(TOKENIZER), 290, 2, 5  # the model's vocabulary is larger than the tokenizer's
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS = {
    "schema": {"json_schema": {"enum": ["red", 17, {"a": [1]}]}},
    "schema as text": {"json_schema": json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3})},
    "object": {"json_object": True},
    "regex": {"regex": r"(ab|[0-9]{2}){1,4}(é|x)?"},
    "lark": {"lark": 'start: "(" inner ")"\ninner: /[a-c]{1,3}/ | "[" /[0-9]{2}/ "]"'},
    "ebnf": {"ebnf": 'root ::= pair ("," pair)?\npair ::= [a-z] "=" [0-9]'},
    "choice": {"choice": ["yes", "no", "never", "", 'a "b"\\', "é😀"]},
    "everything in JSON": '{"regex": "[ab]{3,9}"}',
}
MATCHES = {
    "schema": lambda text: json.loads(text) in ("red", 17, {"a": [1]}),
    "schema as text": lambda text: set(json.loads(text)) <= {1, 2} and len(json.loads(text)) <= 3,
    "regex": lambda text: re.fullmatch(SPECS["regex"]["regex"], text),
    "lark": lambda text: re.fullmatch(r"\(([a-c]{1,3}|\[[0-9]{2}\])\)", text),
    "ebnf": lambda text: re.fullmatch(r"[a-z]=[0-9](,[a-z]=[0-9])?", text),
    "choice": lambda text: text in SPECS["choice"]["choice"],
    "everything in JSON": lambda text: re.fullmatch(r"[ab]{3,9}", text),
}
IDS = torch.tensor([[0, 0, 71, 80, 9], [75, 90, 14, 77, 30], [0, 81, 7, 70, 71]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "tokenizer": TOKENIZER}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 4}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=256)


@pytest.fixture(scope="module")
def engine(model):
    return with_tree(model, tiny_drafter(vocab_size=VOCAB), 5, 5)


@pytest.fixture(scope="module")
def on_blocks():
    return paged(with_tree(tiny_model("llama", vocab_size=VOCAB), tiny_drafter(vocab_size=VOCAB), 5, 5))


def texts(sequences: Tensor, ends: tuple[int, ...] = (EOS,)) -> list[str | None]:
    """Return the text that each row generated; None for a row that did not end."""
    found: list[str | None] = []
    for row in sequences[:, IDS.shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), None)
        found.append(None if end is None else spelled(row[:end]))
    return found


def spelled(tokens: list[int]) -> str:
    assert all(6 <= token < KNOWN for token in tokens), "neither special tokens nor ids past the tokenizer's"
    return TOKENIZER.decode(tokens)


@cache
def compiled(source: GrammarSource) -> CompiledGrammar:
    """Compile a grammar in this process: the slow reference of grammars in processes of their own."""
    return CompiledGrammar(source, VOCABULARY)


def start(grammar: Grammar) -> LLMatcher:
    return compiled(grammar.source).start()


class OneText(LogitsProcessor):
    """Masks each text with a matcher that is made for it alone."""

    def __init__(self, grammars: list[Grammar | None], ends: tuple[int, ...] = (EOS,), width: int = IDS.shape[1]):
        self.grammars, self.ends, self.width = grammars, ends, width

    def allowed(self, grammar: Grammar, text: list[int]) -> list[int] | None:
        if set(text) & set(self.ends):
            return None
        matcher = start(grammar)
        assert matcher.consume_tokens(text)
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        ids = [token for token in range(KNOWN) if bits >> token & 1 and token != EOS]
        return [*ids, *self.ends] if matcher.is_accepting() else ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = scores.clone()
        for row, grammar in enumerate(self.grammars):
            ids = None if grammar is None else self.allowed(grammar, input_ids[row, self.width :].tolist())
            if ids is not None:
                masked[row] = -math.inf
                masked[row, ids] = scores[row, ids]
        return masked


class OurMasks(LogitsProcessor):
    """Masks texts with a grammar as our steps do, at the one node that `model.generate` asks about."""

    def __init__(self, grammar: Grammar):
        self.rows = RowGrammars([GuidedText(grammar, [EOS]) for _ in IDS])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, length = input_ids.shape
        committed = torch.full((rows,), length - 1)
        prompt, limit = torch.full_like(committed, IDS.shape[1]), torch.full_like(committed, length + 1)
        prefixes = Prefixes(input_ids, committed, prompt, limit, chain(input_ids[:, -1:]), length)
        return self.rows(scores[:, None], prefixes)[:, 0]


def reference(model, grammars: list[Grammar | None], ends: tuple[int, ...] = (EOS,), **how) -> Tensor:
    how = {**GREEDY, **how}
    return model.generate(**BATCH, **how, eos_token_id=list(ends), logits_processor=[OneText(grammars, ends)])


@pytest.mark.parametrize("name", SPECS)
def test_greedy_text_is_that_of_model_generate_with_one_text_at_a_time(model, engine, name):
    grammar = Grammar(SPECS[name], TOKENIZER)
    expected = reference(model, [grammar] * 3)
    assert torch.equal(engine.generate(**BATCH, **GREEDY, grammar=SPECS[name]), expected)
    assert torch.equal(engine.generate(**BATCH, **GREEDY, grammar=grammar, speculate=False), expected)
    own = model.generate(**BATCH, **GREEDY, logits_processor=[OurMasks(grammar)])
    assert torch.equal(own, expected)


@pytest.mark.parametrize("name", SPECS)
def test_sampled_text_follows_the_grammar_and_is_that_of_plain_decoding(engine, name):
    out = engine.generate(**BATCH, **SAMPLED, grammar=SPECS[name], num_return_sequences=4)
    plain = engine.generate(**BATCH, **SAMPLED, grammar=SPECS[name], num_return_sequences=4, speculate=False)
    assert torch.equal(out, plain)
    ended = [text for text in texts(out) if text is not None]
    if name in MATCHES:  # a random model does not come to the end of any object
        assert len(ended) > 9  # and may indent until it is cut
        assert all(MATCHES[name](text) for text in ended), ended
        assert len(set(ended)) > 2


MIXED = [{"regex": "[a-f]{12}x?"}, None, {"json_schema": PERSON}]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {70: -3.0}, "min_new_tokens": 4}


@pytest.mark.costly
@pytest.mark.parametrize("how", [GREEDY, SAMPLED, GREEDY | PENALTIES, SAMPLED | PENALTIES | {"top_k": 9}])
def test_rows_of_one_batch_have_grammars_of_their_own_or_none(engine, on_blocks, how):
    grammars = [spec and Grammar(spec, TOKENIZER) for spec in MIXED]
    out = engine.generate(**BATCH, **how, grammar=grammars)
    assert torch.equal(engine.generate(**BATCH, **how, grammar=grammars, speculate=False), out)
    assert torch.equal(on_blocks.generate(**BATCH, **how, grammar=MIXED), out)
    assert torch.equal(out[1], engine.generate(**BATCH, **how)[1][: out.shape[1]])  # as if the others had none
    assert re.fullmatch("[a-f]{12}x?", texts(out[:1])[0])
    if not how["do_sample"] and "repetition_penalty" not in how:
        assert torch.equal(out, reference(engine.model, grammars))


def test_drafts_that_follow_the_grammar_are_kept_and_others_never(model):
    spec = {"regex": "[a-m]{30}"}
    plain = with_tree(model, tiny_drafter(vocab_size=VOCAB), 2, 2)
    expected = plain.generate(**BATCH, **GREEDY, grammar=spec, speculate=False)
    free = plain.generate(**BATCH, **GREEDY, speculate=False)
    assert not torch.equal(free, expected)
    script = torch.stack([row.roll(-pad) for row, pad in zip(expected, (IDS == 0).sum(1).tolist(), strict=True)])
    how = {**GREEDY, "grammar": spec, "return_dict_in_generate": True}
    right = scripted_engine(model, script, 2, 5).generate(**BATCH, **how)
    assert torch.equal(right.sequences, expected)
    assert right.stats.tokens_per_step > 4
    wrong = scripted_engine(model, script, 2, 5, offset=13).generate(**BATCH, **how)  # n to z, and n to z after them
    assert torch.equal(wrong.sequences, expected)
    assert wrong.stats.accepted == 0
    liked = free.roll(0, 1) % 97  # what it would like to write
    tempting = scripted_engine(model, liked, 3, 5).generate(**BATCH, **how)
    assert torch.equal(tempting.sequences, expected)


@pytest.mark.parametrize("ends", [(EOS, OTHER_END), (OTHER_END,), (280,)])
def test_a_text_ends_with_any_of_its_own_end_tokens_where_the_grammar_may_end(model, engine, ends):
    grammar = Grammar({"regex": "[ab]{2}[cd]*"}, TOKENIZER)
    how = {**SAMPLED, "eos_token_id": list(ends), "num_return_sequences": 8, "logit_bias": dict.fromkeys(ends, 4.0)}
    out = engine.generate(**BATCH, **how, grammar=grammar)
    assert all(re.fullmatch("[ab]{2}[cd]*", text) for text in texts(out, ends))
    assert {end for end in ends if (out[:, IDS.shape[1] :] == end).any()} == set(ends)
    if EOS not in ends:
        assert not (out[:, IDS.shape[1] :] == EOS).any()
    greedy = engine.generate(**BATCH, **GREEDY, eos_token_id=list(ends), grammar=grammar)
    assert torch.equal(greedy, reference(model, [grammar] * 3, ends))


def test_a_complete_text_ends_and_a_long_one_is_cut(engine):
    for how in (GREEDY, SAMPLED):
        out = engine.generate(**BATCH, **how, grammar={"choice": ["abcdefg"]})
        assert texts(out) == ["abcdefg"] * 3
        assert out.shape[1] == IDS.shape[1] + 8
        cut = engine.generate(**BATCH, **{**how, "max_new_tokens": 5}, grammar={"choice": ["abcdefg"]})
        assert cut.shape[1] == IDS.shape[1] + 5
        assert [spelled(row) for row in cut[:, 5:].tolist()] == ["abcde"] * 3


def test_the_grammar_wins_over_what_forbids_all_that_it_allows(engine):
    def nothing(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf)

    others = [{"suppress_tokens": [70]}, {"min_new_tokens": 9}, {"bad_words_ids": [[70]]}]
    for more in (*others, {"logits_processor": LogitsProcessorList([nothing])}):
        assert texts(engine.generate(**BATCH, **SAMPLED, **more, grammar={"choice": ["ab"]})) == ["ab"] * 3


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_draft_model_is_guided_too(model, acceptance):
    pair = DraftTarget.from_pretrained(model, model, draft_len=3, acceptance=acceptance)
    spec = {"regex": "[a-d]{5}([0-9]{5})?"}
    out = pair.generate(**BATCH, **SAMPLED, grammar=spec, return_dict_in_generate=True, num_return_sequences=3)
    assert all(re.fullmatch(spec["regex"], text) for text in texts(out.sequences))
    assert out.stats.tokens_per_step > 2  # it is the target itself
    if acceptance == "match":
        plain = pair.generate(**BATCH, **SAMPLED, grammar=spec, speculate=False, num_return_sequences=3)
        assert torch.equal(out.sequences, plain)


def random_tree(text: str, random: torch.Generator) -> Tree:
    """Below the last letter of `text`, three levels of `a`, `b`, `c` and an end, five on each."""
    tokens = torch.tensor([70, 71, 72, EOS])[torch.randint(4, (1, 16), generator=random)]
    tokens[0, 0] = TOKENIZER.encode(text or "!", add_special_tokens=False)[-1]
    depth = torch.tensor([[0, *[1] * 5, *[2] * 5, *[3] * 5]])
    parents = (depth - 1).clamp(min=0) * 5 - 4 + torch.randint(5, (1, 16), generator=random)
    return tree_of(tokens, torch.where(depth < 2, 0, parents), depth, 3)


def prefixes_of(written: str, tree: Tree | int, prompt: int = 2, limit: int = 99, rows: int = 1) -> Prefixes:
    """Return so many rows of a text, each with the same tree after it, or a chain of one token."""
    text = [9] * prompt + TOKENIZER.encode(written, add_special_tokens=False)
    tree = chain(torch.tensor([[tree]])) if isinstance(tree, int) else tree
    where = [torch.tensor([each] * rows) for each in (len(text) - 1, prompt, limit)]
    parts = (torch.cat([x] * rows) for x in (tree.tokens, tree.parents, tree.depth, tree.ancestors))
    return Prefixes(torch.tensor([text + [11] * 9] * rows), *where, Tree(*parts, tree.levels, tree.width), len(text))


def test_another_rank_forbids_nothing_and_gives_a_text_up_with_rank_0():
    texts = [GuidedText(Grammar.of_first_rank(GrammarSource.from_spec({"regex": "ab"})), [EOS]) for _ in range(2)]
    ranks = SimpleNamespace(from_first=lambda errors: [None, "given up"])
    tree, scores = random_tree("a", torch.Generator().manual_seed(0)), torch.randn(3, 16, VOCAB)
    assert RowGrammars([texts[0], None, texts[1]], ranks)(scores, prefixes_of("a", tree, prompt=3, rows=3)) is scores
    assert [text.error for text in texts] == [None, "given up"]


def test_every_node_that_can_be_reached_is_masked_for_its_own_text():
    grammar, random = Grammar({"regex": "(ab|ba|c){0,4}|aab*"}, TOKENIZER), torch.Generator().manual_seed(0)
    state, one = GuidedText(grammar, [EOS]), OneText([grammar])
    rows, reached = RowGrammars([None, state, None]), 0
    # A text that goes on, one that was put back, another one in its place, one that broke the grammar, the first again.
    for written in ["", "a", "ab", "abba", "ab", "", "aabb", "cc", "ab", "abc"]:
        for _ in range(4):
            tree, scores = random_tree(written, random), torch.randn(3, 16, VOCAB)
            whole, before = prefixes_of(written, tree, prompt=3, rows=3), scores.clone()
            got = rows(scores, whole)
            assert torch.equal(scores, before)
            assert got.shape == scores.shape
            assert torch.equal(got[[0, 2]], scores[[0, 2]])  # free rows
            for node in range(16):
                text = TOKENIZER.encode(written, add_special_tokens=False) + path_to(tree, node)
                if EOS in text or not start(grammar).consume_tokens(text):
                    assert torch.equal(got[1, node], scores[1, node])
                    continue
                reached += 1
                kept = set((got[1, node] > -math.inf).nonzero().flatten().tolist())
                assert kept == set(one.allowed(grammar, text))
            grown = rows(scores[:, 11:], replace(whole, tree=whole.tree.last_level(5)))
            assert torch.equal(grown, got[:, 11:])  # as a draft model asks, level by level
            short = rows(scores, replace(whole, limit=whole.length + 3))
            assert torch.equal(short, torch.where((tree.depth < 2).T, got, scores))  # nothing is drawn past the limit
            assert state.error is None
    assert reached > 150


def path_to(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    return path


def test_rows_that_ended_or_reached_their_limit_are_left_alone():
    rows = RowGrammars([GuidedText(Grammar({"regex": "ab"}, TOKENIZER), [EOS])])
    scores = torch.randn(1, 1, VOCAB)
    done = prefixes_of("ab", EOS)
    done.tokens[0, 4], done.length[0] = EOS, 4
    assert torch.equal(rows(scores, done), scores)
    assert rows.of_rows[0].ended
    assert rows.of_rows[0].error is None
    assert torch.equal(rows(scores, prefixes_of("a", 70, limit=3)), scores)
    assert not torch.equal(rows(scores, prefixes_of("a", 70, limit=4)), scores)
    for others in ([None, rows.of_rows[0]], []):  # of a row that is not in this step
        rows.of_rows[:] = others
        assert torch.equal(rows(scores, prefixes_of("a", 70)), scores)


def test_a_text_that_broke_its_grammar_may_only_end():
    rows = RowGrammars([GuidedText(Grammar({"regex": "ab"}, TOKENIZER), [EOS])])
    got = rows(torch.randn(1, 1, VOCAB), prefixes_of("ax", 93))
    assert (got[0, 0] > -math.inf).nonzero().tolist() == [[EOS]]
    assert rows.of_rows[0].error == "grammar: given up after 2 tokens: it does not allow what was written"


def test_a_free_row_without_any_token_left_stays_as_it_is():
    rows = RowGrammars([None, GuidedText(Grammar({"regex": "ab"}, TOKENIZER), [EOS])])
    got = rows(torch.full((2, 1, VOCAB), -math.inf), prefixes_of("a", 70, rows=2))
    assert (got[0] == -math.inf).all()
    assert got[1, 0].argmax() == 71


def test_a_matcher_that_came_to_a_limit_is_replaced_by_one_that_did_less():
    state = GrammarState(compiled(GrammarSource.from_spec({"regex": "[ab]*"})), [EOS])

    def ask(text: list[int], drafted: int) -> dict[int, bytes]:
        state.advance(text)
        return state.masks([text[-1], drafted], [-1, 0], 2)

    expected = ask([70, 71], 71)
    assert len(expected) == 2
    for text, draft in (([70, 71], 71), ([70, 71, 71, 70], 70)):
        assert not state.matcher.consume_token(93)
        assert state.matcher.is_error()
        assert ask(text, draft) == expected
        assert state.error is None


def test_a_grammar_does_not_wear_out(monkeypatch):
    monkeypatch.setattr("redrafter.grammar.limits.MAX_LEXER_STATES", 200)  # a text alone makes tens
    grammar, random = (
        compiled(GrammarSource.from_spec({"regex": "([ab]{0,30}a){20}"})),
        torch.Generator().manual_seed(0),
    )
    for _ in range(30):
        state, text = GrammarState(grammar, [EOS]), []
        for _ in range(12):
            state.advance(text)
            mask = state.masks([0], [-1], 1)[0]
            allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1 and token != EOS]
            if not allowed:
                break
            text.append(allowed[int(torch.randint(len(allowed), (), generator=random))])
        assert state.error is None
    assert grammar.age > 0


def test_a_grammar_that_takes_too_long_ends_the_text(monkeypatch):
    monkeypatch.setattr("redrafter.grammar.limits.MASK_CPU_SECONDS", 0)
    monkeypatch.setattr("redrafter.grammar.limits.MASK_CPU_SECONDS_PER_TOKEN", 0)
    state = GrammarState(compiled(GrammarSource.from_spec(GROWING)), [EOS])
    state.advance([70])
    assert len(state.masks([70], [-1], 1)) == 1
    assert re.fullmatch(r"grammar: given up after 1 tokens: its masks took 0\.\d s", state.error)
    [mask] = state.masks([70], [-1], 1).values()
    assert int.from_bytes(mask, "little") == 1 << EOS


GROWING = {"regex": "(.{0,1000}){1000}"}  # every token makes its automaton larger


def test_a_grammar_that_becomes_too_complex_ends_the_text_and_is_reported(engine):
    with pytest.raises(ArgumentError, match=r"row \d: grammar: given up after \d+ tokens: lexer error: too many"):
        engine.generate(**BATCH, **{**SAMPLED, "max_new_tokens": 200}, grammar=GROWING)


CHAIN = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3500)} | {"3500": {"type": "null"}}
CHAIN_OF_RULES = "".join(f"r{i}: r{i + 1}\n" for i in range(8000))
HOSTILE = {
    "nested quantifiers": ({"regex": "((a+)+)+b"}, None),
    "huge repetition": ({"regex": "a{1000000}"}, "too many expressions"),
    "nested repetition": ({"regex": "((a{1000}){1000}){1000}"}, "too many expressions"),
    "exponential automaton": ({"regex": "(a|b)*a(a|b){200}"}, None),
    "deep parentheses": ({"regex": "(" * 60000 + "a" + ")" * 60000}, "invalid regex"),
    "huge text": ({"regex": "a" * 1000000}, "1000000 characters"),
    "huge enum": ({"json_schema": {"enum": [f"{i}" for i in range(10000)]}}, None),
    "huger enum": ({"json_schema": {"enum": [f"{i}" for i in range(100000)]}}, "characters"),
    "many properties": ({"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}}, "items"),
    "a schema of one megabyte": ({"json_schema": {"type": "string", "description": "x" * 1000000}}, "characters"),
    "recursion without end": ({"json_schema": {"$ref": "#"}}, "no text of this vocabulary"),
    "a tree": ({"json_schema": {"type": "array", "items": {"$ref": "#"}}}, None),
    "a chain of references": ({"json_schema": {"$ref": "#/$defs/0", "$defs": CHAIN}}, None),
    "a chain of rules": ({"lark": "start: r0\n" + CHAIN_OF_RULES + "r8000: /a/"}, None),
    "a chain of EBNF": ({"ebnf": "root ::= a\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000))}, "1000 rules"),
    "deep EBNF": ({"ebnf": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "recursion"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_read_or_refused_in_bounded_time(name):
    spec, wrong = HOSTILE[name]
    begin = time.process_time()
    if wrong is None:
        Grammar(spec, TOKENIZER)
    else:
        with pytest.raises(ArgumentError, match=f"^grammar: .*{wrong}") as caught:
            Grammar(spec, TOKENIZER)
        assert not re.search("\n|<state>|<backtrace>", str(caught.value))
        assert len(str(caught.value)) < 400
    assert time.process_time() - begin < 20  # two where nothing else runs


def test_a_mask_that_would_take_long_is_refused():
    doubling = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(60)) + 'r60: "a" | /./'
    with pytest.raises(ArgumentError, match=r"Too many items \(limit 20000"):  # of llguidance's own limit, 0.4 s
        Grammar({"lark": doubling}, load_tokenizer(boxed_pair()))


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"regx": "a"}, "one of json_schema, json_object, regex, lark, ebnf, choice"),
        ({"regex": "a", "choice": ["b"]}, "one of json_schema"),
        ({}, "one of json_schema"),
        (7, "one of json_schema"),
        ("[a-z]+", r"write \{'regex': ...\}.* around a text that is not JSON"),
        ({"type": "object", "properties": {}}, r"write \{'json_schema': ...\} around a schema"),
        ({"regex": 7}, "a text is needed, got 7"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a[^\\s\\S]"}, "no text of this vocabulary follows it"),
        ({"lark": "start: other"}, "other"),
        ({"ebnf": 'start ::= "a"'}, "No 'root' rule"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "a list of texts"),
        ({"choice": ["a", 1]}, "a text is needed, got 1"),
        ({"json_object": False}, "json_object is true"),
        ({"json_schema": "{"}, "EOF"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json_schema": {"enum": {1, 2}}}, "not JSON serializable"),
        ({"json_schema": {"type": "integer", "enum": ["a"]}}, "[Uu]nsatisfiable"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(engine, spec, wrong):
    with pytest.raises(ArgumentError, match=f"^grammar: .*{wrong}") as caught:
        engine.generate(**BATCH, **GREEDY, grammar=spec)
    assert "\n" not in str(caught.value)


def test_generate_says_what_a_grammar_needs(engine, monkeypatch):
    without = {name: value for name, value in GREEDY.items() if name != "tokenizer"}
    spec, grammar = {"choice": ["a"]}, Grammar({"choice": ["a"]}, TOKENIZER)
    with pytest.raises(ArgumentError, match="tokenizer=tokenizer"):
        engine.generate(**BATCH, **without, grammar=spec)
    assert texts(engine.generate(**BATCH, **without, grammar=grammar)) == ["a"] * 3
    with pytest.raises(ArgumentError, match="2 entries for 6 output rows"):
        engine.generate(**BATCH, **SAMPLED, grammar=[spec, None], num_return_sequences=2)
    with pytest.raises(ArgumentError, match="give eos_token_id"):
        engine.generate(**BATCH, **GREEDY, grammar=spec, eos_token_id=-1)
    with pytest.raises(ArgumentError, match="this tokenizer cannot be used for grammars"):
        Grammar({"choice": ["a"]}, type("Slow", (), {})())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[guided\]' in a checkout"):
        engine.generate(**BATCH, **GREEDY, grammar=spec)


def test_json_is_indented_but_not_for_ever():
    def allowed(schema: object, text: str) -> bool:
        matcher = compiled(GrammarSource.json_schema(schema)).start()
        return matcher.consume_tokens(TOKENIZER.encode(text, add_special_tokens=False)) and matcher.is_accepting()

    data = {"a": [1, {"b": None}], "c": "d"}
    for text in (json.dumps(data), json.dumps(data, indent=8), json.dumps(data, separators=(",", ":"))):
        assert allowed({"type": "object"}, text)
    assert not allowed({"type": "object"}, '{"a":  1}')
    assert not allowed({"type": "object"}, '{"a":\n\n1}')
    assert allowed({"type": "object", "x-guidance": {"whitespace_pattern": " +"}}, '{"a":       1}')


def test_a_step_with_a_grammar_is_not_captured(engine, monkeypatch):
    seen, run = [], engine.scheduler_for
    spy = lambda request, *rest: seen.append(request.rows[0].params) or run(request, *rest)  # noqa: E731
    monkeypatch.setattr(engine, "scheduler_for", spy)
    engine.generate(**BATCH, **GREEDY, grammar={"choice": ["a"]})
    engine.generate(**BATCH, **GREEDY)
    assert [params.asks_host for params in seen] == [True, False]


@pytest.mark.variant
def test_the_boxed_pair_writes_what_a_schema_says():
    tokenizer = load_tokenizer(boxed_pair())
    tokenizer.padding_side = "left"
    pair = ReDrafter.from_pretrained(boxed_pair())
    batch = tokenizer(["A record of a person:\n", "Once upon a time"], return_tensors="pt", padding=True)
    grammar, width = Grammar({"json_schema": PERSON}, tokenizer), batch.input_ids.shape[1]
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 1}):
        how |= {"max_new_tokens": 60, "grammar": grammar}
        out = pair.generate(**batch, **how, return_dict_in_generate=True)
        assert torch.equal(out.sequences, pair.generate(**batch, **how, speculate=False))
        people = [json.loads(tokenizer.decode(row, skip_special_tokens=True)) for row in out.sequences[:, width:]]
        assert all(set(person) == {"name", "age"} and person["age"] <= 150 for person in people)
        assert out.stats.tokens_per_step > 1
