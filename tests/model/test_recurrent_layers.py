"""Models with recurrent states: trees write what undrafted decoding writes, since states are rolled back."""

from contextlib import nullcontext
from dataclasses import replace
from functools import wraps

import pytest
import torch

from helpers.models import VOCAB, Scripted, row_texts, tiny_drafter, uneven_batch
from helpers.recurrent import RECURRENT, generated_alone, recurrent_model
from helpers.steps import grown_and_whole, read_prompts, verify
from helpers.waits import Waits
from redrafter import DraftTarget, Engine, ReDrafter, UnsupportedError
from redrafter.attention import tree_attention
from redrafter.cache.dense import cache_argument
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.cache.states import StatesOfRows
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.proposer import UNDRAFTED
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.model import traits
from redrafter.model.forward_batch import Prompts
from redrafter.model.lora import LoraWeights
from redrafter.model.target import Target
from redrafter.model.traits import find_mixers
from redrafter.tree.accept import Path
from redrafter.tree.token_tree import chain, tree_of

NEW = 20
IDS, MASK = uneven_batch()
FEW = ("lfm2", "qwen3_next")  # of a convolution alone, and of both kinds of states
# What may differ between one token at a time and many, of the largest number. These two do in transformers itself:
# rounding grows in the one, and the other one's steps do not clamp as its scan does.
ROUNDING = {"nemotron_h": 5e-3, "zamba2": 3e-2}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": [5, 6, 7, 8]}


@pytest.fixture(scope="module", params=RECURRENT)
def target(request):
    return Target(recurrent_model(request.param))


@pytest.fixture(scope="module", params=FEW)
def one_of_few(request):
    return Target(recurrent_model(request.param))


def close(target, found, expected):
    """Tell whether two tensors are equal but for rounding."""
    rounding = ROUNDING.get(target.config.model_type, 2e-4)
    return torch.allclose(found, expected, rtol=0, atol=rounding * float(expected.abs().max()))


def mostly_right(texts, mask):
    """Return a script of which every fifth token is wrong."""
    script = row_texts(texts, mask)
    script[:, ::5] = (script[:, ::5] + 1) % VOCAB
    return script


@pytest.mark.costly
@pytest.mark.parametrize(("rows", "beams", "depth"), [(4, 1, 4), (4, 3, 3), (1, 3, 3)])
def test_texts_are_those_of_plain_decoding(target, rows, beams, depth):
    ids, mask = IDS[:rows], MASK[:rows]
    plain = ReDrafter(target, tiny_drafter(hidden_size=target.hidden_size))
    sampled = SAMPLED | {"seed": SAMPLED["seed"][:rows]}
    drawn = plain.generate(ids, mask, speculate=False, **sampled)
    for arguments, expected in ((GREEDY, generated_alone(target.model, ids, mask, NEW)), (sampled, drawn)):
        engine = Engine(target, Scripted(mostly_right(expected, mask), beams, depth))
        out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
        assert torch.equal(out.sequences, expected)
        assert 0 < out.stats.accepted < out.stats.drafted
        assert torch.equal(engine.generate(ids, mask, speculate=False, **arguments), expected)


@pytest.mark.parametrize("architecture", FEW)
def test_a_commit_of_another_nodes_state_is_seen_in_the_text(monkeypatch, architecture):
    target = Target(recurrent_model(architecture))
    expected = generated_alone(target.model, IDS, MASK, NEW)
    engine = Engine(target, Scripted(mostly_right(expected, MASK), 3, 3))
    commit = StatesOfRows.commit

    def of_the_root(self, length, path, active):
        commit(self, length, Path(torch.zeros_like(path.nodes), path.accepted), active)

    monkeypatch.setattr(StatesOfRows, "commit", of_the_root)
    assert not torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)
    with pytest.raises(UnsupportedError, match="gives other logits for a token tree"):
        Target(recurrent_model(architecture))


# Prompts


