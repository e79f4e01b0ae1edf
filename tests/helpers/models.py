"""Tiny targets of many architectures, and a proposer whose drafts are always right or always wrong."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from redrafter import DrafterConfig, Engine, RecurrentDrafter, ReDrafter
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.kv_cache import stored_as
from redrafter.cache.paged import KVCachePool
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.proposer import State
from redrafter.engine.options import EngineOptions
from redrafter.model.passed_tests import passed_tests
from redrafter.model.supported import Support
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.paged_memory import PagedMemory, prepare
from redrafter.tree.sizes import TreeShape
from redrafter.tree.token_tree import Tree, tree_of

VOCAB, HIDDEN, CONTEXT = 97, 32, 96

DRAFTER_ALONE = EngineOptions(draft_from_text=False)  # trees have the drafter's nodes and no copied ones


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # wide enough that the top two logits are seldom near a tie
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


_SLIDING = {"sliding_window": 6, "head_dim": 8}


_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


# model type -> what differs from the common shape
ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": _SLIDING,
    "gemma2": _SLIDING | {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": _SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt2": {},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "gpt_oss": _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": None},
    "deepseek_v3": _LATENT,
}


CHUNKED = {  # of a Llama 4 whose layers attend within chunks
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 6,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "head_dim": 8,
}


def tiny_model(model_type: str, **changes: object) -> PreTrainedModel:
    """Make a random model of an architecture, in fp32; each architecture has a seed of its own."""
    shape = _COMMON | ARCHITECTURES.get(model_type, {}) | changes
    if shape.get("layer_types", "") is None:
        del shape["layer_types"]
    torch.manual_seed(sum(map(ord, model_type)))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).float().eval()


def with_spread_weights(model: PreTrainedModel, spread: float = 0.2) -> PreTrainedModel:
    """Make all matrices and embeddings of a model random with that spread, so that its attention is not even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model


def tiny_drafter(**changes: object) -> RecurrentDrafter:
    """Make a drafter for the tiny targets, with random weights."""
    torch.manual_seed(7)
    return RecurrentDrafter(DrafterConfig(**({"vocab_size": VOCAB, "hidden_size": HIDDEN} | changes))).eval()


def uneven_batch(rows: int = 4, longest: int = 11, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts of unequal length, `[B, P]`, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : (3 * row) % (longest - 1)] = 0
    return ids * mask, mask


def prompts_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts of these lengths and their mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return torch.randint(3, VOCAB, mask.shape, generator=generator) * mask, mask


@dataclass
class Scripted:
    """A proposer of `beams` x `depth` trees whose first beam follows each row's script `[B, T]`.

    With an `offset` that is added to every scripted token, drafts are never right.
    """

    script: Tensor
    beams: int
    depth: int
    offset: int = 0

    model = shared_nodes = sizes = without_text = None

    @property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to."""
        return self.nodes

    @property
    def nodes(self) -> int:
        """N, the nodes of the tree."""
        return 1 + self.beams * self.depth

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: None = None, draft_cache: None = None
    ) -> Tree:
        """Return a tree whose first beam follows the script."""
        rows, script = len(state.length), script_of_rows(self.script, state)
        index = state.length[:, None] + 1 + torch.arange(self.depth)
        scripted = script.gather(1, index.clamp(max=self.script.shape[1] - 1)) + self.offset  # [B, K]
        beam = torch.arange(self.beams)
        level = (scripted[:, :, None] + beam) % VOCAB  # [B, K, W]; siblings differ
        tokens = torch.cat([state.pending, level.flatten(1)], dim=1)
        node = torch.arange(self.nodes)
        depth = (node + self.beams - 1) // self.beams
        parents = torch.where(depth <= 1, 0, 1 + (depth - 2) * self.beams)  # all hang on the first beam
        return tree_of(tokens, parents.expand(rows, -1), depth.expand(rows, -1), self.depth)


def script_of_rows(script: Tensor, state: State) -> Tensor:
    """Return the line of a script `[lines, T]` that agrees with each row's text in most tokens; rows change places."""
    width = min(script.shape[1], state.tokens.shape[1])
    same = state.tokens[:, None, :width] == script[:, :width]  # [B, lines, T]
    known = torch.arange(width) <= state.length[:, None, None]
    return script[(same & known).sum(dim=-1).argmax(dim=1)]


