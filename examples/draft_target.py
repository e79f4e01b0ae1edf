"""A small model drafts for a large one that was never trained with it. Needs nothing from outside.

python examples/draft_target.py                    # a stand-in for a large model, made here
python examples/draft_target.py my-70b my-1b       # yours: hub ids or directories, of one vocabulary

The stand-in is the model in the box zero-padded to 30 times its parameters: it costs what such a model costs and writes
what the small one writes, so every draft is kept. A pair of real models keeps fewer.
"""

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from redrafter import DraftTarget, boxed_pair
from redrafter.bench.padded_model import PadShape, pad_model

if sys.argv[1:]:
    model, draft_model = sys.argv[1:]
else:
    draft_model = str(boxed_pair())
    shape = PadShape(
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=40,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=2048,
    )
    model = pad_model(AutoModelForCausalLM.from_pretrained(draft_model), shape, device="cpu")
    print("the large model is the small one, zero-padded: every draft is kept, by construction")

engine = DraftTarget.from_pretrained(model, draft_model, draft_len=6)
tokenizer = AutoTokenizer.from_pretrained(draft_model, padding_side="left")
batch = tokenizer(["The old man looked at the sea and", "def fibonacci(n):"], return_tensors="pt", padding=True)
found = {}
for speculate in (False, True):
    start = time.perf_counter()
    out = engine.generate(
        batch.input_ids,
        batch.attention_mask,
        max_new_tokens=50,
        do_sample=True,
        temperature=0.7,
        seed=1,
        speculate=speculate,
        return_dict_in_generate=True,
    )
    found[speculate] = out.sequences
    print(
        f"{'with the small model' if speculate else 'alone':<22}{time.perf_counter() - start:6.2f} s, "
        f"{out.stats.tokens_per_step:.2f} tokens per step"
    )
for text in tokenizer.decode(found[True], skip_special_tokens=True):
    print(repr(text))
print("the same tokens" if found[True].equal(found[False]) else "OTHER TOKENS")
