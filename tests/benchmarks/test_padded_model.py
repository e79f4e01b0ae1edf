"""A padded pair computes what the small one does, and reads no zeros but those that make it so."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from helpers.eagle import EAGLE_FORMS, random_head
from helpers.models import HIDDEN, VOCAB, assert_close_by_scale, tiny_drafter, tiny_model, uneven_batch
from padded_drafters import pad_drafter, pad_eagle
from padded_model import SHAPES, pad_model, unmasked
from padding import PadShape
from redrafter import ArgumentError, ReDrafter, UnsupportedError

SHAPE = PadShape(4 * HIDDEN, 160, 5, 16, 4, 8, 160)  # four times the hidden size: a norm's scale is then a power of 2
IDS, MASK = uneven_batch()


def small_model(**changes):
    """Norms that differ by dim, an epsilon and a rope base that matter, and a generation config of its own."""
    rope = {"rope_type": "default", "rope_theta": 50.0}
    model = tiny_model(**{"model_type": "llama", "rms_norm_eps": 0.05, "rope_parameters": rope} | changes)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    model.generation_config.max_length = 31
    return model


def small_drafter(**changes):
    drafter = tiny_drafter(**changes)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)  # biases too, which begin as zeros
    return drafter


def pad(model, shape=SHAPE, **kwargs):
    return pad_model(model, shape, device="cpu", **kwargs)


@pytest.fixture(scope="module")
def pair():
    model = small_model()
    return model, pad(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("base", "shape"),
    [
        ({}, SHAPE),
        ({"tie_word_embeddings": True}, SHAPE),
        ({"num_key_value_heads": 1}, SHAPE),  # four heads of one group, as the shape has them
        ({"num_key_value_heads": 4}, SHAPE),  # groups of one
        ({"model_type": "qwen2"}, SHAPE),  # with biases of queries, keys and values
        ({}, replace(SHAPE, hidden_size=2 * HIDDEN)),  # the scale is irrational
        ({}, PadShape(HIDDEN, 48, 3, 4, 2, 8, VOCAB)),  # its own shape
    ],
)
def test_logits_are_the_small_models_and_added_ids_are_out(base, shape, dtype):
    model = small_model(**base).to(dtype)
    padded = pad(model, shape)
    assert padded.dtype == dtype
    assert not padded.training
    with torch.no_grad():
        expected, found = (x(IDS, attention_mask=MASK).logits for x in (model, padded))
    kept = MASK.bool()
    assert_close_by_scale(found[..., :VOCAB][kept], expected[kept], 2e-5 if dtype == torch.float32 else 5e-6)
    assert found.shape[-1] == shape.vocab_size
    assert (found[..., VOCAB:] == float("-inf")).all()


def test_only_the_named_weights_are_zero(pair):
    _, padded = pair
    for name, weight in padded.named_parameters():
        zero = torch.zeros_like(weight, dtype=torch.bool)
        if "embed_tokens" in name:
            zero[:, HIDDEN:] = True
            zero[0] = True  # the base's own row of its padding id
        elif "o_proj" in name or "down_proj" in name:
            zero[:] = True
            if int(name.split(".")[2]) < 3:
                heads = torch.arange(128).view(4, 4, 8)[:2, :2].flatten()  # two of the first two groups each
                zero[:HIDDEN, heads if "o_proj" in name else slice(48)] = False
        assert torch.equal(weight == 0, zero), name
    for name in ("layers.4.self_attn.k_proj", "layers.4.mlp.gate_proj", "layers.4.input_layernorm"):
        assert padded.model.get_submodule(name).weight.std() == pytest.approx(0.02, rel=0.3), name
    assert padded.lm_head.weight[VOCAB:].std() == pytest.approx(0.02, rel=0.1)


def test_a_head_can_be_padded_to_a_rank_of_its_own():
    small = small_drafter(head_rank=12, recurrence="gated")
    padded = pad_drafter(small, 4 * HIDDEN, 160, head_rank=20, device="cpu")
    assert (padded.config.head_rank, padded.lm_head.weight.shape) == (20, (VOCAB, 20))
    hidden = torch.randn(3, HIDDEN)
    logits = [
        each.step(x, None, each.begin(x))[0] for each, x in ((padded, F.pad(hidden, (0, 3 * HIDDEN))), (small, hidden))
    ]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("drafter", "hidden", "vocab", "rank", "message"),
    [
        ({}, 128, 160, 20, "could be padded to 20"),
        ({"head_rank": 12}, 128, 160, 8, "=12 to 8"),
        ({}, 16, 160, None, "hidden_size=32 to 16"),
        ({}, 128, 96, None, "=97 to 96"),
    ],
)
def test_a_drafter_that_cannot_be_padded_is_refused(drafter, hidden, vocab, rank, message):
    with pytest.raises(ArgumentError, match=message):
        pad_drafter(tiny_drafter(**drafter), hidden, vocab, head_rank=rank, device="cpu")


def speculated_alike(pair, drafter, wide, arguments):
    """Return the statistics of a pair, which are those of the padded pair, as its text is."""
    model, padded = pair
    with unmasked(padded):
        large = ReDrafter.from_pretrained(padded, wide, num_beams=12, node_budget=61)
    small = ReDrafter.from_pretrained(model, drafter, num_beams=12, node_budget=61)
    outs = [
        x.generate(IDS, attention_mask=MASK, max_new_tokens=50, return_dict_in_generate=True, **arguments)
        for x in (small, large)
    ]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].stats == outs[1].stats
    return outs[0].stats


@pytest.mark.costly
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 3}])
@pytest.mark.parametrize(
    "changes",
    [
        {"recurrence": "trtllm", "exit_dim": 24},
        {"recurrence": "apple", "target_layers": [0, 1], "head_rank": 12},
        {"recurrence": "gated", "target_layers": [1], "exit_dim": 24, "draft_vocab_size": 20},
        {"rnn": False, "num_draft_layers": 0},
        {"context_window": 6, "context_head_dim": 8},
        {"context_window": 6, "context_head_dim": 8, "recurrence": "gated", "target_layers": [0, 2], "head_rank": 12},
        {"context_window": 6, "context_head_dim": 8, "context_heads": 2, "context_kv_heads": 2, "rnn": False},
    ],
)
def test_a_padded_pair_writes_and_speculates_the_same(pair, changes, arguments):
    drafter = small_drafter(base_embedding_norms=None, base_model="tiny", **changes)
    wide = pad_drafter(drafter, 4 * HIDDEN, 160, device="cpu")
    assert wide.config.base_model == "tiny"
    stats = speculated_alike(pair, drafter, wide, arguments)
    assert stats.tokens_per_step > 1
    assert stats.accepted > 3


HEADS = ["published", "speculators", "3.1", "joined norm"]


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:the drafter.s embedding table")  # a random one, on purpose
@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 3}])
def test_a_padded_eagle_head_writes_and_speculates_the_same(pair, form, arguments):
    head = random_head(rms_norm_eps=0.9, **EAGLE_FORMS[form])
    wide = pad_eagle(head, 3, SHAPE, device="cpu")
    assert speculated_alike(pair, head, wide, arguments).accepted > 3


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("narrow", {}, "of its target's width"),
        ("every id", {}, "without biases"),
        ("published", {"hidden_size": 16}, "hidden_size=32 to 16"),
        ("published", {"intermediate_size": 32}, "intermediate_size=40 to 32"),
    ],
)
def test_an_eagle_head_that_cannot_be_padded_is_refused(form, changes, message):
    with pytest.raises(ArgumentError, match=message):
        pad_eagle(random_head(**EAGLE_FORMS[form]), 3, replace(SHAPE, **changes), device="cpu")


def test_the_mask_is_off_only_while_binding(pair):
    _, padded = pair
    with pytest.raises(UnsupportedError), unmasked(padded):
        assert padded(IDS).logits.isfinite().all()
        raise UnsupportedError("as a target would")
    assert not padded(IDS).logits[..., VOCAB:].isfinite().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size=32 to 16"),
        ({"intermediate_size": 40}, "intermediate_size=48 to 40"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=3 to 2"),
        ({"vocab_size": 96}, "vocab_size=97 to 96"),
        ({"head_dim": 16}, r"head_dim.* 8, the shape 16"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "num_attention_heads=4 to 2"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=2 to 1"),
        ({"num_key_value_heads": 16}, r"2 of the model's .* only 1 of the shape's"),
    ],
)
def test_a_shape_that_the_model_does_not_fit_into_is_refused(pair, changes, message):
    with pytest.raises(ArgumentError, match=message):
        pad(pair[0], replace(SHAPE, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3", {}, "'llama' or 'qwen2'.*'qwen3'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_other_models_are_refused(model_type, changes, message):
    with pytest.raises(ArgumentError, match=message):
        pad(tiny_model(model_type, **changes))


@pytest.mark.parametrize("changes", [{"hidden_size": 0}, {"vocab_size": 1.5}, {"num_key_value_heads": 3}])
def test_a_shape_that_makes_no_model_is_refused(changes):
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        replace(SHAPE, **changes)


@pytest.mark.parametrize(
    ("name", "kind", "tied", "size"),
    [
        ("llama-3.1-8b", LlamaForCausalLM, False, 8030261248),
        ("llama-3.2-1b", LlamaForCausalLM, True, 1235814400),
        ("qwen2.5-7b", Qwen2ForCausalLM, False, 7615616512),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name, kind, tied, size):
    with torch.device("meta"):
        model = kind(kind.config_class(**vars(SHAPES[name]), tie_word_embeddings=tied))
    assert sum(parameter.numel() for parameter in model.parameters()) == size
