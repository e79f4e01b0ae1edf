"""Prompts with images for `redrafter generate`."""

from collections.abc import Sequence
from typing import Any

from redrafter.app.loading import Pair
from redrafter.checkpoints.processors import load_processor
from redrafter.errors import ArgumentError, UnsupportedError, first_line

__all__ = ["encode_with_images"]


def encode_with_images(
    pair: Pair, prompt: str, files: Sequence[str], trust_remote_code: bool
) -> tuple[list[int], dict[str, Any]]:
    """Encode a turn of a chat that shows images and then says something.

    Args:
        pair: The loaded model.
        prompt: What is said.
        files: Paths of the images.
        trust_remote_code: Whether code in the checkpoint may run.

    Returns:
        Token ids, and what `Engine.generate` takes of the images beside them.

    Raises:
        ArgumentError: A file is no image, or the model's processor cannot read one.
        UnsupportedError: The model takes no images.
    """
    target = pair.engine.target
    if not target.images.ok:
        raise UnsupportedError(f"{target.name} takes no images: {target.images.reason}; leave out --image")
    processor = load_processor(pair.name, trust_remote_code=trust_remote_code)
    content = [*({"type": "image", "image": _open(file)} for file in files), {"type": "text", "text": prompt}]
    try:
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=pair.tokenizer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    except (ValueError, TypeError, LookupError) as error:
        raise ArgumentError(f"the model's processor refuses an image: {first_line(error)}") from error
    return inputs["input_ids"][0].tolist(), {name: inputs[name] for name in inputs if name in target.image_inputs}


def _open(file: str) -> Any:
    """Return the image in a file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ArgumentError(f"--image {file} cannot be read: {first_line(error)}") from error
