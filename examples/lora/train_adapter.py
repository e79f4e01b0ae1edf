"""Train a LoRA adapter for the boxed base on Python's standard library in capitals, with PEFT, and write such prompts.

python examples/lora/train_adapter.py --output build/lora --minutes 4
"""

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from redrafter import boxed_pair

HELD_OUT = 10  # every so many files are held out
PROMPT_CHARACTERS = 200

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output", type=Path, required=True, help="directory for the adapter and the prompts")
parser.add_argument("--minutes", type=float, default=4.0, help="minutes to train for")
parser.add_argument("--prompts", type=int, default=96, help="prompts to write for training a drafter")
args = parser.parse_args()

# 1. The texts: modules of the standard library in capitals, which the base has hardly seen; every tenth is held out.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = [file.read_text(encoding="utf-8").upper() for file in files]
kept = {"val": texts[::HELD_OUT], "train": [text for index, text in enumerate(texts) if index % HELD_OUT]}

# 2. Prompts: the beginnings of lines at random places.
draw = random.Random(0)
args.output.mkdir(parents=True, exist_ok=True)
for split, count in (("train", args.prompts), ("val", 24)):
    with open(args.output / f"prompts-{split}.jsonl", "w", encoding="utf-8") as out:
        for _ in range(count):
            text = draw.choice([text for text in kept[split] if len(text) > 2 * PROMPT_CHARACTERS])
            begin = text.find("\n", draw.randrange(len(text) - PROMPT_CHARACTERS)) + 1
            prompt = text[begin : begin + PROMPT_CHARACTERS] or text[:PROMPT_CHARACTERS]
            out.write(json.dumps({"prompt": prompt, "split": split}) + "\n")

# 3. The adapter: next tokens of rows of 256, for as long as there is time.
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(boxed_pair())
base = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
ids = torch.tensor([token for text in kept["train"] for token in tokenizer(text).input_ids])
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-3)
begun, step = time.monotonic(), 0
while (gone := (time.monotonic() - begun) / 60 / args.minutes) < 1:
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * (1 - gone)
    starts = torch.randint(len(ids) - 256, (4,))
    batch = torch.stack([ids[start : start + 256] for start in starts.tolist()])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 20 == 1:
        print(f"step {step}: {loss.item():.3f} nats per token", flush=True)
model.save_pretrained(args.output / "adapter")
print(f"saved {args.output / 'adapter'} after {step} steps")
