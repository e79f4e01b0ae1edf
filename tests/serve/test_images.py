"""Images in chats: what a server answers is what `generate` writes, and what cannot be read is refused by name."""

import base64
import re
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("PIL")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from PIL import Image
from transformers import (
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers.chats import tiny_tokenizer
from helpers.chats_with_images import (
    TEMPLATE,
    data_url,
    image_part,
    llava_processor,
    llava_with_processor,
    picture,
    text_part,
)
from helpers.engine_in_thread import ServerHere, serving
from redrafter import PromptLookup
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.scheduler.request import RequestBounds
from redrafter.serve.config import ServeOptions
from redrafter.serve.images import ChatImageReader
from redrafter.serve.prompts import PromptEncoder
from redrafter.serve.protocol.requests import ApiError, ChatRequest

NAMES = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
NEW = 24


class Served:
    """A tiny Llava behind a server, and the same in this process.

    Attributes:
        program: The server, in this process.
        client: Its client.
    """

    def __init__(self, program: ServerHere, model: PreTrainedModel, processor: LlavaProcessor):
        self.program, self.processor = program, processor
        self.engine = PromptLookup.from_pretrained(model)
        self.client = openai.OpenAI(base_url=f"{self.program.url}/v1", api_key="none", max_retries=0)
        self.name = self.client.models.list().data[0].id

    def ask(self, *content: dict[str, Any], **more: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": NEW} | more
        messages = [{"role": "user", "content": list(content)}]
        return self.client.chat.completions.create(model=self.name, messages=messages, **settings)

    def write(self, *content: dict[str, Any], **settings: Any) -> str:
        """Return what `generate` writes of images and texts."""
        images = [part for part in content if isinstance(part, Image.Image)]
        parts = [{"type": "image"} if isinstance(part, Image.Image) else text_part(part) for part in content]
        text = self.processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        settings = settings or {"do_sample": False}
        ids = self.engine.generate(**inputs, max_new_tokens=NEW, speculate=False, **settings)
        return self.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder, pair = str(tmp_path_factory.mktemp("llava")), llava_with_processor()
    for part in pair:
        part.save_pretrained(folder)
    load = LoadOptions(model=folder, device="cpu")
    with serving(load, DraftOptions(prompt_lookup=True), max_images=3) as program:
        yield Served(program, *pair)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_an_image_is_answered_as_generate_does(served, kind):
    image = picture(1)
    if kind == "GIF":
        image = image.convert("P").convert("RGB")  # of as many colours as a GIF has
    lossless = {"lossless": True} if kind == "WEBP" else {}
    answer = served.ask(image_part(data_url(image, kind, **lossless)), text_part("What is it?"))
    assert answer.choices[0].message.content == served.write(image, "What is it?")


def test_several_images_are_read_where_they_stand(served):
    first, second = picture(2), picture(3)
    answer = served.ask(text_part("A "), image_part(first), text_part(" and "), image_part(second), text_part("?"))
    expected = served.write("A ", first, " and ", second, "?")
    assert answer.choices[0].message.content == expected
    assert expected != served.write("A ", second, " and ", first, "?")


def test_a_response_reads_the_images_of_its_input(served):
    image = picture(2)
    seen = {"type": "input_image", "image_url": data_url(image), "detail": "auto"}
    content = [{"type": "input_text", "text": "A "}, seen, {"type": "input_text", "text": "?"}]
    answer = served.client.responses.create(
        model=served.name, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=NEW
    )
    assert answer.output_text == served.write("A ", image, "?")


def block_of(image: Image.Image) -> dict[str, Any]:
    """Return an image as a block of Anthropic's protocol."""
    data = data_url(image).removeprefix("data:image/png;base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_a_message_reads_images_of_the_user_and_of_results(served):
    claude = pytest.importorskip("anthropic").Anthropic(base_url=served.program.url, api_key="none", max_retries=0)
    first, second = picture(2), picture(3)
    settings = {"model": served.name, "max_tokens": NEW, "extra_body": {"temperature": 0}}
    talk = [{"role": "user", "content": [text_part("A "), block_of(first), text_part("?")]}]
    message = claude.messages.create(messages=talk, **settings)
    assert message.content[0].text == served.write("A ", first, "?")
    counted = claude.messages.count_tokens(model=served.name, messages=talk).input_tokens
    assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens
    call = {"id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text_part("here"), block_of(second)]}
    talk += [
        {"role": "assistant", "content": [{"type": "tool_use", **call}]},
        {"role": "user", "content": [result, text_part("And?")]},
    ]
    same = [
        {"role": "user", "content": [text_part("A "), image_part(first), text_part("?")]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "here"},
        {"role": "user", "content": [image_part(second), text_part("And?")]},
    ]
    expected = served.client.chat.completions.create(model=served.name, messages=same, max_tokens=NEW, temperature=0)
    assert claude.messages.create(messages=talk, **settings).content[0].text == expected.choices[0].message.content


def test_a_sampled_answer_is_the_one_of_its_seed(served):
    image = picture(4)
    answer = served.ask(image_part(image), text_part("Go on"), temperature=1, seed=7, n=2)
    for index, choice in enumerate(answer.choices):
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 7 + index}
        assert choice.message.content == served.write(image, "Go on", **sampling)


def test_the_tokens_of_an_image_are_counted(served):
    content = [image_part(picture(7)), text_part("Go on")]
    body = {"messages": [{"role": "user", "content": content}]}
    counted = served.program.post("/tokenize", body).json()
    assert counted["tokens"].count(served.processor.image_token_id) == 4
    assert served.ask(*content).usage.prompt_tokens == counted["count"]


def test_an_image_of_a_megabyte_is_taken_and_a_stream_is_the_same_text(served):
    image = picture(8, 640, 640)
    url = data_url(image)
    assert len(url) > 1.5e6
    chunks = served.ask(image_part(url), text_part("Go on"), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == served.write(image, "Go on")


def test_clients_with_other_images_at_once_get_their_own_answers(served):
    question = "The same words behind all images, and more than a block of them?"
    images = [picture(seed) for seed in range(10, 16)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda image: served.ask(image_part(image), text_part(question)), images))
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [served.write(image, question) for image in images]
    assert len(set(texts)) > 1


def test_a_mark_that_a_user_spells_stands_for_no_image(served):
    image = picture(6)
    answer = served.ask(image_part(image), text_part("an <image> tag"))
    # As text, the mark is one token for each of its letters.
    plain = served.ask(image_part(image), text_part("an  tag")).usage.prompt_tokens
    assert answer.usage.prompt_tokens == plain + len("<image>")
    assert served.ask(text_part("Hello")).choices[0].message.content == served.write("Hello")  # a chat without images


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/cat.png", "this server fetches nothing: send the image itself, as data:image/png"),
        ("file:///etc/passwd", "this server fetches nothing"),
        ("data:text/plain;base64,aGk=", "this server fetches nothing"),
        ("data:image/png;base64,%%%", "an image is not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "an image cannot be read .* send PNG, JPEG, WEBP, GIF"),
    ],
)
def test_what_is_no_image_is_refused(served, url, says):
    with pytest.raises(openai.BadRequestError, match=says):
        served.ask(image_part(url), text_part("What is it?"))


@pytest.mark.parametrize(
    ("role", "part", "more", "says"),
    [
        ("user", {"type": "input_audio", "input_audio": {}}, {}, "Input should be a part of text or an image"),
        ("system", image_part(picture(1)), {}, "messages of the user alone"),
        ("user", image_part(picture(1), detail="high"), {}, "detail"),
        ("user", image_part(picture(1)), {"copies": 4}, "4 images in one request; at most 3"),
    ],
    ids=["audio", "system", "detail", "count"],
)
def test_other_parts_and_places_are_refused(served, role, part, more, says):
    message = {"role": role, "content": [part] * more.pop("copies", 1)}
    with pytest.raises(openai.APIStatusError, match=says) as caught:
        served.client.chat.completions.create(model=served.name, messages=[message], **more)
    assert caught.value.status_code == 400


def prompts(images: Any, template: str = TEMPLATE) -> PromptEncoder:
    tokenizer = llava_processor(template).tokenizer
    return PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 4096), images=images)