@pytest.fixture(params=["one behind the other", "side by side"])
def reader(request, target, monkeypatch):
    """Read prompts in a way that the target can, until the test ends."""
    if request.param == "side by side":
        monkeypatch.setattr(target.prompt_reader, "masks_on_dense", True)
    elif not target.prompt_reader.reads_without_masks(target.new_cache(1)):
        pytest.skip("its attention cannot be replaced")


@pytest.mark.costly
@pytest.mark.usefixtures("reader")
def test_a_prompt_read_in_pieces_leaves_what_it_leaves_whole(target):
    prompts = torch.randint(3, VOCAB, (3, 34), generator=torch.Generator().manual_seed(2))
    length = torch.tensor([30, 7, 16])
    caches, results = [target.new_cache(3) for _ in range(3)], []
    with torch.inference_mode():
        for cache, most in zip(caches, (None, 1, 8), strict=True):
            cache.reserve(32)
            results.append(read_prompts(target, prompts, length, cache, max_tokens=most))
    for pieces, result in zip(caches[1:], results[1:], strict=True):
        for found, expected in zip(result, results[0], strict=True):
            assert close(target, found, expected)
        for key, expected in caches[0].states.store.tensors.items():
            found = pieces.states.store.tensors[key]
            assert close(target, found, expected)
        assert torch.equal(pieces.states.store.position, length)


@torch.inference_mode()
@pytest.mark.parametrize("paged", [False, True])
def test_prompts_are_read_without_a_wait_for_a_gpu(target, paged, monkeypatch):
    """Prompts are read as on a GPU, and in a paged cache one row's states are copied on the way."""
    monkeypatch.setattr(target.prompt_reader, "masks", True)
    monkeypatch.setattr(tree_attention, "HOST_ATTENTION_NAME", tree_attention.ATTENTION_NAME)
    if paged and not target.paged.ok:
        pytest.skip("its keys and values are not paged")
    tokens, caches = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2)), []
    waits = Waits()
    monkeypatch.setattr(tree_attention, "gathered_attention", waits.elsewhere(tree_attention.gathered_attention))
    for reading in (nullcontext(), waits):
        cache = target.new_cache(2)
        cache.reserve(16)
        if paged:
            table, home = torch.tensor([[1], [2]]).int(), torch.tensor([1, 2])
            cache = PagedCache(KVCachePool(target.paged_shapes, 3), table, home, {0: {7: 3}})
        read_prompts(target, tokens, torch.tensor([4, 1]), cache)
        with reading:
            target.prefill(Prompts(tokens, [4, 1], [12, 6], cache), max_tokens=9)
            cache.states.forget([1])
        caches.append(cache.states.store)
    found = [states.position[:4].tolist() for states in caches]
    assert found == [[0, 12, 0, 7] if paged else [12, 0]] * 2
    for key, expected in caches[0].tensors.items():
        assert torch.equal(caches[1].tensors[key], expected)


# Trees


def test_a_tree_that_is_grown_level_by_level_equals_the_whole(target):
    def new_cache():
        cache = target.new_cache(3)
        cache.reserve(32)
        return cache

    for grown, expected in zip(*grown_and_whole(target, new_cache), strict=True):
        assert close(target, grown, expected)


def bound_without_outer_linears(model, monkeypatch):
    """Return a target whose mixers compute their linear layers level by level."""
    with monkeypatch.context() as patch:
        found = lambda *args: [replace(mixer, first_linears=(), last_linear=None) for mixer in find_mixers(*args)]  # noqa: E731
        patch.setattr(traits, "find_mixers", found)
        return Target(model)


# Two trees of seven nodes, and the committed tokens of their rows.
TOKENS, LENGTH = torch.arange(14).view(2, 7) * 5 % VOCAB + 3, torch.tensor([5, 3])
PARENTS, DEPTH = torch.tensor([[0, 0, 0, 1, 2, 3, 3]] * 2), torch.tensor([[0, 1, 1, 2, 2, 3, 3]] * 2)
TREE = tree_of(TOKENS, PARENTS, DEPTH, 3)


