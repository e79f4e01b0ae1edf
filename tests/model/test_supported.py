"""Which models can be targets: a model is bound and writes its own text, or is refused in words of this library."""

import pytest
import torch
import transformers as hf

from helpers.drafters import random_drafter
from helpers.models import CONTEXT, HIDDEN, VOCAB, check_texts, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import DraftTarget, PromptLookup, ReDrafter, UnsupportedError
from redrafter.checkpoints.drafters import check_fits_target
from redrafter.model.supported import config_width
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter

IDS, MASK = uneven_batch(rows=3)
GREEDY = {"max_new_tokens": 10, "do_sample": False}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EYE |= {"image_size": 8, "patch_size": 4}
SMALL_OPT = {"word_embed_proj_dim": HIDDEN // 2, "do_layer_norm_before": False, "ffn_dim": 48}
HEADS = ("encoder_attention_heads", "decoder_attention_heads")
BART = {"encoder_layers": 2, "decoder_layers": 2, "decoder_ffn_dim": 48, **dict.fromkeys(HEADS, 4)}
REFORMER = {"attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "attention_head_size": 8}
REFORMER |= {"axial_pos_shape": (8, 12), "axial_pos_embds_dim": (16, 16)}


def whisper():
    sizes = {"d_model": HIDDEN, "decoder_layers": 2, "decoder_ffn_dim": 48, "max_target_positions": CONTEXT}
    torch.manual_seed(0)
    return hf.WhisperForCausalLM(hf.WhisperConfig(**TOKENS, **sizes, **dict.fromkeys(HEADS, 4), init_std=0.2))


def blip2():
    text = TOKENS | {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": CONTEXT}
    asks = EYE | {"vocab_size": VOCAB, "encoder_hidden_size": 16}
    config = hf.Blip2Config(vision_config=EYE, qformer_config=asks, text_config=text, num_query_tokens=2)
    return hf.Blip2ForConditionalGeneration(config)


def kosmos2():
    text = TOKENS | {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4}
    config = hf.Kosmos2Config(text_config=text, vision_config=EYE, latent_query_num=2)
    return hf.Kosmos2ForConditionalGeneration(config)


def gemma3n():
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4, "head_dim": 8}
    own |= {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 6}
    return tiny_model("gemma3n_text", num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 5, **own)


BERT_LIKE = ("bert", "rembert", "electra", "roberta", "roformer")
MODELS = {
    "openai-gpt": lambda: tiny_model("openai-gpt"),
    "xlnet": lambda: hf.XLNetLMHeadModel(hf.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, **TOKENS)),
    "xlm": lambda: tiny_model("xlm"),
    "ctrl": lambda: tiny_model("ctrl"),
    "reformer": lambda: tiny_model("reformer", is_decoder=True, **REFORMER),
    "whisper": whisper,
    "bart": lambda: tiny_model("bart", **BART),
    "blip-2": blip2,
    "kosmos-2": kosmos2,
    "opt-350m": lambda: tiny_model("opt", **SMALL_OPT),
    "opt": lambda: tiny_model("opt", ffn_dim=48, word_embed_proj_dim=HIDDEN),
    "gemma3n": gemma3n,
    "gptj": lambda: tiny_model("gptj", rotary_dim=4),
    "codegen": lambda: tiny_model("codegen", rotary_dim=4),
    "git": lambda: tiny_model("git"),
    "xmod": lambda: tiny_model("xmod", is_decoder=True),
    **{name: lambda name=name: tiny_model(name) for name in BERT_LIKE},
    **{f"{name} decoder": lambda name=name: tiny_model(name, is_decoder=True) for name in BERT_LIKE},
    "bloom": lambda: tiny_model("bloom"),
    "falcon": lambda: tiny_model("falcon"),
    "falcon alibi": lambda: tiny_model("falcon", alibi=True),
    "mpt": lambda: tiny_model("mpt"),
}
BOUND = {"ctrl", "whisper", "opt-350m", "opt", "gemma3n", "bert decoder", "electra decoder"}
BOUND |= {"bloom", "falcon", "falcon alibi", "mpt"}
REASONS = {  # the others say something of their own
    "openai-gpt": "OpenAIGPTLMHeadModel keeps no keys and values of past tokens",
    "xlnet": "XLNetLMHeadModel keeps no keys and values",
    "xlm": "XLMWithLMHeadModel keeps no keys and values",
    "reformer": "ReformerModelWithLMHead keeps no keys and values",
    "blip-2": "Blip2ForConditionalGeneration cannot be a target: .*pixel_values",
    "kosmos-2": "Kosmos2ForConditionalGeneration cannot be a target: .*pixel_values",
    "xmod": "XmodForCausalLM cannot be a target: .*language",
    **{name: r"is not a decoder: .*; load it with is_decoder=True" for name in BERT_LIKE},
    "rembert decoder": "keeps past tokens in its EncoderDecoderCache",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_served_as_it_is_or_refused_with_the_reason(name):
    model = MODELS[name]().float().eval()
    try:
        engine = PromptLookup.from_pretrained(model)
    except UnsupportedError as error:
        assert name not in BOUND
        with pytest.raises(UnsupportedError, match=REASONS.get(name, type(model).__name__)):
            raise error
        assert "\n" not in str(error)
        return
    assert name not in REASONS
    out = engine.generate(IDS, MASK, **GREEDY)
    assert torch.equal(engine.generate(IDS, MASK, speculate=False, **GREEDY), out)
    for row in range(len(IDS)):  # alone: some models count padding as positions
        prompt = IDS[row][MASK[row].bool()][None]
        alone = model.generate(prompt, **GREEDY)[0, prompt.shape[1] :]
        written = out[row, IDS.shape[1] :]
        assert torch.equal(written[: len(alone)], alone)
        assert (written[len(alone) :] == 0).all()


def test_a_model_whose_code_prepares_inputs_by_more_arguments_is_served():
    model, arguments = tiny_model("llama"), {"attention_mask": MASK, **GREEDY}
    expected = model.generate(IDS, **arguments)

    def prepare(input_ids, past_key_values, attention_mask, **given):
        return {"input_ids": input_ids, "past_key_values": past_key_values, "attention_mask": attention_mask} | given

    model.prepare_inputs_for_generation = prepare
    assert torch.equal(with_tree(model, tiny_drafter(), 3, 3).generate(IDS, **arguments), expected)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), MemoryError("no memory")])
