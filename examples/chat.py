"""Two turns of a conversation through the tokenizer's chat template."""

import torch
from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair

engine = ReDrafter.from_pretrained(boxed_pair())
tokenizer = AutoTokenizer.from_pretrained(boxed_pair(), padding_side="left")

conversation = []
for question in ("Show me common uses of the command `tar`.", "And of `grep`?"):
    conversation.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    out = engine.generate(ids, max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    conversation.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n")
