"""The proposer for vLLM: that it drafts as our own engine does, and that vLLM's loader and its calls fit it."""

import ast
import inspect
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from redrafter.drafting.prompt_lookup import copy_from, latest_match

EXAMPLES = Path(__file__).parent.parent / "examples"
CopyProposer = runpy.run_path(str(EXAMPLES / "vllm_proposer.py"))["CopyProposer"]


def config(draft_len: int = 4, room: int = 1000, **options: object) -> SimpleNamespace:
    """Return what a proposer reads of a `VllmConfig`."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(model="vllm_proposer.CopyProposer", num_speculative_tokens=draft_len),
        model_config=SimpleNamespace(max_model_len=room),
        additional_config={"redrafter": options} if options else {},
    )


def propose(proposer: object, texts: list[list[int]], sampled: list[list[int]] | None = None) -> list[list[int]]:
    """Call a proposer as vLLM does, with arrays that have another row and tokens after each text."""
    tokens = np.full((len(texts) + 1, max(map(len, texts)) + 3), 7, dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([*map(len, texts), 0], dtype=np.int32)
    return proposer.propose(sampled or [text[-1:] for text in texts], lengths, tokens, slot_mappings=None)


@pytest.mark.parametrize("ngram", [1, 2, 8])
def test_vllm_gets_the_drafts_that_our_own_engine_proposes(ngram):
    choose = random.Random(ngram)
    texts = [[choose.randrange(3 + row % 5) for _ in range(1 + row)] for row in range(60)]
    found = propose(CopyProposer(config(draft_len=5, ngram=ngram, least_match=1)), texts)
    for text, drafts in zip(texts, found, strict=True):
        tokens, last = torch.tensor([text]), torch.tensor([len(text) - 1])
        start, found_tokens = latest_match(tokens, last, ngram)
        if not found_tokens.item():
            assert drafts == []
            continue
        assert drafts == copy_from(tokens, last, start, 5)[0].tolist()
        assert all(type(token) is int for token in drafts)
    assert sum(map(len, found)) > 200


def test_vllm_gets_no_drafts_after_short_matches_without_room_or_in_the_middle_of_a_prompt():
    repeated, once = [1, 2, 3, 1, 2], [1, 2, 3, 4, 2]
    assert propose(CopyProposer(config()), [repeated, once]) == [[3, 1, 2, 3], []]
    assert propose(CopyProposer(config(least_match=1)), [once]) == [[3, 4, 2, 3]]
    assert propose(CopyProposer(config(room=7)), [repeated]) == [[3, 1]]
    assert propose(CopyProposer(config(room=5)), [repeated]) == [[]]
    assert propose(CopyProposer(config()), [repeated, repeated], [[], [2]]) == [[], [3, 1, 2, 3]]


@pytest.mark.parametrize("options", [{"ngrams": 3}, {"ngram": 0, "least_match": 0}, {"ngram": 2, "least_match": 3}])
def test_options_in_vllms_additional_config_are_checked(options):
    with pytest.raises(ValueError, match="needs 1 <= least_match <= ngram"):
        CopyProposer(config(**options))


def test_vllm_loads_the_proposer_by_its_name_and_calls_it_with_what_it_takes(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    loader = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer", reason="vLLM is not installed")
    from vllm.config import SpeculativeConfig

    speculative = SpeculativeConfig(model="vllm_proposer.CopyProposer", num_speculative_tokens=4)
    assert speculative.method == "custom_class"
    whole = config()
    whole.speculative_config = speculative
    proposer = loader.create_custom_proposer(whole)
    assert type(proposer).__name__ == "CopyProposer"
    # The call in vLLM's model runner, whose module needs a GPU to be imported.
    source = inspect.getsourcefile(loader).replace("spec_decode/custom_class_proposer", "worker/gpu_model_runner")
    with open(source) as file:
        calls = [node for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "cast(Any, self.drafter).propose")
    keywords = {keyword.arg: None for keyword in call.keywords}
    inspect.signature(proposer.propose).bind(*call.args, **keywords)
    names = [ast.unparse(argument).rsplit(".")[-1] for argument in call.args]
    assert names == [*inspect.signature(proposer.propose).parameters][: len(names)]
