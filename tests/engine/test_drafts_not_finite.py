"""Drafts at which the target computes no finite number: what does not see them is computed as without them."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from helpers.generation import ON_BOTH_CACHES
from helpers.models import Scripted, assert_close_by_scale, row_texts, tiny_model, uneven_batch
from helpers.recurrent import recurrent_model
from helpers.steps import read_prompts, verify
from redrafter import Engine
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain, tree_of

BAD = 90  # a token in no prompt, which is never drawn and whose embedding is no number
TABLE = torch.tensor([[1, 2, 3]], dtype=torch.int32)
IDS, MASK = uneven_batch()
IDS = IDS.where(IDS != BAD, 5)
GREEDY, SAMPLED = ({"max_new_tokens": 16, "logit_bias": {BAD: -1e9}, **how} for how in
                   ({"do_sample": False}, {"do_sample": True, "seed": 3}))  # fmt: skip


@dataclass
class OneBadDraft(Scripted):
    """Drafts what will be written, and the bad token as the last node of the tree; nothing in every third step."""

    steps: int = 0

    def propose(self, state, *args, **kwargs):
        self.steps += 1
        if not self.steps % 3:
            return chain(state.pending)  # which reads the slots that a bad draft was in
        tree = super().propose(state, *args, **kwargs)
        tokens = tree.tokens.clone()
        tokens[:, -1] = BAD
        return replace(tree, tokens=tokens)


def spoil(model, number=torch.nan):
    model.get_input_embeddings().weight.data[BAD] = number


def make(architecture):
    if architecture == "eager":
        model = tiny_model("llama")
        model.set_attn_implementation("eager")
    elif architecture in ("lfm2", "qwen3_next"):
        model = copy.deepcopy(recurrent_model(architecture))
    else:
        model = tiny_model(architecture)
    model.generation_config.eos_token_id = None
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not that of the embedding
    return model


@ON_BOTH_CACHES
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "architecture", ["llama", "eager", "gemma2", "gpt_oss", "gemma3_text", "deepseek_v3", "gpt2", "lfm2", "qwen3_next"]
)
def test_a_draft_that_is_not_finite_ends_no_text(architecture, beams, on):
    model = make(architecture)
    engine = Engine(Target(model), OneBadDraft(IDS, 1, 1))
    plain = [engine.generate(IDS, MASK, speculate=False, **how) for how in (GREEDY, SAMPLED)]
    script = torch.cat([row_texts(texts, MASK) for texts in plain])
    engine = on(Engine(Target(model), OneBadDraft(script, beams, 3)))
    spoil(model)
    for texts, how in zip(plain, (GREEDY, SAMPLED), strict=True):
        out = engine.generate(IDS, MASK, **how, return_dict_in_generate=True)
        assert torch.equal(out.sequences, texts)
        assert out.stats.accepted > 16  # the others are kept


@ON_BOTH_CACHES
def test_prompts_whose_padding_is_not_finite_are_read(on):
    """Padding is token 0. No token is it, and rows are padded on a dense cache."""
    model = make("llama")
    engine = on(Engine(Target(model), OneBadDraft(IDS, 1, 1)))
    engine.target.prompt_reader.masks = True  # in chunks side by side, as a GPU reads them
    how = GREEDY | {"logit_bias": {0: -1e9}}
    expected = engine.generate(IDS, MASK, speculate=False, **how)
    model.get_input_embeddings().weight.data[0] = torch.nan
    assert torch.equal(engine.generate(IDS, MASK, speculate=False, **how), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("on", ["dense", "paged"])
@torch.inference_mode()
def test_tokens_of_a_prompt_before_one_that_is_not_finite_are_computed(architecture, on):
    """Others may continue that beginning of the prompt."""
    model = make(architecture)
    target = Target(model)
    found = {}
    for bad in (False, True):
        cache = target.new_cache(1) if on == "dense" else PagedCache(KVCachePool(target.paged_shapes, 9), TABLE)
        if on == "dense":
            target.prompt_reader.masks_on_dense = False
            cache.reserve(20)
        spoil(model, torch.nan if bad else 0.1)
        tokens = torch.tensor([[*range(5, 17), BAD, *range(17, 20)]])
        found[bad] = torch.cat(logits_of(target, tokens, cache))
    assert_close_by_scale(found[True][:12], found[False][:12], 2e-6)
    assert found[True][12].isnan().all()
    assert found[True][-1].isnan().all()


def logits_of(target, tokens, cache):
    """Return the logits of each token of a prompt that is read in two parts."""
    shown = []
    read_prompts(
        target, tokens, torch.tensor([tokens.shape[1]]), cache, max_tokens=14, show=lambda *of: shown.append(of[2])
    )
    return shown


@pytest.mark.parametrize("on", ["dense", "paged"])
@torch.inference_mode()
def test_a_node_whose_values_overflow_is_not_finite_and_no_other(on):
    """Its hidden state is finite, so that nothing but its keys and values says so."""
    model, length = make("llama"), torch.tensor([12])
    target, found = Target(model), []
    tree = tree_of(*(torch.tensor([x]) for x in ([3, 4, 5, 6, 7], [0, 0, 0, 1, 2], [0, 1, 1, 2, 2])), 2)
    for overflows in (False, True):
        cache = target.new_cache(1) if on == "dense" else PagedCache(KVCachePool(target.paged_shapes, 9), TABLE)
        if on == "dense":
            cache.reserve(20)
        read_prompts(target, torch.arange(5, 17)[None], length, cache)

        def overflow(module, args, output, overflows=overflows):
            output[:, 1, 3] = torch.inf if overflows else 1.0

        hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(overflow)
        target.follow_changes()
        found.append(verify(target, tree, length, cache)[0][0])
        hook.remove()
    same = [0, 2, 4]  # nodes 1 and 3 see node 1
    assert torch.equal(found[1][same], found[0][same])
    assert found[1][1].isnan().all()
