"""The self-test of a model that is being bound: what it computes, and what it does not compute again."""

import copy
import json
import os

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from torch.nn import functional

from redrafter import PromptLookup, UnsupportedError
from redrafter.checkpoints.models import bind, load_model
from redrafter.files.home import HOME, KeptResults
from redrafter.kernels.grouped_linear import multiply_grouped
from redrafter.kernels.grouped_weight import quantize_groups
from redrafter.model import float32_mode, passed_tests, self_test
from redrafter.model.float32_mode import InFloat32


class Counting(InFloat32):
    """Records the shape of every tensor that is converted."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.shapes, convert = [], torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: (self.shapes.append(tuple(x.shape)), convert(x))[1])


def test_in_float32_only_the_rows_of_a_table_that_are_read_are_converted(monkeypatch):
    table, ids = nn.Embedding(50, 4, dtype=torch.bfloat16), torch.tensor([[3, 7]])
    expected = functional.embedding(ids, table.weight.float())
    with torch.no_grad(), Counting(monkeypatch) as mode:
        assert torch.equal(table(ids), expected)
    assert mode.shapes == [(1, 2, 4)]


def test_in_float32_a_weight_is_converted_once_unless_the_copy_was_written_to(monkeypatch):
    layer, x = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16), torch.ones(1, 4)
    expected = functional.linear(x, layer.weight.float())
    with torch.no_grad(), Counting(monkeypatch) as mode:
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)
        assert mode.shapes == [(6, 4)]
        copy = layer.weight.to(torch.float32)  # code that is right without the mode, which gives it a copy of its own
        copy += 1
        assert torch.equal(layer(x), expected)


def test_in_float32_a_product_with_grouped_weights_reads_scales_as_they_are_stored():
    weight = quantize_groups(torch.randn(64, 64), 4)
    parts, x = (weight.codes, weight.scale, weight.minimum, None), torch.randn(14, 64)
    expected = multiply_grouped(x, *parts)
    with InFloat32():
        assert torch.equal(multiply_grouped(x, *parts), expected)


@pytest.mark.parametrize("limit", [0, 4 * 24])
def test_in_float32_no_more_memory_is_held_than_the_limit(monkeypatch, limit):
    monkeypatch.setattr(float32_mode, "MAX_HELD_BYTES", limit)
    layers, x = [nn.Linear(4, 6, bias=False, dtype=torch.bfloat16) for _ in range(2)], torch.ones(1, 4)
    with torch.no_grad(), Counting(monkeypatch) as mode:
        for layer in layers * 2:
            layer(x)
    assert len(mode.shapes) == 4 - limit // 96


@pytest.fixture
def tests_run(monkeypatch, tmp_path):
    """Return a list to which each self-test adds an entry, with a folder for results."""
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    run, trials = [], self_test.SelfTest.run_trials
    monkeypatch.setattr(self_test.SelfTest, "run_trials", lambda *args, **kw: (run.append(1), trials(*args, **kw))[1])
    return run


def bound(folder, **load):
    target = bind(folder, **{"dtype": "float32", "device": "cpu", "trust_remote_code": False} | load)
    assert target.paged.ok
    return target


def test_a_model_that_passed_is_not_tested_again_until_a_file_or_the_dtype_or_a_version_changes(
    llama, tmp_path, tests_run, monkeypatch
):
    llama.save_pretrained(tmp_path / "m")
    first = bound(tmp_path / "m")
    assert len(tests_run) == 2
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "SelfTest", None)
        again = bound(tmp_path / "m")
    assert again.shapes == first.shapes
    assert again.paged_shapes == first.paged_shapes
    assert again.prompt_reader.masks_on_dense == first.prompt_reader.masks_on_dense
    bound(tmp_path / "m", dtype="bfloat16")
    bound(tmp_path / "m", attn_implementation="eager")
    assert len(tests_run) == 6
    with monkeypatch.context() as patch:
        patch.setattr(passed_tests.transformers, "__version__", "5.99")
        bound(tmp_path / "m")
    assert len(tests_run) == 8
    os.utime(tmp_path / "m" / "model.safetensors", ns=(1, 1))
    bound(tmp_path / "m")
    assert len(tests_run) == 10


def test_a_repository_of_the_hub_is_not_tested_again_by_an_engine(llama, tmp_path, tests_run, monkeypatch):
    folder = tmp_path / "hub" / "models--some-org--llama"
    llama.save_pretrained(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for _ in range(2):
        PromptLookup.from_pretrained("some-org/llama", device="cpu")
        assert len(tests_run) == 1
    os.utime(folder / "snapshots" / "abc" / "model.safetensors", ns=(1, 1))
    PromptLookup.from_pretrained("some-org/llama", device="cpu")
    assert len(tests_run) == 2


@pytest.mark.parametrize("content", ["", "[]", "{DIGEST: 1}", '{DIGEST: {"dense": {"masks": 1, "contiguous": false}}}'])
def test_a_result_that_cannot_be_read_is_found_again(llama, tmp_path, tests_run, content):
    llama.save_pretrained(tmp_path / "m")
    bound(tmp_path / "m")
    file = tmp_path / "home" / "passed-tests.json"
    (digest,) = json.loads(file.read_text())
    file.write_text(content.replace("DIGEST", json.dumps(digest)))
    bound(tmp_path / "m")
    assert len(tests_run) == 4
    bound(tmp_path / "m")
    assert len(tests_run) == 4


def test_a_refusal_is_not_kept(llama, tmp_path, tests_run, monkeypatch):
    llama.save_pretrained(tmp_path / "m")
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(UnsupportedError, match="other logits"):
            patch.setattr(self_test, "_EXACT", (-1.0, -1.0))
            bound(tmp_path / "m")
    assert len(bound(tmp_path / "m").shapes)
    assert len(tests_run) >= 6


def test_plain_forwards_of_trials_run_once_for_both_caches(llama, tmp_path, tests_run, monkeypatch):
    forwards, paths = [], self_test._paths  # noqa: SLF001
    monkeypatch.setattr(self_test, "_paths", lambda nodes: (forwards.append(1), paths(nodes))[1])
    copy.deepcopy(llama).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    bound(tmp_path / "m", dtype="bfloat16")
    assert len(tests_run) == 2
    assert len(forwards) == 5  # two prompts in bfloat16 and in float32, and a far trial


def test_what_files_do_not_decide_is_tested_each_time(llama, tmp_path, tests_run, monkeypatch):
    llama.save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m", dtype="float32", device="cpu", trust_remote_code=False)
    bound(model)
    bound(model)
    bound(tmp_path / "m", config=model.config)
    bound(tmp_path / "m", config=model.config)
    assert not (tmp_path / "home").exists()
    forward = type(model.model.norm).forward
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: forward(self, x))
    bound(tmp_path / "m")
    assert not (tmp_path / "home").exists()
    assert len(tests_run) == 10


def test_the_oldest_results_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(passed_tests, "RESULTS", KeptResults("passed-tests.json", 2))
    for digest in "abac":
        passed_tests.PassedTests(digest).keep("paged")
    assert [passed_tests.PassedTests(digest).find("paged") for digest in "abc"] == [{}, None, {}]
