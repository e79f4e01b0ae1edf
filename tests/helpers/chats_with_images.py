"""A tiny Llava with its processor, and images to send to it."""

import base64
import io
from typing import Any

import torch
from PIL import Image
from transformers import LlavaProcessor, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from helpers.chats import tiny_tokenizer
from helpers.seeing_models import tiny_seeing_model

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def llava_processor(template: str = TEMPLATE) -> LlavaProcessor:
    """Return a processor that makes four tokens of each image."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    cut = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    form = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(cut, tokenizer, chat_template=template, **form)


def llava_with_processor() -> tuple[PreTrainedModel, LlavaProcessor]:
    """Return a random Llava for the tokens of its processor."""
    processor = llava_processor()
    model = tiny_seeing_model(
        "llava", processor.image_token_id, vocab_size=len(processor.tokenizer), max_position_embeddings=512
    )
    return model, processor


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Return an image of random colours."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.frombytes("RGB", (width, height), bytes(colours.flatten().tolist()))


def data_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Return an image as a `data:` URL."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def image_part(image: Image.Image | str, **more: Any) -> dict[str, Any]:
    """Return an image, or a URL, as a part of a message."""
    url = image if isinstance(image, str) else data_url(image)
    return {"type": "image_url", "image_url": {"url": url} | more}


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}
