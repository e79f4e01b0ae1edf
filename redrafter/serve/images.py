"""Images in chats: decoded in processes of their own, and put into the prompt by the processor beside the model."""

import asyncio
import json
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from redrafter.errors import first_line
from redrafter.sandbox.frames import receive_frame, send_frame
from redrafter.sandbox.process import SandboxedProcess, Zygote, zygote_of
from redrafter.serve.config import ServeOptions
from redrafter.serve.encoding import ClientTurns
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.protocol.requests import DATA_URL, ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_AT_ONCE = 4  # requests whose images are decoded and cut up at once: decoded images are large
MAX_AT_ONCE_PER_CLIENT = 2  # fewer, so that those of others go on beside one client's many
# Bytes of images that were cut up and that the engine has not read yet; Qwen2-VL makes 294 MiB of 12.8 million pixels.
MAX_HELD_BYTES = 2 << 30
POLL_SECONDS = 0.05  # after which a request that waits for room looks again
WAIT_SECONDS = 60.0  # wall-clock time to decode the images of one request, on a machine that is busy
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
T = TypeVar("T")


class ImageReader:
    """Reads the images of chats."""

    def __init__(self, processor: Any, names: Collection[str], options: ServeOptions | None = None):
        """Make a reader of the processor beside a model, with the names of what the model takes of images."""
        self._processor, self._names, self.options = processor, frozenset(names), options or ServeOptions()
        self._turns = ClientTurns(MAX_AT_ONCE, MAX_AT_ONCE_PER_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "redrafter-images")
        self._processes: set[SandboxedProcess] = set()
        self._held: Counter[str] = Counter()  # bytes by client
        self._closed = False

    async def run(self, encode: Callable[[SandboxedProcess], T], client: str) -> T:
        """Encode a request with images in a thread, when it is its turn.

        A client with `MAX_AT_ONCE_PER_CLIENT` turns, or with half of `MAX_HELD_BYTES`, waits for its own requests. If
        nobody waits for a request any more, its process is ended at once, and its turn when its thread is free again.
        `encode` is called with a process that decodes the images. Raises `Stopped` once the reader is closed.
        """
        async with self._turns.of(client):
            while not self._closed and (
                self._held[client] > MAX_HELD_BYTES // 2 or self._held.total() > MAX_HELD_BYTES
            ):
                await asyncio.sleep(POLL_SECONDS)
            async with self._turns.all:
                loop = asyncio.get_running_loop()
                process = await loop.run_in_executor(self._threads, self.new_process)
                self._processes.add(process)
                try:
                    if self._closed:
                        raise Stopped
                    work = loop.run_in_executor(self._threads, encode, process)
                    try:
                        return await asyncio.shield(work)
                    except asyncio.CancelledError:
                        process.end()
                        await asyncio.gather(work, return_exceptions=True)  # its thread is free again
                        raise
                finally:
                    self._processes.discard(process)
                    process.end()

    async def count(
        self, deltas: AsyncGenerator[T, None], inputs: Mapping[str, Any], client: str
    ) -> AsyncGenerator[T, None]:
        """Yield what the engine writes, and count a client's images as held until the engine has read them."""
        size = sum(value.nbytes for value in inputs.values() if hasattr(value, "nbytes"))
        self._held[client] += size
        try:
            async for written in deltas:
                self._held[client] -= size
                size = 0
                yield written
        finally:
            self._held[client] -= size
            self._held += Counter()  # forgets clients without any
            await deltas.aclose()

    def new_process(self) -> SandboxedProcess:
        """Return a new process that decodes the images of one request."""
        limits = json.dumps({"pixels": self.options.max_image_pixels}).encode()
        return SandboxedProcess(lambda: zygote_of(self, lambda: Zygote("redrafter.serve.image_decoder", [limits])))

    def close(self) -> None:
        """End all processes: those who wait for one get `Stopped`, as does who comes later."""
        self._closed = True
        for process in tuple(self._processes):
            process.end()

    def place(
        self, text: str, urls: Sequence[str], process: SandboxedProcess | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Decode images, as `data:` URLs, and put the tokens that stand for them into a prompt.

        The chat template has put the processor's mark for each image into the prompt, in the same order. The images are
        decoded in the process, or in a new one. Returns the prompt, and what the model takes of the images.

        Raises:
            ApiError: An image is too large or is none, takes too long, or the template left one out.
            Stopped: The reader was closed meanwhile.
        """
        mark: str = self._processor.image_token
        if (places := text.count(mark)) != len(urls):
            raise ApiError(400, f"the chat template has places for {places} of {len(urls)} images", "messages")
        images = self._decode(urls, process or self.new_process())
        try:  # the processor cuts the images up and says which tokens stand for them
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
        return "".join([*pieces, text[end:]]), inputs

    def _decode(self, urls: Sequence[str], process: SandboxedProcess) -> "list[Image]":
        from PIL import Image

        payloads = [url[DATA_URL.match(url).end() :] for url in urls]  # type: ignore[union-attr]
        if (size := max(map(len, payloads)) // 4 * 3) > self.options.max_image_size + 2:
            what = f"{size} bytes; an image may have {self.options.max_image_size} (--max-image-size)"
            raise ApiError(400, f"an image is too large: {what}", "messages", "image_too_large")
        images = []
        try:
            process.connection.settimeout(WAIT_SECONDS)
            send_frame(process.connection, b"%d" % len(payloads))
            for payload in payloads:
                send_frame(process.connection, payload.encode())
            for _ in payloads:
                reply = receive_frame(process.connection)
                if reply[:1] == b"-":
                    message, code = json.loads(bytes(reply[1:]))
                    raise ApiError(400, message, "messages", code)
                width, height = struct.unpack("=II", reply[1:])
                images.append(Image.frombytes("RGB", (width, height), receive_frame(process.connection)))
        except (EOFError, OSError) as error:
            if self._closed:
                raise Stopped from error
            what = "an image takes too long or too much memory to be decoded: send it in another form"
            raise ApiError(400, what, "messages", "image_too_complex") from error
        finally:
            process.end()
        return images

    def token_types(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return which tokens of a prompt stand for images, under the name under which the model takes it, if any."""
        import torch

        types = self._processor.create_mm_token_type_ids([list(ids)])
        return {name: torch.tensor(types) for name in _TOKEN_TYPES if name in self._names}