def row_texts(sequences: Tensor, mask: Tensor) -> Tensor:
    """Return output sequences `[B, L]` by each row's own position, without their left padding `mask` `[B, P]`."""
    pads = (mask == 0).sum(dim=1)
    index = (torch.arange(sequences.shape[1]) + pads[:, None]).clamp(max=sequences.shape[1] - 1)
    return sequences.gather(1, index)


def assert_close_by_scale(found: Tensor, expected: Tensor, part: float) -> None:
    """Fail unless all numbers agree to `part` of the largest of them.

    Another order of summation, as on another CPU or with another BLAS, changes a sum in proportion to its terms and not
    to the sum, which may be near 0: in float32 by up to 100 * 2**-24 of the largest number here.
    """
    torch.testing.assert_close(found, expected, rtol=0, atol=part * float(expected.detach().abs().max()))


def bound(model: PreTrainedModel) -> Target:
    """Bind a model; one that equals another that has passed its self-test in this run is not tested again."""
    if not isinstance(model, PreTrainedModel) or model.device.type == "meta":  # compiled as a whole, or without weights
        return Target(model)
    numbers = (x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in model.state_dict().values())
    weights = ("weights", *(crc32(number) for number in numbers))
    return Target(model, passed=passed_tests(model, [weights], {}))


def with_tree(model: PreTrainedModel, drafter: DrafterModel, beams: int, depth: int, nodes: int = 999) -> ReDrafter:
    """Make an engine that drafts trees of `beams` x `depth` with a drafter, cut to the `nodes` best nodes."""
    return ReDrafter(bound(model), drafter, TreeShape(beams, depth, nodes), options=DRAFTER_ALONE)


def engine_with_config(**settings: object) -> tuple[ReDrafter, PreTrainedModel]:
    """Return an engine of a fresh model whose checkpoint's generation config says this, and the model."""
    model = tiny_model("llama")
    model.generation_config.update(**settings)
    return with_tree(model, tiny_drafter(), 3, 3), model


def memory_with_host(engine: Engine, stores: list[KVCachePool], host_blocks: int) -> PagedMemory:
    """Return the paged memory of an engine's models, with so many blocks on the host."""
    memory = PagedMemory(engine.target, *stores)
    if host_blocks:
        host = HostBlocks(stores if engine.draft_vocabulary is None else stores[:1], host_blocks)
        memory = PagedMemory(engine.target, stores[0], stores[1] if len(stores) > 1 else None, host)
    return memory


def new_pool(engine: Engine, model: Target, blocks: int) -> KVCachePool:
    """Return memory for keys and values of an engine's target or draft model, in the format that its options name."""
    shapes = stored_as(model.paged_shapes, engine.options.kv_dtype)
    return KVCachePool(shapes, blocks, prefix_states=engine.options.max_prefix_states)


def paged(engine: Engine, blocks: int = 200, host_blocks: int = 0) -> Engine:
    """Let an engine work as on a GPU, on a paged cache, with the slow reference of attention; return it."""
    models = [engine.target] if engine.draft_model is None else [engine.target, engine.draft_model]
    stores = [new_pool(engine, model, blocks) for model in models]
    engine.memory = memory_with_host(engine, stores, host_blocks)
    with torch.inference_mode():
        for model, store in zip(models, stores, strict=True):
            model.varlen = Support()
            prepare(model, store, compile=False)
    return engine


def check_texts(*engines: Engine, rows: int = 4, longest: int = 11, new_tokens: int = 14) -> None:
    """Fail unless engines of one model write what `model.generate` does, and draw the same with drafts as without."""
    ids, mask = uneven_batch(rows, longest)
    greedy, sampled = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
    new = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    drawn = engines[0].generate(ids, mask, speculate=False, **sampled, **new)
    expected = engines[0].model.generate(ids, attention_mask=mask, **greedy, **new)
    for engine in engines:
        for speculate in (True, False):
            assert torch.equal(engine.generate(ids, mask, speculate=speculate, **greedy, **new), expected)
        assert torch.equal(engine.generate(ids, mask, **sampled, **new), drawn)


def in_threads(work: Callable[[int], Tensor], count: int) -> list[Tensor]:
    """Call `work(0)` to `work(count - 1)` at once, each in a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def scripted_engine(model: PreTrainedModel, script: Tensor, beams: int, depth: int, offset: int = 0) -> Engine:
    """Make an engine whose drafts follow a script; see `Scripted`."""
    return Engine(bound(model), Scripted(script, beams, depth, offset))
