"""An EAGLE-3 head behind the server: each client gets what plain decoding writes for it alone."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from helpers.eagle import random_head, speculators_dir
from helpers.serving import PROMPTS, Program, offline, text_of
from redrafter.cli import main


@pytest.fixture(scope="module")
def served(pair, tmp_path_factory):
    """`redrafter serve` of the boxed base with a head that was converted."""
    place, base = tmp_path_factory.mktemp("heads"), pair[0].model.config
    head = random_head(vocab_size=base.vocab_size, hidden_size=base.hidden_size, target_layers=None)
    source = speculators_dir(place / "theirs", head)
    assert (
        main(["convert", "--drafter-model-dir", str(source), "--to", "drafter", "--output-dir", f"{place}/ours"]) == 0
    )
    program = Program("--drafter", f"{place}/ours", "--num-beams", "3", "--draft-len-per-beam", "2")
    yield program
    assert program.end() == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_clients_get_what_plain_decoding_writes(temperature, served, pair):
    def ask(index: int) -> str:
        body = {"model": "boxed", "prompt": PROMPTS[index], "max_tokens": 12, "ignore_eos": True}
        body |= {"temperature": temperature, "seed": index}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(ask, range(len(PROMPTS))))
    for index, text in enumerate(texts):
        how = {"do_sample": True, "temperature": 1.0, "seed": index} if temperature else {"do_sample": False}
        assert text == text_of(pair, offline(pair, PROMPTS[index], 12, min_new_tokens=12, **how))
    metrics = served.metrics()
    assert max(value for name, value in metrics.items() if "draft" in name and "token" in name) > 0
