"""What a drafter reads of its target is the same to the trainer, to verification and to plain forwards."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from helpers.drafters import FORMS, random_drafter
from helpers.models import (
    ARCHITECTURES,
    CHUNKED,
    HIDDEN,
    VOCAB,
    assert_close_by_scale,
    paged,
    tiny_model,
    uneven_batch,
    with_tree,
)
from helpers.steps import read_prompts, verify
from redrafter import Engine, MismatchError, ReDrafter, UnsupportedError
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.model.forward_batch import decoder_layers
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree, tree_of


def plain_features(model: PreTrainedModel, text: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the hidden states that a drafter reads, `[T, F]`, by `output_hidden_states`.

    The last layer must not be among `layers`: the model tells only what the final norm made of it.
    """
    with torch.no_grad():
        states = model(input_ids=text[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[-1], *(states[layer + 1] for layer in layers)], dim=-1)[0]


def hooks_of(model: nn.Module) -> int:
    """Count the hooks on all modules of a model."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@contextmanager
def out_of_memory(model: Any) -> Iterator[None]:
    """Let forwards fail inside the context, where they must, after most of their layers."""
    broken = Mock(side_effect=RuntimeError("out of memory"))
    with patch.object(model.model.layers[2], "forward", broken), pytest.raises(RuntimeError, match="out of memory"):
        yield


# The trainer's reading


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama4_text"])
def test_texts_that_share_a_row_are_read_as_alone(architecture):
    """Some texts are longer than the windows and chunks of the models that have some."""
    model = tiny_model(architecture, **(CHUNKED if architecture == "llama4_text" else {}))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCAB, (2, 30), generator=generator)
    lengths = [[9, 5, 13, 3], [14, 1, 15, 0]]  # the last of a row is its padding
    segment = torch.stack([torch.arange(4).repeat_interleave(torch.tensor(own)) for own in lengths])
    with Teacher(model, (0, 1)) as teacher:
        packed = teacher.read_batch(rows, segment)
        for row, own in zip(range(2), lengths, strict=True):
            for place, length in zip(torch.tensor([0, *own]).cumsum(0).tolist(), own, strict=False):
                text = slice(place, place + length)
                if length == 0:
                    continue
                alone = teacher.read_batch(rows[row : row + 1, text])
                for name in ("hidden", "embedding", "logits"):
                    assert_close_by_scale(getattr(packed, name)[row, text], getattr(alone, name)[0], 2e-5)
                with torch.no_grad():
                    logits = model(input_ids=rows[row : row + 1, text], use_cache=False).logits[0]
                    embedding = model.get_input_embeddings()(rows[row, text])
                assert_close_by_scale(alone.logits[0], logits, 2e-5)
                assert torch.equal(alone.embedding[0], embedding)
                expected = plain_features(model, rows[row, text], (0, 1))
                assert_close_by_scale(alone.hidden[0], expected, 2e-5)


def test_a_teacher_leaves_nothing_on_the_model():
    model, texts = tiny_model("gemma2").train(), torch.randint(3, VOCAB, (1, 5))
    teacher = Teacher(model, (0, 2))
    attention, before = model.config._attn_implementation, {key: id(value) for key, value in vars(model).items()}
    assert hooks_of(model) == 0
    with teacher:
        assert hooks_of(model) == 4
        teacher.read_batch(texts)
    with pytest.raises(IndexError), teacher:
        teacher.read_batch(torch.full((1, 5), VOCAB))
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == attention
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert not model.training
    with teacher:
        again = teacher.read_batch(texts)
    assert again.hidden.shape == (1, 5, 3 * HIDDEN)
    assert not again.logits.requires_grad


def test_what_runs_the_model_between_readings_is_not_read():
    """A trainer's validation runs the model so, and a reading may fail."""
    model, text = tiny_model("llama"), torch.randint(3, VOCAB, (1, 5))
    with Teacher(model, (0, 1)) as teacher:
        expected = teacher.read_batch(text)
        with out_of_memory(model):
            teacher.read_batch(text)
        assert torch.equal(teacher.read_batch(text).hidden, expected.hidden)
        outputs: list[weakref.ref] = []
        with model.lm_head.register_forward_pre_hook(lambda _, args: outputs.append(weakref.ref(args[0]))):
            model(text)
        assert outputs
        assert all(output() is None for output in outputs)  # what others compute with the model is not kept
        Target(model)
        assert torch.equal(teacher.read_batch(text).hidden, expected.hidden)