def request(*content: dict[str, Any]) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": list(content)}])


def refusal(prompts: PromptEncoder, *content: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prompts.encode_chat(request(*content))
    assert caught.value.status == 400
    return caught.value


def bomb(width: int, height: int) -> str:
    """Return a PNG that says it has so many pixels and holds none of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("limits", "parts", "says"),
    [
        (ServeOptions(max_image_pixels=1199), [image_part(picture(1))], "1200 pixels, .* may have 1199 together"),
        (ServeOptions(max_image_pixels=1300), [image_part(picture(1)), image_part(picture(2))], "1200 pixels"),
        (ServeOptions(max_image_size=1024), [image_part(picture(1))], "bytes; an image may have 1024"),
        (ServeOptions(), [image_part(bomb(20_000, 20_000))], r"too large: .*\(--max-image-pixels\)"),
        (ServeOptions(), [image_part(bomb(9000, 9000))], "81000000 pixels"),
        (ServeOptions(), [image_part(bomb(9, 9))], "cannot be read"),
        (ServeOptions(), [image_part(bomb(1, 51))], "1 x 51 pixels: one side may be 50 times as long as the other"),
    ],
    ids=["pixels", "together", "bytes", "bomb", "large", "truncated", "narrow"],
)
def test_an_image_that_is_too_large_is_refused_before_it_is_decoded(limits, parts, says):
    error = refusal(prompts(ChatImageReader(llava_processor(), NAMES, limits)), *parts)
    assert re.search(says, str(error)), str(error)


def test_images_at_their_limits_are_read():
    reader = ChatImageReader(llava_processor(), NAMES, ServeOptions(max_images=2, max_image_pixels=2400))
    _, _, images = prompts(reader).encode_chat(request(image_part(picture(1)), image_part(picture(2))))
    assert images["pixel_values"].shape == (2, 3, 28, 28)


def test_a_template_that_leaves_an_image_out_is_refused_and_one_that_reads_parts_alone_given_parts():
    template = TEMPLATE.replace("'<image>'", "''")
    error = refusal(prompts(ChatImageReader(llava_processor(), NAMES), template), image_part(picture(1)))
    assert "places for 0 of 1 images" in str(error)
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    encoder = prompts(ChatImageReader(llava_processor(), NAMES), template)
    ids = encoder.encode_chat(ChatRequest(messages=[{"role": "user", "content": "hello"}]))[0]
    assert encoder.tokenizer.decode(ids) == "hello"


def tokenizer_with(**special: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer that knows special tokens by these names."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, extra_special_tokens=special, chat_template=TEMPLATE
    )


def test_each_image_has_as_many_tokens_as_the_processor_says(monkeypatch):
    monkeypatch.setattr(Qwen2VLProcessor, "check_argument_for_proper_class", lambda *_: None)  # of videos
    tokenizer = tokenizer_with(image_token="<|image_pad|>", video_token="<|video_pad|>")
    cut = Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    reader = ChatImageReader(Qwen2VLProcessor(cut, tokenizer, None), NAMES)
    urls = [data_url(picture(1, 56, 28)), data_url(picture(2, 28, 28))]
    placed, inputs = reader.place("a<|image_pad|>b<|image_pad|>", urls)
    assert placed == "a<|image_pad|><|image_pad|>b<|image_pad|>"
    assert inputs.keys() == {"pixel_values", "image_grid_thw"}
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]]
    types = reader.token_types(tokenizer(placed).input_ids)
    assert {name: x.tolist() for name, x in types.items()} == {"mm_token_type_ids": [[0, 1, 1, 0, 1]]}


def test_a_mark_may_be_another_token_than_those_of_an_image():
    special = {"image_token": "<soft>", "boi_token": "<start>", "eoi_token": "<end>"}
    cut = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(cut, tokenizer_with(**special), image_seq_length=2)
    reader = ChatImageReader(processor, ("pixel_values", "token_type_ids"))
    placed, inputs = reader.place("a<start>b", [data_url(picture(1))])
    assert placed == "a\n\n<start><soft><soft><end>\n\nb"
    assert inputs.keys() == {"pixel_values"}
    [types] = reader.token_types(processor.tokenizer(placed).input_ids)["token_type_ids"].tolist()
    assert types == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
