"""Stage `base`: a stock Llama trained from scratch, for as many minutes as it is given.

The schedule follows the clock, so that whatever the machine, the learning rate reaches zero when the time is up. The
weights are stored in bf16, half the bytes, and run in float32 unless asked otherwise: what is measured at the end is
what was saved, loaded as anyone would load it.
"""

import itertools
import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tokens
import torch
import torch.nn.functional as F
from data import prompts, read_rows
from muon import Muon
from recipe import Recipe
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

# Shares of the training in which the learning rate rises from zero, and falls to zero.
WARM_UP_SHARE, DECAY_SHARE = 0.02, 0.6
MAX_LOG_LINES = 25


def build(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Make a Llama with fresh weights.

    Layers that write to the residual stream start smaller, by the square root of their number.
    """
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.base_hidden,
            intermediate_size=recipe.base_intermediate,
            num_hidden_layers=recipe.base_layers,
            num_attention_heads=recipe.base_heads,
            num_key_value_heads=recipe.base_kv_heads,
            head_dim=recipe.base_head_dim,
            max_position_embeddings=recipe.base_positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(writer.weight, std=model.config.initializer_range / (2 * recipe.base_layers) ** 0.5)
    return model.to(recipe.torch_device)


class Windows:
    """Random windows of the training stream, drawn on the device.

    Every window opens with the bos token, as every prompt does. In a conversation source it opens where a conversation
    does, so that the chat format is learnt from its start; in a text it opens anywhere. Documents are not masked from
    each other: the bos token between them says enough.
    """

    def __init__(self, recipe: Recipe, folder: Path, bos: int, length: int) -> None:
        device = recipe.torch_device
        stream, sources = tokens.load(folder, "train")
        start, end, chat = ([source[key] for source in sources.values()] for key in ("start", "end", "chat"))
        self.length = min(length, len(stream))
        self.bos = bos
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)  # [tokens]
        self.documents = (self.stream == bos).nonzero().flatten()  # [documents], where each begins
        self.start, self.end = torch.tensor(start, device=device), torch.tensor(end, device=device)  # [sources] both
        self.chat = torch.tensor(chat, device=device)  # [sources]
        self.weight = (self.end - self.start) * torch.where(self.chat, recipe.base_chat_weight, 1.0)  # [sources]
        self.offsets = torch.arange(self.length, device=device)
        self.random = torch.Generator(device).manual_seed(recipe.seed)

    def draw(self, count: int) -> Tensor:
        """Draw `count` windows, `[count, length]` int64."""
        source = torch.multinomial(self.weight, count, replacement=True, generator=self.random)
        low, high = self.start[source], self.end[source]
        part = torch.rand(count, generator=self.random, device=low.device, dtype=torch.float64)
        at = low + (part * (high - low)).long()  # [count]
        opening = self.documents[torch.searchsorted(self.documents, at, right=True) - 1]
        at = torch.where(self.chat[source], opening, at).clamp(max=len(self.stream) - self.length)
        ids = self.stream[at[:, None] + self.offsets].long()  # [count, length]
        ids[:, 0] = self.bos
        return ids


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, for hidden `[B, T, D]`, head `[V, D]` and targets `[B, T]`."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), targets.flatten())


def rate(progress: float) -> float:
    """Return the learning rate as a share of its peak, for `progress` from 0 to 1 through the training."""
    return min(1.0, progress / WARM_UP_SHARE, (1 - progress) / DECAY_SHARE)


def train(model: LlamaForCausalLM, windows: Windows, recipe: Recipe) -> dict[str, Any]:
    """Train in place until the time is up, or for `base_steps`. Returns measurements for the report."""
    device = recipe.torch_device
    on_gpu = device.type == "cuda"
    mode = recipe.compile if recipe.compile != "auto" else "default" if on_gpu else "off"
    loss_of = next_token_loss
    if mode != "off":
        import torch._dynamo.config as dynamo_config

        dynamo_config.suppress_errors = True  # where the compiler fails, torch says so and runs it uncompiled
        for layer in model.model.layers:  # one region, compiled once and shared: all layers run the same code
            layer.compile(mode=mode, dynamic=False)
        loss_of = torch.compile(next_token_loss, mode=mode, dynamic=False)
    elif on_gpu:
        warnings.warn("--compile off: expect a third of the speed; leave it out to compile", stacklevel=2)

    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.lm_head.weight, *(p for p in model.parameters() if p.ndim == 1)]  # the head is the embedding too
    optimizers = [
        Muon(matrices, recipe.base_matrix_lr, recipe.base_weight_decay),
        torch.optim.AdamW(others, recipe.base_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    tokens_per_step = recipe.base_batch * recipe.base_accumulate * (windows.length - 1)
    recent, recent_steps, lines = torch.zeros((), device=device), 0, 0
    model.train()
    began, clock = time.perf_counter(), 0.0
    for step in itertools.count():
        elapsed = time.perf_counter() - clock if step else 0.0
        progress = step / recipe.base_steps if recipe.base_steps else elapsed / (60 * recipe.base_minutes)

        # once in a while: say how it goes
        if recent_steps and progress >= lines / MAX_LOG_LINES:
            train_loss, lines = recent.item() / recent_steps, lines + 1
            speed = (step - 1) * tokens_per_step / elapsed  # the first step is not on the clock
            print(f"  step {step:5d}  loss {train_loss:.4f}  {speed:,.0f} tokens/s  {elapsed:.1f} s", flush=True)
            recent, recent_steps = torch.zeros_like(recent), 0
        if progress >= 1:
            break

        # one step of optimisation
        for _ in range(recipe.base_accumulate):
            ids = windows.draw(recipe.base_batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T, D]
                loss = loss_of(hidden, model.lm_head.weight, ids[:, 1:]) / recipe.base_accumulate
            loss.backward()
            recent += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lrs in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        recent_steps += 1

        if step == 0:  # it compiled; the clock starts once it is done
            recent.item()
            clock = time.perf_counter()
    return {
        "steps": step,
        "tokens_seen": step * tokens_per_step,
        "tokens_per_step": tokens_per_step,
        "train_seconds": round(elapsed, 1),
        "first_step_seconds": round(clock - began, 1),
        "tokens_per_second": round(speed),
        "train_loss": round(train_loss, 4),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    }


def save(model: LlamaForCausalLM, tokenizer: Path, into: Path) -> None:
    """Save the weights in bf16, with a config that asks for float32, and tokenizer and chat template beside them."""
    model.to(torch.bfloat16).save_pretrained(into)
    shutil.copytree(tokenizer, into, dirs_exist_ok=True)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, folder: Path, window: int) -> dict[str, dict[str, float]]:
    """Measure the loss on each source of the val split, in adjacent windows: nats per token and bits per character."""
    stream, sources = tokens.load(folder, "val")
    found = {}
    for name, span in sources.items():
        ids = torch.from_numpy(stream[span["start"] : span["end"]].astype(np.int64)).to(model.device)
        whole = len(ids) - len(ids) % window
        batches = [*ids[:whole].view(-1, window).split(16), ids[None, whole:]]  # [up to 16, window], and the rest
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        count = 0
        for batch in (b for b in batches if b.shape[1] > 1):
            logits = model(batch).logits[:, :-1]  # [B, T - 1, V]
            total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            count += batch[:, 1:].numel()
        nats = total.item() / max(count, 1)
        bits = nats / np.log(2) * len(ids) / span["chars"]
        found[name] = {"tokens": count, "nats_per_token": round(nats, 4), "bits_per_char": round(float(bits), 4)}
    return found


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Train the base and write it to `into` in the form that `AutoModelForCausalLM` reads; then measure that."""
    out = Path(recipe.out)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    model = build(recipe, tokenizer)
    print(f"  {model.num_parameters():,} parameters on {model.device}")
    facts: dict[str, Any] = {"parameters": model.num_parameters()}
    # Inputs and targets overlap but for one token.
    windows = Windows(recipe, out / "tokens", tokenizer.bos_token_id, recipe.base_window + 1)
    facts |= train(model, windows, recipe)
    save(model, out / "tokenizer", into)
    del model

    base = AutoModelForCausalLM.from_pretrained(into).to(recipe.torch_device).eval()
    facts["val"] = evaluate(base, out / "tokens", recipe.base_window)
    for name, loss in facts["val"].items():
        print(f"  val {name:20s} {loss['nats_per_token']:.4f} nats/token  {loss['bits_per_char']:.4f} bits/char")
    for prompt in prompts(read_rows(recipe.data, recipe.exclude), tokenizer, 4, tokens=48, seed=recipe.seed):
        ids = torch.tensor([prompt["ids"]], device=base.device)
        new = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        print(f"  {prompt['source']}: {prompt['prompt']!r}\n    -> {tokenizer.decode(new[0, ids.shape[1] :])!r}")
    return facts
