"""A base that sees images still does when it is merged with a drafter, and a drafter is trained on its text."""

import pytest
import torch
from transformers import AutoProcessor

pytest.importorskip("PIL")

from helpers.chats_with_images import llava_with_processor, picture
from helpers.command_line import merge
from helpers.models import HIDDEN, paged, tiny_drafter
from helpers.seeing_models import tiny_seeing_model
from redrafter import ReDrafter
from redrafter.model.teacher import Teacher


def test_a_merged_checkpoint_sees_what_its_base_sees(tmp_path):
    model, processor = llava_with_processor()
    model.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    drafter = tiny_drafter(vocab_size=model.config.text_config.vocab_size, hidden_size=HIDDEN)
    drafter.save_pretrained(tmp_path / "drafter")
    merge(tmp_path / "base", tmp_path / "drafter", tmp_path / "merged")
    merged = AutoProcessor.from_pretrained(tmp_path / "merged")
    inputs = merged(text=["look: <image> what?"], images=[picture(1)], return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    engine = paged(ReDrafter.from_pretrained(tmp_path / "merged"))
    assert torch.equal(engine.generate(**inputs, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_teacher_reads_text_as_the_model_does(family):
    model = tiny_seeing_model(family)
    texts = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Teacher(model) as teacher:
        found = teacher.read_batch(texts)
        torch.testing.assert_close(found.logits, model(input_ids=texts).logits)
    assert found.hidden.shape == (2, 12, HIDDEN)