# Verification's


def forward_caches(target: Target, rows: int) -> Iterator[object]:
    """Yield an empty cache of each kind."""
    dense = target.new_cache(rows)
    dense.reserve(32)
    yield dense
    yield PagedCache(KVCachePool(target.paged_shapes, 5), torch.tensor([[3, 1], [4, 2]]).int()[:rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_verification_returns_what_the_model_says_of_its_layers(architecture):
    model = tiny_model(architecture)
    target = Target(model)
    target.read_aux_hidden((0, 1))
    lengths, prompts = torch.tensor([9, 6]), (torch.arange(18).view(2, 9) * 7 + 11) % VOCAB
    parents, depth = torch.tensor([0, 0, 0, 1, 2]).expand(2, 5), torch.tensor([0, 1, 1, 2, 2]).expand(2, 5)
    tokens = (torch.arange(10).view(2, 5) * 5 + 3) % VOCAB
    tree, paths = tree_of(tokens, parents, depth, 2), ([0, 1, 3], [0, 2, 4])
    told, first = torch.zeros(2, 5, 3 * HIDDEN), torch.zeros(2, 3 * HIDDEN)
    for row, n in enumerate(lengths.tolist()):
        for path in paths:
            features = plain_features(model, torch.cat([prompts[row, :n], tokens[row, path]]), (0, 1))
            first[row], told[row, path] = features[n - 1], features[n:]
    hooks = hooks_of(model)  # transformers leaves its own
    with torch.inference_mode():
        for cache in forward_caches(target, 2):
            _, prefilled = read_prompts(target, prompts, lengths, cache)
            _, hidden = verify(target, tree, lengths, cache)
            _, some = verify(target, tree, lengths, cache, torch.tensor([3, 0]))
            torch.testing.assert_close(prefilled, first, atol=5e-5, rtol=1e-3)
            torch.testing.assert_close(hidden, told, atol=5e-5, rtol=1e-3)
            torch.testing.assert_close(some, told[[0, 1], [3, 0]][:, None], atol=5e-5, rtol=1e-3)
    assert hooks_of(model) == hooks
    assert target.feature_size == 3 * HIDDEN


def test_a_forward_that_failed_leaves_no_features_to_the_next():
    model, length = tiny_model("llama"), torch.tensor([9])
    target = Target(model)
    target.read_aux_hidden((0, 1))
    prompt = torch.randint(3, VOCAB, (1, 9))
    with torch.inference_mode():
        for cache in forward_caches(target, 1):
            _, expected = read_prompts(target, prompt, length, cache)
            with out_of_memory(model):
                read_prompts(target, prompt, length, cache)
            assert torch.equal(read_prompts(target, prompt, length, cache)[1], expected)


def test_the_output_of_the_last_layer_is_what_the_final_norm_reads():
    """The final norm of a new Llama has a weight of 1; far trials on a paged cache leave out the last of six layers."""
    target = Target(tiny_model("llama", num_hidden_layers=6))
    target.read_aux_hidden((5,))
    assert target.paged.ok, target.paged.reason
    with torch.inference_mode():
        for cache in forward_caches(target, 1):
            _, hidden = read_prompts(target, torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
            torch.testing.assert_close(rms_norm(hidden[:, HIDDEN:], (HIDDEN,), eps=1e-6), hidden[:, :HIDDEN])


@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_of_many_chunks_leaves_the_features_of_its_last_token(masked):
    model, prompts = tiny_model("mistral"), torch.randint(3, VOCAB, (2, 11))
    target = Target(model)
    target.prompt_reader.masks_on_dense = masked
    target.read_aux_hidden((1,))
    cache = target.new_cache(2)
    cache.reserve(16)
    with torch.inference_mode():
        _, hidden = read_prompts(target, prompts, torch.tensor([11, 6]), cache, max_tokens=7)
    expected = [plain_features(model, text, (1,))[-1] for text in (prompts[0], prompts[1, :6])]
    torch.testing.assert_close(hidden, torch.stack(expected), atol=5e-5, rtol=1e-3)


# Which layers


@pytest.mark.parametrize("layers", [(3,), (0, 7), (-1,)])
def test_layers_that_a_target_has_not_are_refused(layers):
    model = tiny_model("llama")
    said = f"reads layer {layers[-1]}; LlamaForCausalLM has 3 layers, from 0 to 2"
    for read in (Target(model).read_aux_hidden, partial(Teacher, model)):
        with pytest.raises(MismatchError, match=said):
            read(layers)


def test_a_target_is_read_by_drafters_of_the_same_layers_alone():
    target = Target(tiny_model("llama"))
    assert target.feature_size == HIDDEN
    for _ in range(2):
        ReDrafter(target, random_drafter(target_layers=(0, 2)))
    for layers in ((), (0, 1)):
        with pytest.raises(MismatchError, match=r"layers \[0, 2\] are read by another drafter"):
            ReDrafter(target, random_drafter(target_layers=layers))


def test_layers_that_stand_in_no_list_are_refused_unless_none_is_wanted():
    model = tiny_model("llama")
    assert decoder_layers(model, 5, ()) == []
    with pytest.raises(UnsupportedError, match="does not hold its 5 layers in a list"):
        decoder_layers(model, 5, (4,))


def test_layers_are_those_of_the_decoder_and_not_of_an_eye_with_as_many():
    text = tiny_model("llama").config.to_dict()
    eye = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    eye |= {"num_hidden_layers": text["num_hidden_layers"], "image_size": 8, "patch_size": 4}
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=eye, text_config=text))
    assert decoder_layers(model, 3, (0, 2)) == [model.model.language_model.layers[index] for index in (0, 2)]


# What is served is what was trained


def engines(model: PreTrainedModel, form: str) -> Iterator[Engine]:
    """Yield an engine with a random drafter of that form, on each kind of cache."""
    drafter = random_drafter(**FORMS[form])
    yield with_tree(model, drafter, 4, 3)
    yield paged(with_tree(model, drafter, 4, 3))


@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 5}])
@pytest.mark.parametrize("form", ["published", "aux_hidden", "all"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_drafts_are_made_from_what_the_trainer_reads(monkeypatch, architecture, form, arguments):
    """Compare the hidden state of every row at every step, and the tree that follows from it."""
    model, propose, changed = tiny_model(architecture), RecurrentProposer.propose, []

    def checked(self: RecurrentProposer, state: State, sampler: Sampler, noise: Tensor | None, *caches: object) -> Tree:
        tree = propose(self, state, sampler, noise, *caches)
        offline = state.hidden.clone()
        for row in state.active.nonzero().flatten().tolist():
            with Teacher(model, self.drafter.config.target_layers) as teacher:
                offline[row] = teacher.read_batch(state.tokens[row : row + 1, : state.length[row] + 1]).hidden[0, -2]
        torch.testing.assert_close(state.hidden[state.active], offline[state.active], atol=1e-4, rtol=1e-3)
        expected = propose(self, replace(state, hidden=offline), sampler, noise, *caches)
        assert torch.equal(tree.tokens[state.active], expected.tokens[state.active])
        assert torch.equal(tree.parents[state.active], expected.parents[state.active])
        offline[:, HIDDEN:] = 0
        blind = propose(self, replace(state, hidden=offline), sampler, noise, *caches)
        changed.append(not torch.equal(tree.tokens[state.active], blind.tokens[state.active]))
        return tree

    monkeypatch.setattr(RecurrentProposer, "propose", checked)
    ids, mask = uneven_batch(rows=3)
    for engine in engines(model, form):
        changed.clear()
        engine.generate(ids, mask, max_new_tokens=8, top_k=0, **arguments)
        assert len(changed) > 3
        assert any(changed) == (form != "published")
