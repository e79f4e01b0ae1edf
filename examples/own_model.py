"""A model and a drafter of your own: batched, sampled, with statistics.

python examples/own_model.py                          # the pair in the box
python examples/own_model.py my-base my-drafter       # yours: hub ids or directories
"""

import sys

from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair

model, drafter = sys.argv[1:] or (str(boxed_pair()), None)
engine = ReDrafter.from_pretrained(model, drafter)
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")

prompts = ["The old man looked at the sea and", "def fibonacci(n):", "## Abstract\n\nThis document proposes"]
batch = tokenizer(prompts, return_tensors="pt", padding=True)
out = engine.generate(
    batch.input_ids,
    batch.attention_mask,
    max_new_tokens=48,
    do_sample=True,
    temperature=0.7,
    seed=1,
    return_dict_in_generate=True,
)
for text, stats in zip(tokenizer.decode(out.sequences, skip_special_tokens=True), out.stats.rows, strict=True):
    print(f"{stats.tokens_per_step:.2f} tokens per step | {text!r}")
