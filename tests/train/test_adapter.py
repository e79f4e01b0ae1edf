"""Commands on a base with a LoRA adapter: what they read and write is what PEFT's model writes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.adapters import adapted
from helpers.models import tiny_model
from helpers.training import command
from redrafter import UnsupportedError, boxed_pair
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.cli import main
from redrafter.files.checkpoint_kind import split_adapter
from redrafter.train import train_drafter

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_merged_adapter_is_what_the_peft_model_computes(architecture, tmp_path):
    targets = {"target_modules": ["c_attn"]} if architecture == "gpt2" else {}
    model = adapted(architecture, **targets)
    model.save_pretrained(tmp_path)
    merged = tiny_model(architecture)
    merge_adapter(merged, tmp_path)
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, model(input_ids=IDS).logits, atol=1e-3)


def test_an_adapter_is_not_merged_into_quantised_weights(tmp_path):
    adapted().save_pretrained(tmp_path)
    model = tiny_model("llama")
    layer = model.model.layers[1].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    with pytest.raises(UnsupportedError, match=r"layers.1.self_attn.q_proj, which is quantised"):
        merge_adapter(model, tmp_path)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)


def test_a_name_may_stand_before_a_directory(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert split_adapter("poems=some/dir") == ("poems", "some/dir")
    assert split_adapter(str(tmp_path / "dir")) == ("dir", str(tmp_path / "dir"))
    assert split_adapter(str(tmp_path / "a=b")) == ("a=b", str(tmp_path / "a=b"))


def test_a_drafter_is_trained_for_the_base_with_its_adapter(tmp_path, monkeypatch):
    words = command(tmp_path, "--steps", "1", "--adapter", str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted(model=base)
    model.save_pretrained(tmp_path / "adapter")
    taught, train = [], train_drafter.train

    def watched(base, *arguments, **more):
        with torch.no_grad():
            taught.append(base(input_ids=IDS).logits)
        return train(base, *arguments, **more)

    monkeypatch.setattr(train_drafter, "train", watched)
    assert main(["train", *words]) == 0
    with torch.no_grad():
        assert torch.allclose(taught[0], model(input_ids=IDS).logits, atol=1e-3)
    assert json.loads((tmp_path / "out" / "training.json").read_text())["config"]["adapter"] == "adapter"


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    """A `PeftModel` on the boxed base, and its directory."""
    model = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    model, folder = adapted(model=model, lora_alpha=2), tmp_path_factory.mktemp("boxed") / "poems"
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(boxed_pair())


def expected(model, tokenizer, prompt):
    """Return what a `PeftModel` writes greedily after a prompt."""
    ids = torch.tensor([tokenizer(prompt).input_ids])
    return tokenizer.decode(model.generate(input_ids=ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :])


def test_generate_writes_with_an_adapter(boxed, tokenizer, capsys):
    model, folder = boxed
    words = ["generate", "--json", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "16"]
    assert main([*words, "--temperature", "0", "--adapter", f"name={folder}", "Once upon a time"]) == 0
    [text] = json.loads(capsys.readouterr().out)["texts"]
    assert text == expected(model, tokenizer, "Once upon a time")


def test_regenerate_answers_with_an_adapter(boxed, tmp_path):
    model, folder = boxed
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "Once upon a time there was a committee, and it met. " * 3}) + "\n")
    words = ["--model", str(boxed_pair()), "--device", "cpu", "--dtype", "float32", "--temperatures", "0"]
    files = ["--data", str(rows), "--output", str(tmp_path / "own.jsonl"), "--adapter", str(folder)]
    assert main(["regenerate", *words, *files, "--max-new-tokens", "16"]) == 0
    row = json.loads((tmp_path / "own.jsonl").read_text())
    ids = torch.tensor([row["input_ids"][: row["loss_mask"].index(1)]])
    text = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False)[0].tolist()
    assert row["input_ids"][: len(text)] == text


def test_evaluate_measures_with_an_adapter(boxed, tmp_path):
    (tmp_path / "prompts.txt").write_text("Once upon a time\nThe old man looked at the sea and\n")
    words = ["--device", "cpu", "--prompts", str(tmp_path / "prompts.txt"), "--new-tokens", "8", "--temperatures", "0"]
    words += ["--shapes", "5x5", "--node-budgets", "12"]
    found = []
    for more in ([], ["--adapter", str(boxed[1])]):
        assert main(["evaluate", *words, *more, "--json", str(tmp_path / "report.json")]) == 0
        found.append(json.loads((tmp_path / "report.json").read_text().splitlines()[0])["accepted_by_depth"])
    assert found[0] != found[1]
