"""A small model drafts for a large one that was never trained with it. Needs nothing from outside.

python examples/draft_target.py                    # a stand-in for a large model, made here
python examples/draft_target.py my-70b my-1b       # yours: hub ids or directories

The stand-in is the model in the box with 40 layers more that add nothing: it costs twice as much and writes what the
small one writes, so every draft is kept. A pair of real models keeps fewer.
"""

import copy
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from redrafter import DraftTarget, boxed_pair


def deepen(small: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a Llama that computes what `small` does, with so many layers more, whose output is zero."""
    config = copy.deepcopy(small.config)
    config.num_hidden_layers += layers
    large = AutoModelForCausalLM.from_config(config).eval()
    large.load_state_dict(small.state_dict(), strict=False)
    with torch.no_grad():
        for layer in large.model.layers[small.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return large


if sys.argv[1:]:
    model, draft_model = sys.argv[1:]
else:
    draft_model = str(boxed_pair())
    model = deepen(AutoModelForCausalLM.from_pretrained(draft_model), layers=40)
    print("the large model is the small one with more layers, which add nothing: every draft is kept, by construction")

engine = DraftTarget.from_pretrained(model, draft_model, draft_len=6)
tokenizer = AutoTokenizer.from_pretrained(draft_model, padding_side="left")
batch = tokenizer(["The old man looked at the sea and", "def fibonacci(n):"], return_tensors="pt", padding=True)
texts = {}
for speculate in (False, True):
    start = time.perf_counter()
    out = engine.generate(
        batch.input_ids,
        batch.attention_mask,
        max_new_tokens=24,
        do_sample=True,
        temperature=0.7,
        seed=1,
        speculate=speculate,
        return_dict_in_generate=True,
    )
    texts[speculate] = out.sequences
    print(
        f"{'with the small model' if speculate else 'alone':<22}{time.perf_counter() - start:6.2f} s, "
        f"{out.stats.tokens_per_step:.2f} tokens per step"
    )
for text in tokenizer.decode(texts[True], skip_special_tokens=True):
    print(repr(text))
print("the same tokens" if texts[True].equal(texts[False]) else "OTHER TOKENS")
