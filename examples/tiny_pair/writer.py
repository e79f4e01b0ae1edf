"""Write thousands of texts at once with a stock Llama: one step a token, replayed as a CUDA graph.

The library's engine serves prompts of any kind; this writes rows of one length and nothing else, and needs no more
than a step without branches.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

SPAN = 128  # tokens between graphs: each attends to the slots up to the end of its own span, and to none beyond


class Writer:
    """Continues the prompts of a batch of rows, greedily or at a temperature, past any end token.

    Args:
        model: The model, in eval mode.
        rows: B, texts written at once.
        length: Tokens of a text, its prompt included.
    """

    def __init__(self, model: LlamaForCausalLM, rows: int, length: int) -> None:
        config, device, dtype = model.config, model.device, model.dtype
        self.model, self.length = model, length
        slots = (rows, config.num_key_value_heads, length, config.head_dim)
        self.cache = [
            (torch.zeros(slots, device=device, dtype=dtype), torch.zeros(slots, device=device, dtype=dtype))
            for _ in model.model.layers
        ]
        positions = torch.arange(length, device=device)[None]
        self.rotations = model.model.rotary_emb(torch.zeros(1, device=device, dtype=dtype), positions)  # [1, S, d] both
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.prompt_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        prepare = self._capture if device.type == "cuda" else partial
        with torch.inference_mode():
            self.steps = [prepare(self._step, min(end, length)) for end in range(SPAN, length + SPAN, SPAN)]

    @torch.inference_mode()
    def write(self, prompts: Tensor, prompt_lengths: Tensor, temperature: Tensor) -> Tensor:
        """Continue prompts until all rows are full.

        Args:
            prompts: Token ids, `[B, P]`, of which each row has its own number.
            prompt_lengths: Tokens of each prompt, `[B]`, from 1 to P.
            temperature: Temperature of each row, `[B]`; 0 is greedy.

        Returns:
            The texts, their prompts included, `[B, length]` int64.
        """
        self.tokens[:, : prompts.shape[1]] = prompts
        self.prompt_lengths.copy_(prompt_lengths)
        self.temperature.copy_(temperature)
        self.position.zero_()
        for position in range(self.length - 1):
            self.steps[position // SPAN]()
        return self.tokens.clone()

    def _step(self, end: int) -> None:
        """Read the token at `position`, write the next one unless the prompt has it, and move on.

        Args:
            end: Slots of the cache that are read; those behind `position` are masked.
        """
        model, position = self.model.model, self.position
        x = model.embed_tokens(self.tokens.index_select(1, position)[:, 0])  # [B, D]
        cosine, sine = (table.index_select(1, position) for table in self.rotations)  # [1, 1, d] both
        unseen = torch.arange(end, device=x.device) > position  # [end]
        for layer, (keys, values) in zip(model.layers, self.cache, strict=True):
            attention, size = layer.self_attn, keys.shape[-1]
            normed = _norm(layer.input_layernorm, x)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = (project(normed).unflatten(-1, (-1, 1, size)) for project in projections)
            query, key = apply_rotary_pos_emb(query, key, cosine, sine)  # [B, heads, 1, d] both
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            query = query.view(len(x), keys.shape[1], -1, size)  # [B, H, heads / H, d]
            scores = (query @ keys[:, :, :end].transpose(2, 3)).float() * attention.scaling
            weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1).to(x.dtype)
            x = x + attention.o_proj((weights @ values[:, :, :end]).flatten(1))
            x = x + layer.mlp(_norm(layer.post_attention_layernorm, x))
        logits = self.model.lm_head(_norm(model.norm, x)).float()  # [B, V]
        noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()  # of Gumbel
        drawn = (logits + self.temperature[:, None] * noise).argmax(dim=-1)
        following = position + 1
        given = self.tokens.index_select(1, following)[:, 0]
        self.tokens.index_copy_(1, following, torch.where(following < self.prompt_lengths, given, drawn)[:, None])
        position += 1

    def _capture(self, step: Callable[[int], None], end: int) -> Callable[[], None]:
        """Capture a step as a CUDA graph and return the function that replays it."""
        self.position.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(end)  # libraries allocate at their first call, which a graph may not hold
        torch.cuda.current_stream().wait_stream(stream)
        self.position.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(end)
        replay: Callable[[], None] = graph.replay
        return replay


def _norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    """Apply a norm as one kernel."""
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
