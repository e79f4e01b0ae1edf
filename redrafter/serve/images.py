"""Decode images of chats in separate processes, and insert them into the prompt with the model's processor."""

import asyncio
import json
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from redrafter.errors import first_line
from redrafter.sandbox.process import ForkServer, SandboxedProcess, server_of
from redrafter.serve.config import ServeOptions
from redrafter.serve.encoding import ClientTurns, until_thread_is_free
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.protocol.requests import DATA_URL, ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_AT_ONCE = 4  # requests whose images are processed concurrently: decoded images are large
MAX_AT_ONCE_PER_CLIENT = 2  # lower, so that one client's images do not block others
# Bytes of processed images that the engine has not read yet; Qwen2-VL makes 294 MiB of 12.8 million pixels.
MAX_HELD_BYTES = 2 << 30
POLL_SECONDS = 0.05  # polling interval of a request that waits for memory
WAIT_SECONDS = 60.0  # wall-clock time to decode the images of one request, on a machine that is busy
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
T = TypeVar("T")


class ChatImageReader:
    """Reads the images of chats."""

    def __init__(self, processor: Any, names: Collection[str], options: ServeOptions | None = None):
        """Create a reader from a model's processor and the names of the model's image inputs."""
        self._processor, self._names, self.options = processor, frozenset(names), options or ServeOptions()
        self._turns = ClientTurns(MAX_AT_ONCE, MAX_AT_ONCE_PER_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "redrafter-images")
        self._processes: set[SandboxedProcess] = set()
        self._held: Counter[str] = Counter()  # bytes by client
        self._closed = False

    async def run_encoding(self, encode: Callable[[SandboxedProcess], T], client: str) -> T:
        """Encode a request with images in a thread, when it is its turn.

        A client with `MAX_AT_ONCE_PER_CLIENT` requests or half of `MAX_HELD_BYTES` waits for its own requests.
        If the caller is cancelled, the process is killed at once, and the turn is released when its thread is free.
        `encode` is called with a process that decodes the images. Raises `Stopped` once the reader is closed.
        """
        async with self._turns.for_client(client):
            while not self._closed and max(2 * self._held[client], self._held.total()) > MAX_HELD_BYTES:
                await asyncio.sleep(POLL_SECONDS)
            async with self._turns.all:
                loop = asyncio.get_running_loop()
                process = await loop.run_in_executor(self._threads, self.new_process)
                self._processes.add(process)
                try:
                    if self._closed:
                        raise Stopped
                    work = loop.run_in_executor(self._threads, encode, process)
                    return await until_thread_is_free(work, process.end)
                finally:
                    self._processes.discard(process)
                    process.end()

    async def count(
        self, deltas: AsyncGenerator[T, None], inputs: Mapping[str, Any], client: str
    ) -> AsyncGenerator[T, None]:
        """Pass the engine's deltas through, and count a client's images as held until the engine has read them."""
        size = sum(value.nbytes for value in inputs.values() if hasattr(value, "nbytes"))
        self._held[client] += size
        try:
            async for written in deltas:
                # With the first tokens the engine has the pixels.
                self._held[client] -= size
                size = 0
                yield written
        finally:
            self._held[client] -= size
            self._held += Counter()  # drops clients whose count is zero
            await deltas.aclose()

    def new_process(self) -> SandboxedProcess:
        """Start a process that decodes the images of one request."""
        pixels = self.options.max_image_pixels
        return SandboxedProcess(lambda: server_of(self, lambda: ForkServer("redrafter.serve.image_decoder", pixels)))

    def close(self) -> None:
        """Kill all processes. Current and later calls raise `Stopped`."""
        self._closed = True
        for process in tuple(self._processes):
            process.end()

    def place(
        self, text: str, urls: Sequence[str], process: SandboxedProcess | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Decode images from `data:` URLs, and insert their placeholder tokens into a prompt.

        The chat template has put the processor's mark for each image into the prompt, in the same order. The images are
        decoded in `process`, or in a new one. Returns the prompt and the model's image inputs.

        Raises:
            ApiError: An image is too large, invalid or too slow to decode, or the template dropped one.
            Stopped: The reader was closed meanwhile.
        """
        mark: str = self._processor.image_token
        if (places := text.count(mark)) != len(urls):
            raise ApiError(400, f"the chat template has places for {places} of {len(urls)} images", "messages")
        images = self._decode(urls, process or self.new_process())
        try:  # the processor splits images into patches and returns their placeholder tokens
            made = self._processor(
                images=images,
                text=[text],
                return_tensors="pt",
                add_special_tokens=False,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # the processor's code may raise anything
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
        return "".join([*pieces, text[end:]]), inputs

    def _decode(self, urls: Sequence[str], process: SandboxedProcess) -> "list[Image]":
        from PIL import Image

        payloads = [url[DATA_URL.match(url).end() :] for url in urls]  # type: ignore[union-attr]
        # Four characters of base64 are three bytes, less up to two of padding.
        if (size := max(map(len, payloads)) // 4 * 3) > self.options.max_image_size + 2:
            what = f"{size} bytes; an image may have {self.options.max_image_size} (--max-image-size)"
            raise ApiError(400, f"an image is too large: {what}", "messages", "image_too_large")
        images = []
        try:
            process.connection.send(payloads)
            for _ in payloads:
                reply = process.receive(WAIT_SECONDS)
                if reply[:1] == b"-":
                    message, code = json.loads(reply[1:])
                    raise ApiError(400, message, "messages", code)
                width, height = struct.unpack("=II", reply[1:])
                images.append(Image.frombytes("RGB", (width, height), process.receive(WAIT_SECONDS)))
        except (EOFError, OSError) as error:
            if self._closed:
                raise Stopped from error
            what = "an image takes too long or too much memory to be decoded: send it in another form"
            raise ApiError(400, what, "messages", "image_too_complex") from error
        finally:
            process.end()
        return images

    def token_types(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the model's input that marks the placeholder tokens of images; empty if it takes none."""
        import torch

        types = self._processor.create_mm_token_type_ids([list(ids)])
        return {name: torch.tensor(types) for name in _TOKEN_TYPES if name in self._names}
