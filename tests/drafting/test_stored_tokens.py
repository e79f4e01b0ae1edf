"""Check that functions which compute what drafters store of tokens are compiled once, for one token and for many."""

from typing import Any

import pytest
import torch

from helpers.dflash import random_block_drafter
from helpers.eagle import random_head
from helpers.models import DRAFTER_ALONE, paged, prompts_of, tiny_drafter, tiny_model
from helpers.mtp import FORMS, random_mtp
from redrafter import ReDrafter
from redrafter.drafting import drafter_model
from redrafter.model.target import Target


@pytest.mark.parametrize(
    ("make", "functions"),
    [
        (random_head, {"_finish", "_carry"}),
        (random_block_drafter, {"_remember"}),
        (lambda: tiny_drafter(context_window=4), {"_remember"}),
        (None, {"remember"}),
    ],
    ids=["EAGLE-3", "DFlash", "recurrent", "MTP"],
)
def test_one_compilation_stores_any_number_of_tokens(make, functions, monkeypatch):
    target = Target(FORMS["mimo"].model() if make is None else tiny_model("llama"))
    drafter = random_mtp(target, FORMS["mimo"]) if make is None else make()
    layer = type(drafter).stored_layer
    monkeypatch.setattr(type(drafter), "stored_layer", lambda self, target, _: layer(self, target, True))
    compiled, compile = list[str](), torch.compile

    def compile_eagerly(function: Any, options: object) -> Any:
        def backend(graph: Any, _: object) -> Any:
            compiled.append(function.__name__)
            return graph.forward

        return compile(function, backend=backend, fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    drafter_model.compile_once.cache_clear()
    torch._dynamo.reset()
    engine = paged(ReDrafter(target, drafter, options=DRAFTER_ALONE))
    ids, mask = prompts_of([9])
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    out = engine.generate(ids, mask, **given, speculate=False)
    assert sorted(compiled) == sorted(functions)
    assert torch.equal(engine.generate(ids, mask, **given), out)
    drafter_model.compile_once.cache_clear()
