"""Prompts read in several forwards: the same numbers as in one, and no tensor that is as large as a prompt squared."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.generation import same_as_model, same_undrafted
from helpers.models import (
    ARCHITECTURES,
    CHUNKED,
    HIDDEN,
    VOCAB,
    paged,
    tiny_drafter,
    tiny_model,
    uneven_batch,
    with_tree,
)
from helpers.steps import read_prompts, verify
from redrafter import ReDrafter
from redrafter.attention.prompt_attention import Piece, cut_prompts
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape
from redrafter.tree.token_tree import chain

LENGTHS = torch.tensor([40, 13, 29])
ALL = [*ARCHITECTURES, "llama4_text"]


def a_target(architecture: str, **changes: object) -> Target:
    """Return a tiny target of that architecture, the one with chunks set up to use them."""
    return Target(tiny_model(architecture, **(CHUNKED if architecture == "llama4_text" else {}), **changes))


def own_attention(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model attention of its own, which does not change with its config."""
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    return model


def a_cache(target: Target, on_pages: bool, rows: int = 3, slots: int = 48) -> object:
    """Return an empty cache: a paged one with its blocks in random order, or a dense one."""
    if on_pages:
        blocks = slots // 16
        table = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(5)).view(rows, blocks).int() + 1
        return PagedCache(KVCachePool(target.paged_shapes, 1 + rows * blocks), table)
    cache = target.new_cache(rows)
    cache.reserve(slots)
    return cache


def read(target: Target, prompts: Tensor, cache: object, **how: object) -> tuple[Tensor, ...]:
    """Return what the last tokens of prompts give, and what one more token gives, which sees all that was stored."""
    with torch.inference_mode():
        last_tokens = read_prompts(target, prompts, LENGTHS, cache, **how)
        return *last_tokens, *verify(target, chain(torch.tensor([[7], [8], [9]])), LENGTHS, cache)


def test_pieces_are_of_one_size_and_leave_nothing_out():
    forwards = cut_prompts([3, 0, 16], [9, 20, 17], max_tokens=10)
    assert forwards == [
        [Piece(0, 3, 9), Piece(1, 0, 3)],
        [Piece(1, 3, 12)],
        [Piece(1, 12, 20), Piece(2, 16, 17)],
    ]
    assert cut_prompts([0], [4], max_tokens=9) == [[Piece(0, 0, 4)]]


def assert_all_close(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("on_pages", [False, True])
@pytest.mark.parametrize("max_tokens", [8192, 17, 3])
def test_a_prompt_read_in_pieces_is_what_one_forward_with_its_mask_reads(
    architecture, on_pages, max_tokens, monkeypatch
):
    target = a_target(architecture)
    reader = target.prompt_reader
    assert reader.reads_without_masks(a_cache(target, False)), "its attention can be replaced"
    if on_pages and not target.paged.ok:
        pytest.skip(target.paged.reason)
    # Some blocks along the edge of a window.
    monkeypatch.setattr("redrafter.attention.prompt_attention.MAX_EDGE_TOKENS", 4)
    monkeypatch.setattr("redrafter.attention.prompt_attention.MAX_SCORES", 500)
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))
    reader.masks_on_dense = True
    expected = read(target, prompts, a_cache(target, False))
    reader.masks_on_dense = False
    monkeypatch.setattr(reader, "_read_chunks", None)  # is not to be called
    assert_all_close(read(target, prompts, a_cache(target, on_pages), max_tokens=max_tokens), expected)