def test_memory_that_ran_out_is_not_blamed_on_the_architecture(monkeypatch, error):
    model = tiny_model("llama")

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(model.model.layers[0], "forward", full)
    with pytest.raises(type(error), match="memory"):
        Target(model)


# Sizes


def test_a_drafter_for_a_model_that_projects_its_embeddings_has_their_size():
    model = tiny_model("opt", **SMALL_OPT)
    assert config_width(model.config) == Target(model).hidden_size == HIDDEN // 2
    drafter = new_drafter(model, TrainConfig(model="m", data=("d",), output="o", target_layers=()))
    assert drafter.config.hidden_size == HIDDEN // 2
    with Teacher(model) as teacher:
        assert teacher.read_batch(IDS).hidden.shape == (3, 11, HIDDEN // 2)
    for engine in (with_tree(model, drafter, 3, 3), DraftTarget.from_pretrained(tiny_model("llama"), model)):
        check_texts(engine, rows=3)


def test_a_drafter_of_a_target_whose_sizes_differ_is_refused():
    target = Target(tiny_model("llama"))
    target.embedding = torch.nn.Embedding(VOCAB, 8)
    with pytest.raises(UnsupportedError, match="embeddings of 8 and a head that reads 32"):
        check_fits_target(tiny_drafter(), target)


@pytest.mark.parametrize("make", [gemma3n, lambda: tiny_model("opt", **SMALL_OPT)])
def test_layers_whose_outputs_are_no_hidden_states_are_refused(make):
    model = make()
    size = Target(model).hidden_size
    drafter = random_drafter(target_layers=(0, 2), hidden_size=size)
    with pytest.raises(
        UnsupportedError, match=r"a layer's output has the shape \[.*train one with --target-layers none"
    ):
        ReDrafter(Target(model), drafter)
    with pytest.raises(UnsupportedError, match="a layer's output has the shape"), Teacher(model, (0, 2)) as teacher:
        teacher.read_batch(IDS)
    assert with_tree(model, random_drafter(hidden_size=size), 2, 2).generate(IDS, MASK, **GREEDY).shape[1] == 21


# Attention


EAGER = "attn_implementation='eager'$"
HINTS = {"llama": r"attn_implementation='sdpa' \(or 'eager'\)$", "gemma2": EAGER, "gpt_oss": EAGER}


@pytest.mark.parametrize("architecture", HINTS)
def test_an_attention_that_takes_no_tree_is_answered_with_one_that_the_model_has(architecture):
    model = tiny_model(architecture)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match=HINTS[architecture]):
        Target(model)
