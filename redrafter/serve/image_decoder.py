"""The process that decodes the images of one request; a few kilobytes of a malicious image may take minutes.

`redrafter.sandbox.child` forks it. It imports only Pillow, and is killed at its limits of time and memory.
"""

import base64
import binascii
import io
import json
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from PIL import Image, ImageOps

from redrafter.errors import first_line
from redrafter.sandbox.child import bounded_work, limit_memory

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # only the first frame of an animation is read
T = TypeVar("T")
MAX_RATIO = 50  # maximum aspect ratio: processors may scale the shorter side up to hundreds of pixels

# The most expensive legitimate images (WebP with noise, CMYK) take 0.07 s and 23 MiB for a million pixels.
OPEN_CPU_SECONDS = 1.0
CPU_SECONDS_PER_PIXEL = 4e-7
BYTES, BYTES_PER_PIXEL = 64 << 20, 32


class _Refusal(Exception):
    """Raised for a rejected image, with a message and an optional error code."""


def prepare(pixels: int) -> Callable[[Connection], None]:
    """Load the decoders, and return the function that serves a process's connection. `pixels`: most of all images.

    The function receives each image's base64, and sends the width, height and RGB pixels of each, or `-` and a message
    with a code as JSON.
    """
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # replaced by the limits here

    def serve_connection(connection: Connection) -> None:
        limit_memory(BYTES + BYTES_PER_PIXEL * pixels)
        payloads = connection.recv()
        try:
            with bounded_work(OPEN_CPU_SECONDS):
                # The header alone gives the size, which bounds the time and memory of the decoding below.
                images = _open(payloads, pixels)
            with bounded_work(OPEN_CPU_SECONDS + CPU_SECONDS_PER_PIXEL * sum(x.width * x.height for x in images)):
                decoded = [_decode(image) for image in images]
        except _Refusal as refusal:
            return connection.send_bytes(b"-" + json.dumps(refusal.args).encode())
        for width, height, content in decoded:
            connection.send_bytes(b"+" + struct.pack("=II", width, height))
            connection.send_bytes(content)

    return serve_connection


def _open(payloads: Sequence[str], pixels: int) -> list[Image.Image]:
    images, left = list[Image.Image](), pixels
    for payload in payloads:
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _Refusal(f"an image is not valid base64: {error}", None) from error
        image = _read(lambda: Image.open(io.BytesIO(data), formats=FORMATS))  # noqa: B023  # called at once
        width, height = image.size
        # A small file may decompress to gigabytes.
        left -= width * height
        if left < 0:
            what = f"{width * height} pixels, and a request's images may have {pixels} together"
            raise _Refusal(f"an image is too large: {what} (--max-image-pixels)", "image_too_large")
        if max(width, height) > MAX_RATIO * min(width, height):
            what = f"{width} x {height} pixels: one side may be {MAX_RATIO} times as long as the other"
            raise _Refusal(f"an image has {what}", "image_too_narrow")
        images.append(image)
    return images


def _decode(image: Image.Image) -> tuple[int, int, bytes]:
    turned = _read(lambda: ImageOps.exif_transpose(image).convert("RGB"))
    return turned.width, turned.height, turned.tobytes()


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except MemoryError:
        raise EOFError("the limit of memory") from None  # ends the process, like the time limit
    except Exception as error:  # Pillow's decoders may raise anything
        what = f"an image cannot be read ({first_line(error)[:80]}): send {', '.join(FORMATS)}"
        raise _Refusal(what, None) from error