@pytest.mark.parametrize("on_pages", [False, True])
def test_what_the_cache_holds_of_a_prompt_is_read_on_from(on_pages):
    target = a_target("gemma3_text")
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(3))
    expected = read(target, prompts, a_cache(target, on_pages))
    cache = a_cache(target, on_pages)
    with torch.inference_mode():
        read_prompts(target, prompts, torch.tensor([21, 12, 1]), cache)
    assert_all_close(read(target, prompts, cache, starts=torch.tensor([21, 12, 1]), max_tokens=9), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("max_tokens", [8192, 12])
@pytest.mark.parametrize("start", [[0, 0, 0], [21, 12, 1]])
@pytest.mark.parametrize(("mask_numbers", "chunk"), [(0, 16), (3 * 24 * 24, 24)])
def test_prompts_of_unequal_length_are_read_in_chains_without_padding(
    architecture, max_tokens, start, mask_numbers, chunk, monkeypatch
):
    target, starts = a_target(architecture), torch.tensor(start)
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(3))
    expected = read(target, prompts, a_cache(target, False))
    monkeypatch.setattr(target.prompt_reader, "reads_without_masks", lambda cache: False)  # as on a GPU
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_CHUNK_TOKENS", 16)
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_MASK_NUMBERS", mask_numbers)
    cache, tokens, shown = a_cache(target, True), [], [[], [], []]

    with torch.inference_mode():
        if starts.any():
            read_prompts(target, prompts, starts, cache)
        hook = target.embedding.register_forward_hook(lambda module, ids, out: tokens.append(out.shape[-2]))
        counts = (LENGTHS - starts).tolist()
        how = {"starts": starts, "max_tokens": max_tokens}
        last = read_prompts(target, prompts, LENGTHS, cache, **how)
        hook.remove()
        assert sum(tokens) < sum(counts) + TOKEN_MULTIPLE * len(tokens)
        assert len(tokens) == -(-max(counts) // min(chunk, max_tokens // 3 if sum(counts) > max_tokens else chunk))
        last += verify(target, chain(torch.tensor([[7], [8], [9]])), LENGTHS, cache)
        read_prompts(target, prompts, LENGTHS, cache, **how, show=lambda row, first, logits: shown[row].append(logits))
    assert_all_close(last, expected)
    assert [len(torch.cat(logits)) for logits in shown] == counts
    assert_all_close(tuple(torch.cat(logits)[-1] for logits in shown), tuple(expected[0]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("max_tokens", [12, 3])
def test_a_prompt_of_many_chunks_is_read_as_one(masked, max_tokens):
    model = tiny_model("mistral")
    target = Target(own_attention(model) if masked else model)
    assert target.prompt_reader.reads_without_masks(a_cache(target, False)) is not masked
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(4))
    expected = read(target, prompts, a_cache(target, False))
    assert_all_close(read(target, prompts, a_cache(target, False), max_tokens=max_tokens), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_with_attention_of_its_own_is_read_with_masks(attention):
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    engine = ReDrafter(Target(own_attention(model)), tiny_drafter(), TreeShape(4, 3))
    assert not engine.target.prompt_reader.reads_without_masks(engine.target.new_cache(1))
    assert "cannot be replaced" in engine.target.paged.reason
    same_as_model(engine, *uneven_batch(), max_new_tokens=12)
    same_undrafted(engine, *uneven_batch(), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text"])
@pytest.mark.parametrize("on_pages", [False, True])
def test_texts_of_prompts_read_in_pieces_are_those_of_model_generate(architecture, on_pages, monkeypatch):
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_FORWARD_TOKENS", 9)
    monkeypatch.setattr("redrafter.attention.prompt_attention.MAX_EDGE_TOKENS", 3)
    engine = with_tree(a_target(architecture).model, tiny_drafter(), 4, 3)
    if on_pages and not engine.target.paged.ok:
        pytest.skip(engine.target.paged.reason)
    engine = paged(engine) if on_pages else engine
    same_as_model(engine, *uneven_batch(longest=31), max_new_tokens=12)
    same_undrafted(engine, *uneven_batch(longest=31), max_new_tokens=12, do_sample=False)


def test_half_precision_is_read_in_pieces_as_in_one():
    target = Target(tiny_model("llama").bfloat16())
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(6))
    whole, *_ = read(target, prompts, a_cache(target, False))
    cut, *_ = read(target, prompts, a_cache(target, False), max_tokens=7)
    assert cut.dtype == torch.bfloat16
    assert (cut - whole).float().std() < 0.05 * whole.float().std()


class _Largest(TorchDispatchMode):
    """Counts the bytes of the largest tensor that is made, views of earlier ones aside."""

    def __init__(self, known: Iterator[Tensor]):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "llama4_text"])
@pytest.mark.parametrize("on_pages", [False, True])
def test_no_tensor_of_a_prefill_grows_with_the_square_of_the_prompt(architecture, on_pages, monkeypatch):
    max_tokens, prompt = 64, 1024
    monkeypatch.setattr("redrafter.attention.prompt_attention.MAX_EDGE_TOKENS", 16)
    monkeypatch.setattr("redrafter.attention.prompt_attention.MAX_SCORES", 4096)
    target = a_target(architecture, max_position_embeddings=prompt)
    if on_pages and not target.paged.ok:
        pytest.skip(target.paged.reason)
    cache = a_cache(target, on_pages, rows=2, slots=prompt)
    pools = cache.pools
    keys = prompt * max(shape.heads * max(shape.key_dim, shape.value_dim) for shape in target.shapes)
    ids, length = torch.randint(3, VOCAB, (2, prompt)), torch.tensor([prompt, prompt // 2])
    with torch.inference_mode(), _Largest(iter([*target.model.parameters(), *pools])) as largest:
        read_prompts(target, ids, length, cache, max_tokens=max_tokens)
    # Tokens of a forward, each with what the widest layer makes of it; on pages, the keys of one row beside each other.
    widest = max(parameter.shape[0] for parameter in target.model.parameters())
    assert largest.bytes <= 4 * max(keys if on_pages else 0, max_tokens * max(widest, 8 * HIDDEN), 4 * prompt, 4096)
    assert largest.bytes >= 4 * max_tokens * HIDDEN  # it sees what is made
