"""A tiny base and a command line for tests of training."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helpers.chats import BYTES, CHAT, tiny_tokenizer, write
from redrafter import GenerateStats, RecurrentDrafter, ReDrafter
from redrafter.drafting.text_drafters import GivenTexts, TrainableDrafter
from redrafter.model.teacher import Teacher
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loss import Unroll
from redrafter.train.train_drafter import main

VOCAB, HIDDEN, CONTEXT = len(BYTES) + 6, 32, 128


def tiny_model(model_type: str = "llama", vocab: int = VOCAB, **changes: object) -> PreTrainedModel:
    """Make a tiny base with random weights; `changes` go into its config."""
    torch.manual_seed(3)
    shape = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | changes))).eval()


def random_drafter(model: PreTrainedModel, draft_ids: Tensor | None = None, **config: object) -> RecurrentDrafter:
    """Make a drafter with weights so large that every part of it matters, of the published form unless told."""
    drafter = new_drafter(model, TrainConfig(**({"recurrence": "apple"} | config)), draft_ids)
    torch.manual_seed(5)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def known_text(drafter: TrainableDrafter, length: int = 14, seed: int = 0) -> Tensor:
    """Return random tokens `[1, length]` that a drafter knows."""
    known = torch.arange(3, drafter.config.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    return known[torch.randint(len(known), (1, length), generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def trained_logits(
    drafter: TrainableDrafter, model: PreTrainedModel, tokens: Tensor, segment: Tensor | None = None, depth: int = 3
) -> Tensor:
    """Return the logits of the training's unroll at all positions of a row of tokens, `[T, K, V']`."""
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(tokens, segment)
    anchors = torch.arange(tokens.shape[1])
    position = (anchors[:, None] + torch.arange(1, depth + 1)).clamp(max=tokens.shape[1] - 1)
    given = GivenTexts(tokens, output.hidden, output.embedding, segment, anchors, position, output.table)
    factors = output.fill_head(drafter.trained_heads(drafter.unroll(given))[0])
    return sum(x @ weight.T for x, weight in zip(factors[::2], factors[1::2], strict=True))


def loss_of(
    drafter: TrainableDrafter, model: PreTrainedModel, tokens: Tensor, mask: Tensor, draft_len: int = 3
) -> Tensor:
    """Return the loss of a batch."""
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(tokens)
    return Unroll(drafter, TrainConfig(draft_len=draft_len))(tokens, mask, output).loss


def written(base: Path, drafter: Path, **settings: object) -> tuple[Tensor, GenerateStats]:
    """Return what a pair writes with branches in the tree, and the statistics of its drafts."""
    engine = ReDrafter.from_pretrained(
        base, drafter, num_beams=3, draft_len_per_beam=3, node_budget=10, draft_from_text=False
    )
    engine.pauses = False
    ids, mask = torch.tensor([[1, 30, 40, 12], [0, 0, 1, 9]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    how = {"attention_mask": mask, "max_new_tokens": 16, "return_dict_in_generate": True} | settings
    out, plain = engine.generate(ids, **how), engine.generate(ids, **how, speculate=False)
    assert torch.equal(out.sequences, plain.sequences)
    return out.sequences, out.stats


def batches_of(*masks: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Make a batch of random tokens for each mask."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(3, VOCAB, mask.shape, generator=generator), mask) for mask in masks]


def learn_circle(model: PreTrainedModel, size: int) -> Tensor:
    """Train a base to go round a circle of ids. Returns them in their order, `[size]`."""
    circle = 4 + torch.randperm(model.config.vocab_size - 4, generator=torch.Generator().manual_seed(0))[:size]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for step in range(60):
        ids = round_circle(circle, 16, step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return circle


def round_circle(circle: Tensor, rows: int, seed: int) -> Tensor:
    """Return texts that go round a circle from anywhere, `[rows, 24]`."""
    start = torch.randint(len(circle), (rows, 1), generator=torch.Generator().manual_seed(seed))
    return circle[(start + torch.arange(24)) % len(circle)]


def refused(capsys, words: list[str]) -> str:
    """Run `redrafter train`, which must end with exit code 2. Returns the error, its last line on stderr."""
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("redrafter: error: ")
    return error


def record(folder: Path) -> dict:
    """Return what the `training.json` says of the drafter that `command` has made."""
    return json.loads((folder / "out" / "training.json").read_text())


def base_dir(path: Path, **changes: object) -> str:
    """Save a tiny base with its tokenizer. Returns the path."""
    tiny_model(**({"eos_token_id": None} | changes)).save_pretrained(path)  # a random base would write the end at once
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def command(tmp_path: Path, *more: str, rows: list[object] | None = None) -> list[str]:
    """Write data and a base into a folder, and return the words of `redrafter train` that trains on them."""
    tmp_path.mkdir(exist_ok=True)
    texts = [{"text": "to be or not to be, that is it"}] * 6 + [CHAT] * 3 + [{"split": "test", "text": "q" * 40}]
    held_out = [CHAT | {"split": "val"}, {"text": "she sells sea shells", "split": "val"}]
    data = write(tmp_path / "data.jsonl", texts + held_out if rows is None else rows)
    base = tmp_path / "base"
    model = str(base) if base.exists() else base_dir(base)
    options = ["--length", "32", "--batch-size", "4", "--draft-len", "3", "--validate-tokens", "12", "--cpu"]
    return ["--model", model, "--data", data, "--output", str(tmp_path / "out"), *options, *more]
