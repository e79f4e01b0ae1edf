"""Images in chats: decoded under limits, and put into the prompt by the processor beside the model."""

import base64
import binascii
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redrafter.errors import first_line
from redrafter.serve.config import ServeOptions
from redrafter.serve.protocol.messages import DATA_URL
from redrafter.serve.protocol.requests import ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageLimits", "ImageReader", "PlacedImages"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # of an animation, the first picture is read
MAX_RATIO = 50  # of an image's sides: a processor may enlarge it until the shorter one has hundreds of pixels
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class ImageLimits:
    """The most images that a request may have, and the most bytes and pixels of them.

    Attributes:
        count: Images of a request.
        size: Bytes of an image, as it is stored.
        pixels: Pixels of a request's images together.
    """

    count: int = ServeOptions.max_images
    size: int = ServeOptions.max_image_size
    pixels: int = ServeOptions.max_image_pixels


@dataclass(frozen=True)
class PlacedImages:
    """Images of one prompt.

    Attributes:
        text: The prompt, in which a mark for each image has become the tokens that stand for it.
        inputs: What the model takes of the images, as the processor makes it.
    """

    text: str
    inputs: dict[str, Any]


class ImageReader:
    """Reads the images of chats, in one thread at a time: decoded images are large."""

    def __init__(self, processor: Any, names: Collection[str], limits: ImageLimits | None = None):
        """Make a reader.

        Args:
            processor: The processor that is saved beside the model.
            names: Names of the inputs that the model takes beside ids and mask.
            limits: What a request may have; None for the defaults.
        """
        self._processor, self._names, self.limits = processor, frozenset(names), limits or ImageLimits()

    def check_count(self, count: int) -> None:
        """Raise `ApiError` where a request has more images than it may."""
        if count > self.limits.count:
            raise ApiError(400, f"{count} images in one request; at most {self.limits.count}", "messages")

    def place(self, text: str, urls: Sequence[str]) -> PlacedImages:
        """Decode images, and put the tokens that stand for them into a prompt.

        Args:
            text: The prompt as the chat template rendered it, with the processor's mark for each image.
            urls: The images in their order, as `data:` URLs.

        Raises:
            ApiError: An image is too large or is none, or the template left one out.
        """
        mark: str = self._processor.image_token
        if (places := text.count(mark)) != len(urls):
            raise ApiError(400, f"the chat template has places for {places} of {len(urls)} images", "messages")
        left, images = self.limits.pixels, []
        for url in urls:
            images.append(self._decode(url, left))
            left -= images[-1].width * images[-1].height
        return self._process(text, images)

    def _decode(self, url: str, pixels: int) -> "Image":
        """Return an image in RGB, of so many pixels at most."""
        from PIL import Image, ImageOps

        payload = url[DATA_URL.match(url).end() :]  # type: ignore[union-attr]
        if len(payload) // 4 * 3 > self.limits.size + 2:
            raise _too_large(f"{len(payload) // 4 * 3} bytes; an image may have {self.limits.size}", "--max-image-size")
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(400, f"an image is no base64: {error}", "messages") from error
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_size(image.width, image.height, pixels)
                return ImageOps.exif_transpose(image).convert("RGB")
        except ApiError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_large(first_line(error), "--max-image-pixels") from error
        except Exception as error:  # whatever a decoder of Pillow's raises
            raise ApiError(
                400, f"an image cannot be read ({first_line(error)[:80]}): send {', '.join(FORMATS)}", "messages"
            ) from error

    def _check_size(self, width: int, height: int, pixels: int) -> None:
        """Raise `ApiError` for an image of more than so many pixels, or one so narrow that processors make it huge."""
        if width * height > pixels:
            what = f"{width * height} pixels, and a request's images may have {self.limits.pixels} together"
            raise _too_large(what, "--max-image-pixels")
        if max(width, height) > MAX_RATIO * min(width, height):
            message = f"an image has {width} x {height} pixels: one side may be {MAX_RATIO} times as long as the other"
            raise ApiError(400, message, "messages", "image_too_narrow")

    def _process(self, text: str, images: "list[Image]") -> PlacedImages:
        """Let the processor cut the images up and say which tokens stand for them."""
        try:
            made = self._processor(
                images=images,
                text=[text],
                return_tensors="pt",
                add_special_tokens=False,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # whatever its own code raises
            raise ApiError(400, f"the model's processor refuses an image: {first_line(error)}", "messages") from error
        [replaced] = made["text_replacement_offsets"]
        if len(replaced) != len(images):
            raise ApiError(400, f"the processor has places for {len(replaced)} of {len(images)} images", "messages")
        pieces, end = [], 0
        for entry in replaced:
            begin, next_end = entry["span"]
            pieces += [text[end:begin], entry["replacement"]]
            end = next_end
        inputs = {name: value for name, value in made.items() if name in self._names - set(_TOKEN_TYPES)}
        return PlacedImages("".join([*pieces, text[end:]]), inputs)

    def token_types(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return which tokens of a prompt stand for images, under the name under which the model takes it, if any."""
        import torch

        types = self._processor.create_mm_token_type_ids([list(ids)])
        return {name: torch.tensor(types) for name in _TOKEN_TYPES if name in self._names}


def _too_large(what: str, flag: str) -> ApiError:
    return ApiError(400, f"an image is too large: {what} ({flag})", "messages", "image_too_large")