def logits_of_a_tree(target):
    cache = target.new_cache(2)
    cache.reserve(16)
    with torch.inference_mode():
        read_prompts(target, TOKENS + 7, LENGTH, cache)
        return verify(target, TREE, LENGTH, cache)[0]


def test_weights_of_those_layers_are_read_once_a_tree(one_of_few, monkeypatch):
    model = one_of_few.model
    with torch.no_grad():
        mixers = find_mixers(model, model.config, torch.arange(8), "it")
    other = bound_without_outer_linears(model, monkeypatch)
    products, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: products.append(args) or linear(*args))
    logits_of_a_tree(one_of_few)
    count, levels = len(products), 4
    logits_of_a_tree(other)
    assert len(products) - 2 * count == (levels - 1) * sum(1 + len(mixer.first_linears) for mixer in mixers)


def test_rows_that_stand_still_keep_their_states(one_of_few):
    cache = one_of_few.new_cache(2)
    cache.reserve(16)
    length, tokens = torch.tensor([5, 5]), torch.arange(10).view(2, 5) + 3
    with torch.inference_mode():
        read_prompts(one_of_few, tokens, length, cache)
        before = {key: x.clone() for key, x in cache.states.store.tensors.items()}
        verify(one_of_few, chain(tokens[:, :3]), length, cache)
        path = Path(torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([2, 2]))
        cache.states.commit(length, path, torch.tensor([False, True]))
    for key, state in cache.states.store.tensors.items():
        assert torch.equal(state[0], before[key][0])
        assert not torch.equal(state[1], before[key][1])
    assert cache.states.store.position.tolist() == [5, 8]


# The model


def test_a_forward_leaves_nothing_on_the_model(one_of_few):
    engine = Engine(one_of_few, WithPromptLookup(UNDRAFTED, 4, 2))
    engine.generate(IDS, MASK, **GREEDY)
    assert not [name for name, module in one_of_few.model.named_modules() if "forward" in vars(module)]


def test_a_layer_that_goes_on_wrongly_is_refused_by_name(monkeypatch):
    model = recurrent_model("lfm2")
    mixer = model.model.layers[2].conv
    forward, name = mixer.forward, cache_argument(mixer.forward)

    @wraps(forward)
    def forgetful(hidden_states, **arguments):
        return forward(hidden_states, **arguments | ({name: None} if hidden_states.shape[1] == 1 else {}))

    monkeypatch.setattr(mixer, "forward", forgetful)
    with pytest.raises(
        UnsupportedError, match=r"layer 2 of Lfm2ForCausalLM \(Lfm2ShortConv\) continues from its state"
    ):
        Target(model)


ELSEWHERE = "{} layers, and does not keep their state in transformers' cache"
REFUSED = {
    "recurrent_gemma": ELSEWHERE.format("linear_attention"),
    "rwkv": ELSEWHERE.format("recurrent"),
    "xlstm": ELSEWHERE.format("recurrent"),
    "minimax": "MiniMax uses cache of its own",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_states_that_are_not_in_the_cache_are_refused_with_the_reason(architecture):
    with pytest.raises(UnsupportedError, match=REFUSED[architecture]):
        Target(recurrent_model(architecture))


def test_adapters_and_images_are_refused(one_of_few):
    with pytest.raises(UnsupportedError, match=r"layers with recurrent states exclude each other.*merge"):
        one_of_few.adapters.load("mine", LoraWeights("mine", {}), 1, 8)
    assert not one_of_few.images.support.ok


def test_a_draft_model_with_states_and_another_tokenizer_is_refused(one_of_few):
    ids = torch.arange(VOCAB)
    vocabulary = VocabularyMap(ids[:, None], torch.ones_like(ids), ids, ids >= 0)
    with pytest.raises(UnsupportedError, match="another tokenizer and layers with recurrent states"):
        DraftTarget(one_of_few, one_of_few, vocabulary=vocabulary)
