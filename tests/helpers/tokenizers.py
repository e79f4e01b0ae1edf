"""Tokenizers with really different vocabularies, trained on a few texts."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>"]

TEXTS = [
    f"The {adjective} {noun} {verb} over the {place}, and then {number} {noun}s say: «né à Zoë», {verb} on!\n\tHere "
    f"we are again in the {place} where the {adjective} {noun} lives."
    for number, adjective in enumerate(("quick", "lazy", "brown", "wide", "old", "green"), start=1230)
    for noun in ("fox", "river", "boat", "house", "dog")
    for verb in ("jumps", "flows", "sails", "looks", "sleeps")
    for place in ("mountain", "sea", "city", "forest")
]


def byte_level(texts: Iterable[str], size: int, special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Train byte-level BPE of at most `size` tokens, special ones included; it adds none of these to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])


def sentencepiece_like(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train BPE of at most `size` tokens as Llama 2 has it: `▁` for spaces, bytes as `<0x00>`, `<s>` before texts."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", *SPECIAL, *alphabet]
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=first, min_frequency=2, show_progress=False)
    )
    model = trained.model
    model.byte_fallback, model.unk_token, model.fuse_unk = True, "<unk>", True
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(first[:3])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token="<unk>"
    )
