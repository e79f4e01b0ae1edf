"""Tokens of one vocabulary as another one has them: by the bytes that they stand for."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tokenizers import TEXTS, byte_level, sentencepiece_like
from redrafter import MismatchError
from redrafter.checkpoints.vocabularies import map_unlike_vocabularies, map_vocabularies

MAKERS = {
    "bytes 300": lambda: byte_level(TEXTS, 300),
    "bytes 700": lambda: byte_level(TEXTS, 700, special=["<bos>", "<eos>", "<|user|>"]),
    "sentencepiece": lambda: sentencepiece_like(TEXTS, 500),
}
PAIRS = [(a, b) for a in MAKERS for b in MAKERS if a != b]


@pytest.fixture(scope="module", params=PAIRS, ids=" reads ".join)
def pair(request):
    draft, target = (MAKERS[name]() for name in request.param[::-1])
    return target, draft


def in_text(tokenizer, ids):
    """Return the text of ids in the midst of another one."""
    return tokenizer.decode(tokenizer(".").input_ids[-1:] + ids)[1:]


def test_a_shared_token_is_one_piece_that_says_the_same_in_both_and_stands_for_no_other(pair):
    target, draft = pair
    vocabulary = map_vocabularies(target, draft)
    shared, ids = vocabulary.shared.nonzero()[:, 0], vocabulary.draft_ids[vocabulary.shared]
    assert len(shared) > 200
    assert len(ids.unique()) == len(ids)
    assert (vocabulary.counts[shared] == 1).all()
    assert torch.equal(vocabulary.pieces[shared, 0], ids)
    for id, draft_id in zip(shared.tolist(), ids.tolist(), strict=True):
        if id not in target.added_tokens_decoder:
            assert in_text(target, [id]) == in_text(draft, [draft_id])
    # The ends of texts, whatever they are called.
    assert vocabulary.shared[target.eos_token_id]
    assert vocabulary.draft_ids[target.eos_token_id] == draft.eos_token_id


def test_the_draft_model_reads_what_a_token_says(pair):
    target, draft = pair
    vocabulary = map_vocabularies(target, draft)
    for id in set(target.get_vocab().values()) - target.added_tokens_decoder.keys():
        said, read = in_text(target, [id]), in_text(draft, vocabulary.on_host[id])
        if "\ufffd" not in said:
            assert said.endswith(read)
            assert said == read or len(vocabulary.on_host[id]) == vocabulary.max_pieces


def test_the_draft_models_text_begins_as_its_tokenizer_begins_it():
    begins, none = MAKERS["sentencepiece"](), MAKERS["bytes 300"]()
    assert map_vocabularies(none, begins).start == (begins.bos_token_id,)
    assert map_vocabularies(begins, none).start == ()
    assert map_vocabularies(begins, sentencepiece_like(TEXTS, 400)).start == ()  # the target's text says it


def test_the_last_pieces_of_a_long_token_are_kept():
    target, draft = byte_level(["a" * 64 + " xyxyxy"] * 9, 275), byte_level(["xyxyxy"], 262)
    vocabulary = map_vocabularies(target, draft)
    longest = max((token for token in target.get_vocab() if set(token) == {"a"}), key=len)
    assert len(longest) > 4
    letter = draft.convert_tokens_to_ids("a")
    assert vocabulary.on_host[target.convert_tokens_to_ids(longest)] == [letter] * 4


def test_ids_past_a_models_table_are_not_drafted_and_padding_is_read():
    vocabulary = map_vocabularies(MAKERS["bytes 300"](), MAKERS["bytes 700"]())
    fitted = vocabulary.fit(320, 280)
    assert len(fitted.counts) == len(fitted.pieces) == len(fitted.shared) == 320
    assert int(fitted.draft_ids.max()) < 280
    assert int(fitted.pieces.max()) < 280
    assert 0 < fitted.shared_count < vocabulary.shared_count
    assert (fitted.counts >= 1).all()


def test_one_vocabulary_needs_no_map():
    assert map_unlike_vocabularies("a", "b", MAKERS["bytes 300"](), MAKERS["bytes 300"](), False) is None


def word_level():
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        (word_level, "it is WordLevel without byte-level"),
        (lambda: byte_level(["你好世界和平"], 270), "of 42 and 12 tokens of several bytes only 0 are in both"),
    ],
)
def test_vocabularies_that_cannot_be_of_use_are_refused(draft, named):
    with pytest.raises(MismatchError, match=named):
        map_unlike_vocabularies("a", "b", MAKERS["bytes 300"](), draft(), False)
