"""Speculation inside `model.generate`, for programs that already call it."""

import torch
from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair

engine = ReDrafter.from_pretrained(boxed_pair())
tokenizer = AutoTokenizer.from_pretrained(boxed_pair(), padding_side="left")
batch = tokenizer("The committee decided that", return_tensors="pt")

plain = engine.model.generate(**batch, max_new_tokens=40, do_sample=False)
fast = engine.model.generate(**batch, max_new_tokens=40, do_sample=False, custom_generate=engine.custom_generate())
assert torch.equal(plain, fast)
print(tokenizer.decode(fast[0], skip_special_tokens=True))
