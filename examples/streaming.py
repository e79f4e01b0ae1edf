"""Text as it is made: token by token through a Hugging Face streamer, or step by step with what was drafted."""

from collections.abc import Sequence

from transformers import AutoTokenizer, TextStreamer

from redrafter import ReDrafter, boxed_pair

engine = ReDrafter.from_pretrained(boxed_pair())
tokenizer = AutoTokenizer.from_pretrained(boxed_pair(), padding_side="left")
ids = tokenizer("It was a dark night, and", return_tensors="pt").input_ids

engine.generate(ids, max_new_tokens=32, do_sample=False, streamer=TextStreamer(tokenizer))


class Steps:
    """Prints each step's accepted drafts in brackets, and the target's own token after them."""

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Print a step's tokens."""
        drafts, own = tokenizer.decode(tokens[:accepted]), tokenizer.decode(tokens[accepted:])
        print(f"[{drafts}]{own}", end="", flush=True)

    def end(self) -> None:
        """End the line."""
        print()


engine.generate(ids, max_new_tokens=32, do_sample=False, streamer=Steps())
