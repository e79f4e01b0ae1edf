"""Streamers that collect what they are given."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer


def letters() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose token i < 94 is one printable character; the last three are pairs."""
    vocabulary = {chr(33 + i): i for i in range(94)} | {"aa": 94, "bb": 95, "cc": 96}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("b", "b"), ("c", "c")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class Collect(BaseStreamer):
    def __init__(self):
        self.columns, self.ended = [], False

    def put(self, value):
        self.columns.append(value.reshape(len(value), -1) if value.dim() == 1 else value)

    def end(self):
        self.ended = True


class Steps:
    def __init__(self):
        self.texts, self.drafts, self.ends = {}, 0, 0

    def put_step(self, row, tokens, accepted, ended):
        self.texts.setdefault(row, []).extend(tokens)
        self.drafts += accepted

    def end(self):
        self.ends += 1
