"""A program on several ranks that decodes until it is ended; each rank first writes its process id into a file."""

import os
import sys
from pathlib import Path

import torch

from redrafter import PromptLookup


def main() -> None:
    """Decode for ever."""
    model, started = sys.argv[1:]
    engine = PromptLookup.from_pretrained(model, tp_size=int(os.environ["WORLD_SIZE"]))
    Path(started + os.environ["RANK"]).write_text(str(os.getpid()))
    while True:
        engine.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=50, eos_token_id=None)


if __name__ == "__main__":
    main()
