"""Models with PEFT's adapters: what is written is what the `PeftModel` itself writes."""

import pytest
import torch

from helpers.adapters import PROJECTIONS, adapted, peft, randomized
from helpers.generation import ON_BOTH_CACHES
from helpers.models import check_texts, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import DraftTarget, PromptLookup, ReDrafter, UnsupportedError
from redrafter.model.supported import base_of
from redrafter.model.teacher import Teacher

IDS, MASK = uneven_batch(rows=3)
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def plain_text(model):
    """Return what `model.generate` itself writes."""
    return model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)


@pytest.mark.costly
@ON_BOTH_CACHES
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_dropout": 0.3},
        {"use_dora": True},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [5, 6, 7]},
    ],
    ids=lambda changes: next(iter(changes), "lora"),
)
def test_a_peft_model_is_served_with_its_adapters(on, changes):
    model = adapted(**changes)
    expected = plain_text(model)
    with model.disable_adapter():
        assert not torch.equal(expected, plain_text(model))
    makers = (
        lambda: ReDrafter.from_pretrained(model, tiny_drafter(), num_beams=3, draft_len_per_beam=3),
        lambda: PromptLookup.from_pretrained(model),
        lambda: DraftTarget.from_pretrained(model, tiny_model("gpt2"), draft_len=2),
    )
    engines = [on(make()) for make in makers]
    for engine in engines:
        for speculate in (True, False):
            assert torch.equal(engine.generate(IDS, MASK, speculate=speculate, **GREEDY), expected)
    check_texts(engines[-1])


def test_the_custom_generate_of_an_engine_belongs_to_its_peft_model_too():
    model = adapted()
    engine = with_tree(model, tiny_drafter(), 3, 3)
    text = model.generate(input_ids=IDS, attention_mask=MASK, custom_generate=engine.custom_generate(), **GREEDY)
    assert torch.equal(text, plain_text(model))
    assert engine.model is model.get_base_model()


def test_a_model_and_its_adapted_self_draft_for_each_other():
    model = adapted()
    expected = plain_text(model)
    itself = DraftTarget.from_pretrained(model, model, draft_len=3)
    assert itself.draft_model is itself.target
    for engine in (
        itself,
        DraftTarget.from_pretrained(model, tiny_model("llama")),
        DraftTarget.from_pretrained(tiny_model("gpt2"), model),
    ):
        assert torch.equal(engine.generate(IDS, MASK, **GREEDY), plain_text(engine.model))
    assert torch.equal(itself.generate(IDS, MASK, **GREEDY), expected)


@ON_BOTH_CACHES
def test_adapters_that_are_merged_switched_or_disabled_are_followed(on):
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    randomized(model, seed=4).eval()
    engine, texts = on(with_tree(model, tiny_drafter(), 3, 3)), []

    def check():
        texts.append(plain_text(model))
        assert torch.equal(engine.generate(IDS, MASK, **GREEDY), texts[-1])

    check()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    model.set_adapter("other")
    model.eval()
    check()
    with model.disable_adapter():
        check()
    assert not torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[2], texts[3])
    merged = adapted()
    expected = plain_text(merged)
    whole = merged.merge_and_unload()
    assert torch.equal(with_tree(whole, tiny_drafter(), 3, 3).generate(IDS, MASK, **GREEDY), expected)


def test_adapters_that_transformers_loads_are_served(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    model = adapted()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    expected = plain_text(model)
    for engine in (
        PromptLookup.from_pretrained(tmp_path / "adapter"),
        PromptLookup.from_pretrained(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")),
        PromptLookup.from_pretrained(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")),
    ):
        assert torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)


def test_a_drafter_is_trained_on_what_the_adapted_model_says():
    model = adapted()
    with Teacher(base_of(model)) as teacher, torch.no_grad():
        assert torch.allclose(teacher.read_batch(IDS).logits, model(input_ids=IDS).logits, atol=1e-5)


TUNINGS = [
    (
        peft.PromptTuningConfig,
        {"num_virtual_tokens": 3},
        "with PROMPT_TUNING adapters is .* adapters that stand in layers",
    ),
    (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}, "with PREFIX_TUNING adapters is more than layers"),
    (
        peft.LoraConfig,
        {"target_modules": PROJECTIONS, "alora_invocation_tokens": [5, 6]},
        "an activated LoRA .alora_invocation_tokens.* use LoRA without",
    ),
]


@pytest.mark.parametrize(("kind", "settings", "said"), TUNINGS)
def test_adapters_that_are_more_than_layers_are_refused(kind, settings, said):
    model = peft.get_peft_model(tiny_model("llama"), kind(task_type="CAUSAL_LM", **settings)).eval()
    with pytest.raises(UnsupportedError, match=said):
        ReDrafter.from_pretrained(model, tiny_drafter())
    with pytest.raises(UnsupportedError, match=f"PeftModelForCausalLM .*{said}"):
        PromptLookup.from_pretrained(model)
