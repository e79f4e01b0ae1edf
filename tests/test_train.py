"""The trainer: what it minimises is what drafting runs, what it reports is what decoding reports."""

import gzip
import json
import lzma
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from redrafter import DrafterConfig, RecurrentDrafter, ReDrafter
from redrafter.checkpoint import TreeShape
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.target import Target
from redrafter.train import train_drafter
from redrafter.train.config import parse, shown_command
from redrafter.train.data import Document, Windows, documents, prompts, read_rows
from redrafter.train.loss import Unroll, anchors, step_loss, targets
from redrafter.train.progress import Clock, Meter
from redrafter.train.teacher import Teacher
from redrafter.train.train_drafter import TrainConfig, main, new_drafter, train
from redrafter.train.walk import greedy_texts, walked

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB, HIDDEN, CONTEXT = len(BYTES) + 6, 32, 128

LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Writes a turn's thinking only while it is the last one, as Qwen3's does.
FORGETFUL = LLAMA_LIKE.replace("m.content }}", "(m.content if loop.last else m.content.split('</t>')[-1]) }}")

CHAT = {
    "conversations": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<t>hm</t>yes"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no"},
    ]
}


def tiny_model(model_type: str = "llama", vocab: int = VOCAB, **changes: object) -> PreTrainedModel:
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


def tiny_tokenizer(template: str | None = LLAMA_LIKE) -> PreTrainedTokenizerFast:
    """One token for each byte and each special word."""
    specials = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {word: index for index, word in enumerate([*specials, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = template
    return made


def random_drafter(model: PreTrainedModel, draft_ids: Tensor | None = None, **config: object) -> RecurrentDrafter:
    """Wide enough weights that every part of the drafter matters."""
    drafter = new_drafter(model, TrainConfig(**config), draft_ids)
    torch.manual_seed(5)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return drafter.eval()


def loss_of(model: PreTrainedModel, unroll: Unroll, tokens: Tensor, mask: Tensor, decay: float = 0.8) -> Tensor:
    with Teacher(model) as teacher:
        page = unroll.page(tokens, *reading(model, teacher, tokens))
    chosen, weight = anchors(mask, unroll.draft_len, decay)
    return unroll(chosen, weight, *page)[0] / weight.sum()


def reading(model: PreTrainedModel, teacher: Teacher, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, logits = teacher.read(tokens)
    return hidden, model.get_input_embeddings()(tokens).detach(), logits


def write(path: Path, rows: list[object]) -> str:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as file:
        file.write(lines)
    return str(path)


# What is minimised


@pytest.mark.parametrize("changes", [{}, {"rnn": False}, {"exit_dim": 24, "num_layers": 1}])
@pytest.mark.parametrize("base", ["llama", "gemma2", "gpt2"])
def test_loss_is_that_of_the_chain_that_drafting_runs(base, changes):
    """Every number is taken from `Target`, `RecurrentDrafter.step` and the definition, one at a time."""
    softcap = {"final_logit_softcapping": 3.0, "head_dim": 8} if base == "gemma2" else {}
    model = tiny_model(base, **softcap)
    target, drafter = Target(model), random_drafter(model, **changes)
    steps, distill, decay, text = 3, 0.7, 0.8, torch.randint(3, VOCAB, (1, 9))
    hidden, logits = [], []
    for length in range(1, 10):
        cache = target.new_cache(1)
        cache.reserve(length)
        with torch.no_grad():
            got = target.prefill(text[:, :length], torch.tensor([length]), cache)
        logits.append(got[0][0])
        hidden.append(got[1][0])
    total, weights = torch.zeros(()), 0.0
    for i in range(9):
        state = None
        for k in range(1, steps + 1):
            if i + k + 1 > 8:
                break
            guess, state = drafter.step(target.embed(text[0, i + k]), state, hidden[i])
            p, log_q = logits[i + k].softmax(-1), guess.log_softmax(-1)
            kl = (p * (p.log() - log_q)).sum()
            loss = distill * kl + (1 - distill) * -log_q[text[0, i + k + 1]]
            total, weights = total + decay ** (k - 1) * loss, weights + decay ** (k - 1)
    model.train()  # as a caller may leave it; there is dropout in gpt2
    found = loss_of(model, Unroll(drafter, steps, distill), text, torch.ones(1, 9, dtype=torch.bool), decay)
    torch.testing.assert_close(found, total / weights, rtol=1e-4, atol=1e-5)


def test_targets_stay_inside_one_stretch_of_the_mask():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0]]).bool()
    expected = torch.zeros(1, 9, 2, dtype=torch.bool)
    expected[0, 1, 0] = expected[0, 1, 1] = True  # pending at 2, drafts at 3 and 4
    expected[0, 2, 0] = True  # pending at 3, draft at 4
    expected[0, 5, 0] = True  # pending at 6, draft at 7
    assert torch.equal(targets(mask, 2), expected)


def test_anchors_on_a_device_weigh_what_those_on_the_host_do():
    mask = torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) < 0.7
    chosen, weight = anchors(mask, 3, 0.5, multiple=7)
    assert len(chosen) % 7 == 0 and len(chosen) > (weight[:, 0] > 0).sum() == targets(mask, 3)[..., 0].sum()
    spread = torch.zeros(33, 3).index_add(0, chosen, weight)
    assert torch.equal(spread, (targets(mask, 3) * torch.tensor([1, 0.5, 0.25])).flatten(0, 1))
    meta, all_weight = anchors(mask.to("meta"), 3, 0.5)
    assert meta.shape == (33,) and all_weight.shape == (33, 3)


def test_user_turns_and_padding_never_contribute():
    model = tiny_model()
    unroll, tokens = Unroll(random_drafter(model), 3, 0.5), torch.randint(3, VOCAB, (2, 14))
    mask = torch.tensor([[0] * 4 + [1] * 4 + [0] * 2 + [1] * 4, [1] * 9 + [0] * 5]).bool()
    with Teacher(model) as teacher:
        read = reading(model, teacher, tokens)
    chosen, weight = anchors(mask, 3, 0.8)

    def loss(ids: Tensor, hidden: Tensor, embedding: Tensor, logits: Tensor) -> Tensor:
        return unroll(chosen, weight, *unroll.page(ids, hidden, embedding, logits))[0]

    before = loss(tokens, *read)
    noise = [x + torch.randn_like(x) * ~mask[:, :, None] for x in read]
    others = torch.where(mask, tokens, tokens.flip(1))
    assert torch.equal(loss(others, read[0], *noise[1:]), before)  # a prompt's last hidden state does belong to a turn
    ours = tokens.clone()
    ours[0, 6] = (ours[0, 6] + 1) % VOCAB
    assert not torch.equal(loss(ours, *read), before)
    more = [torch.nn.functional.pad(tokens[1:], (0, pad), value=7) for pad in (0, 6)]
    wider = [torch.nn.functional.pad(mask[1:], (0, pad)) for pad in (0, 6)]
    short, padded = (loss_of(model, unroll, t, m) for t, m in zip(more, wider, strict=True))
    torch.testing.assert_close(short, padded)


def test_chunks_change_nothing():
    model = tiny_model()
    windows = Windows([Document(torch.randint(3, VOCAB, (40,)).tolist(), [True] * 40) for _ in range(8)], 40)
    trained = []
    for chunk in (1000, 7):
        config = TrainConfig(steps=3, batch_size=4, chunk=chunk, draft_len=3, cpu=True, log_every=1, weight_decay=0.1)
        drafter, lines = random_drafter(model), []
        report = train(model, drafter, windows.batches(4, 0), config, log=lines.append)
        assert report.steps == len(lines) == 3 and report.tokens == 3 * 4 * 40
        trained.append((drafter.state_dict(), report))
    (one, report), (many, other) = trained
    assert report.loss == pytest.approx(other.loss, rel=1e-5) and report.accuracy == other.accuracy
    for name, weight in one.items():
        torch.testing.assert_close(many[name], weight, rtol=1e-3, atol=2e-5)


def test_a_step_follows_the_gradient_of_the_mean():
    """Of its own batch only, whatever the number of targets and chunks, clipped to a norm."""
    model, lr = tiny_model(), 1e-12  # which leaves the weights where they are
    batches = []
    for part in (0.9, 0.4):
        mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) < part
        batches.append((torch.randint(3, VOCAB, (2, 30)), mask))
    for norm in (1e9, 0.01):
        drafter = random_drafter(model)
        config = TrainConfig(draft_len=3, chunk=9, cpu=True, lr=lr, decay=0.8, distill=0.6, max_grad_norm=norm)
        steps = []

        def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
            gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
            steps.append(torch.cat([gradient.flatten() for gradient in gradients]))  # noqa: B023

        hook = register_optimizer_step_pre_hook(record)
        train(model, drafter, batches, config, log=lambda _: None)
        hook.remove()
        for found, (tokens, mask) in zip(steps, batches, strict=True):
            drafter.zero_grad()
            loss_of(model, Unroll(drafter, 3, 0.6), tokens, mask).backward()
            weights = sorted(drafter.parameters(), key=lambda weight: weight.dim() == 1)
            expected = torch.cat([weight.grad.flatten() for weight in weights])
            expected *= min(1, norm / expected.norm())
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_a_new_drafter_starts_simple_and_sees_its_tokens():
    model = tiny_model(initializer_range=0.01)
    config = TrainConfig(exit_dim=16, num_layers=3, seed=4)
    drafter = new_drafter(model, config)
    assert not any(weight.any() for weight in drafter.layers.parameters()) and len(drafter.layers) == 3
    read = drafter.rnn_w(model.get_input_embeddings().weight)
    assert 0.7 < read.std() < 1.4 and drafter.dtype == torch.float32
    same, other = new_drafter(model, config), new_drafter(model, replace(config, seed=5))
    assert torch.equal(same.lm_head.weight, drafter.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, drafter.lm_head.weight)


def test_a_reduced_vocabulary_meets_the_teacher_on_its_own_ids():
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([4, 9, 30, 31, 200])
    model = tiny_model()
    drafter = random_drafter(model, ids)
    unroll = Unroll(drafter, 2, 0.5)
    tokens = torch.tensor([[5, 4, 9, 77, 31, 30]])
    logits = torch.randn(1, 6, VOCAB, generator=generator)
    hidden = embedding = torch.randn(1, 6, HIDDEN, generator=generator)
    *_, teacher, labels = unroll.page(tokens, hidden, embedding, logits)
    assert torch.equal(teacher, logits[0, :, ids]) and labels.tolist() == [-1, 0, 1, -1, 3, 2]
    guess = torch.randn(6, 5, generator=generator)
    p = logits[0, :, ids].softmax(-1)
    kl = (p * (p.log() - guess.log_softmax(-1))).sum(-1)
    known = labels >= 0
    hard = torch.where(known, cross_entropy(guess, labels.clamp(min=0), reduction="none"), 0)
    torch.testing.assert_close(step_loss(guess, teacher, labels, 0.25), 0.25 * kl + 0.75 * hard)
    torch.testing.assert_close(step_loss(guess, teacher, labels, 0.0), hard)
    torch.testing.assert_close(step_loss(guess, teacher, labels, 1.0), kl)


def test_accuracy_is_conditional_on_the_steps_before():
    model = tiny_model()
    drafter = random_drafter(model)
    unroll, tokens = Unroll(drafter, 3, 1.0), torch.randint(3, VOCAB, (1, 30))
    guesses = torch.zeros(30, VOCAB)
    right = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]] * 7).bool()  # by anchor 0..27 and step

    def step(embedding: Tensor, state: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        k = 0 if state is None else int(state[0, 0])
        rows = torch.arange(len(embedding))
        said = tokens[0, (rows + k + 2).clamp(max=29)] + ~right[rows, k]
        return guesses[: len(rows)].index_put((rows, said % VOCAB), torch.ones(())), torch.full((len(rows), 1), k + 1)

    drafter.forward = step
    chosen, weight = anchors(torch.ones(1, 30, dtype=torch.bool), 3, 0.9)
    hidden = torch.zeros(1, 30, HIDDEN)
    _, (seen, hit) = unroll(chosen, weight, *unroll.page(tokens, hidden, hidden, torch.zeros(1, 30, VOCAB)))
    alive = [right[:28, 0], right[:27, :2].all(1), right[:26].all(1)]
    assert hit.tolist() == [int(x.sum()) for x in alive]
    assert seen.tolist() == [28, int(alive[0][:27].sum()), int(alive[1][:26].sum())]


# Data


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_only_assistant_turns_are_in_the_mask(tmp_path, key):
    tokenizer = tiny_tokenizer()
    (row,) = read_rows([write(tmp_path / "a.jsonl", [{key: CHAT["conversations"], "id": 3}])])
    (document,) = documents(row, tokenizer)
    whole = tokenizer.apply_chat_template(CHAT["conversations"], tokenize=True, return_dict=False)
    assert document.ids == whole
    learnt = tokenizer.decode([i for i, m in zip(document.ids, document.mask, strict=True) if m])
    assert learnt == "<t>hm</t>yes</s>\nno</s>\n"


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each(tmp_path):
    tokenizer = tiny_tokenizer(FORGETFUL)
    (row,) = read_rows([write(tmp_path / "a.jsonl.gz", [CHAT])])
    first, second = documents(row, tokenizer)
    learnt = [tokenizer.decode([i for i, m in zip(d.ids, d.mask, strict=True) if m]) for d in (first, second)]
    assert learnt == ["<t>hm</t>yes</s>\n", "no</s>\n"]
    said = "<s><|user|>\nhi\n<|assistant|>\nyes</s>\n<|user|>\nand?\n<|assistant|>\nno</s>\n"
    assert tokenizer.decode(second.ids) == said


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("[]", "has one of"),
        ({"text": "abc", "messages": []}, "has one of"),
        ({"text": 3}, "must be a string"),
        ({"text": "a"}, "too short"),
        ({"text": "abc", "split": "dev"}, "split"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
        ({"messages": [{"role": "user"}]}, '"content"'),
        ({"messages": "hello"}, '"role"'),
    ],
)
def test_a_bad_row_names_its_file_and_line(tmp_path, line, said):
    file = write(tmp_path / "a.jsonl.xz", [{"text": "fine"}, "", line])
    with pytest.raises(CheckpointError, match=said) as caught:
        for row in read_rows([file]):
            list(documents(row, tiny_tokenizer()))
    assert f"{file}:3:" in str(caught.value)


def test_files_and_templates_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone.jsonl cannot be read"):
        list(read_rows([tmp_path / "gone.jsonl"]))
    whole = Path(write(tmp_path / "a.jsonl.xz", [{"text": "abc"}] * 99)).read_bytes()
    (tmp_path / "cut.jsonl.xz").write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match=r"cut.jsonl.xz cannot be read"):
        list(read_rows([tmp_path / "cut.jsonl.xz"]))
    (row,) = read_rows([write(tmp_path / "b.jsonl", [CHAT])])
    unlike = LLAMA_LIKE.replace("{{ '<|assistant|>\n' }}", "Answer:")
    for template, said in ((None, "template fails"), ("{{ nobody() }}", "template fails"), (unlike, "does not write")):
        with pytest.raises(CheckpointError, match=said) as caught:
            list(documents(row, tiny_tokenizer(template)))
        assert "b.jsonl:1" in str(caught.value)


def test_long_documents_are_cut_and_open_as_every_prompt_does():
    text = Document([1, *range(10, 33)], [True] * 24)
    windows = Windows([text, Document([40, 41, 42], [True] * 3)], length=10, bos=1)
    rows = [windows._collate([index]) for index in range(len(windows))]
    assert [row[0].tolist() for row, _ in rows] == [
        [1, *range(10, 19)],
        [1, *range(19, 28)],
        [1, *range(28, 33)],
        [40, 41, 42],
    ]
    assert [mask[0].tolist() for _, mask in rows[:1]] == [[False] + [True] * 9]
    assert windows.counts(50)[10:33].tolist() == [1] * 23 and windows.counts(50)[1] == 0
    silent = Document(list(range(30)), [False] * 10 + [True] * 5 + [False] * 15)
    assert [len(row) for row in Windows([silent], length=10).ends.diff().split(1)] == [1]  # two windows teach nothing


def test_an_epoch_sees_every_window_once_in_a_seeded_order():
    windows = Windows([Document([n + 3] * (5 + n % 9), [True] * (5 + n % 9)) for n in range(24)], 100)

    def epoch(seed: int, process: int = 0, processes: int = 1) -> list[int]:
        batches, count = windows.batches(4, seed, process, processes), 6 // processes
        return [int(row[0]) - 3 for _ in range(count) for row in next(batches)[0]]

    assert sorted(epoch(0)) == list(range(24)) and epoch(0) == epoch(0) != epoch(1)
    assert sorted(epoch(0, 0, 2) + epoch(0, 1, 2)) == list(range(24))
    tokens, mask = next(Windows([Document([5] * 4, [True] * 4)], 9).batches(3, 0))
    assert tokens.shape == mask.shape == (3, 4)  # fewer windows than a batch: they repeat


def test_a_prompt_ends_where_the_assistant_begins(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = list(read_rows([write(tmp_path / "a.jsonl", [CHAT, {"text": "x" * 300}])]))
    found = {tokenizer.decode(ids) for ids in prompts(rows, tokenizer, count=9, longest=70, seed=0)}
    assert found == {"<s><|user|>\nhi\n<|assistant|>\n", "x" * 64}
    assert len(prompts(rows, tokenizer, count=1, longest=70, seed=0)) == 1


# What it learns, and what it reports


@pytest.fixture(scope="module")
def patterned() -> PreTrainedModel:
    """A base that has learnt to go round a circle of 40 ids."""
    model = tiny_model(vocab=48, initializer_range=0.05).train()
    circle = 4 + torch.randperm(40, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        start = torch.randint(40, (16, 1), generator=torch.Generator().manual_seed(step))
        ids = circle[(start + torch.arange(24)) % 40]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.circle = circle
    return model.eval()


def test_a_few_steps_of_training_are_worth_many_tokens(patterned):
    target, circle = Target(patterned), patterned.circle
    config = TrainConfig(steps=80, draft_len=4, cpu=True, lr=1e-2, log_every=40, validate_every=40)
    drafter = new_drafter(patterned, config)
    texts, starts = greedy_texts(target, [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20)

    def batches():
        generator = torch.Generator().manual_seed(0)
        while True:
            start = torch.randint(40, (8, 1), generator=generator)
            yield circle[(start + torch.arange(24)) % 40], torch.ones(8, 24, dtype=torch.bool)

    seen = []

    def validate() -> None:
        seen.append(walked(drafter.eval(), target, texts, starts, 3, 4, 13).tokens_per_step)
        drafter.train()

    validate()
    frozen = {name: weight.clone() for name, weight in patterned.state_dict().items()}
    report = train(patterned, drafter, batches(), config, validate=validate, log=lambda _: None)
    assert len(seen) == 3 and seen[0] < 1.5 < 3.5 < seen[-1]
    assert report.accuracy[0] > 0.9 and report.accuracy[3] > 0.8 and not drafter.training
    assert all(torch.equal(weight, frozen[name]) for name, weight in patterned.state_dict().items())


@pytest.mark.parametrize("shape", [(3, 4, 13), (5, 2, 6), (1, 3, 4)])
def test_walked_is_what_generate_reports(patterned, shape):
    """On unequal prompts and texts, some of which end early."""
    beams, depth, nodes = shape
    for model in (patterned, tiny_model()):
        target = Target(model)
        drafter = random_drafter(model)
        if model is patterned:
            circle = model.circle
            config = TrainConfig(steps=25, draft_len=3, cpu=True, lr=1e-2)
            start = torch.arange(0, 40, 5)[:, None]
            batch = circle[(start + torch.arange(24)) % 40], torch.ones(8, 24, dtype=torch.bool)
            train(model, drafter, [batch] * 25, config, log=lambda _: None)
        generator = torch.Generator().manual_seed(2)
        size = model.config.vocab_size
        prompts = [torch.randint(3, size, (n,), generator=generator).tolist() for n in (1, 9, 4, 17, 6)]
        texts, starts = greedy_texts(target, prompts, 23)
        walk = walked(drafter, target, texts, starts, beams, depth, nodes)
        engine = ReDrafter(target, drafter, TreeShape(beams, depth, nodes))
        rows = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = torch.tensor([prompt])
            out = engine.generate(ids, do_sample=False, max_new_tokens=23, return_dict_in_generate=True)
            assert out.sequences[0].tolist() == text
            rows.append(out.stats)
        assert walk.steps == sum(row.steps for row in rows) > 0
        assert walk.emitted == sum(row.emitted for row in rows)
        assert walk.drafted == sum(row.drafted for row in rows)
        depths = zip(*(row.accepted_by_depth for row in rows), strict=True)
        assert walk.accepted_by_depth == [sum(depth) for depth in depths]
        if model is patterned:
            assert walk.accepted > 0


def test_walking_ends_with_the_text(monkeypatch):
    """A drafter that says 0 forever, on texts of zeros: what stands past a text's end must not look like more of it."""
    model = tiny_model()
    drafter = random_drafter(model)
    zero = torch.zeros(VOCAB).index_fill(0, torch.tensor(0), 1.0)
    monkeypatch.setattr(drafter, "step", lambda e, s, h: (zero.expand(*e.shape[:-1], VOCAB), e))
    walk = walked(drafter, Target(model), [[5] + [0] * 7, [5, 0, 0]], [1, 1], beams=1, depth=3, nodes=4)
    # The first: three drafts and one more, then the two that are left. The second: the one that is left.
    assert (walk.steps, walk.emitted, walk.accepted_by_depth) == (3, 7, [3, 2, 1])


def test_training_stops_at_its_minutes_its_steps_or_its_batches():
    model = tiny_model()
    batch = torch.randint(3, VOCAB, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    config, quiet = TrainConfig(draft_len=2, cpu=True), {"log": lambda _: None}
    assert train(model, random_drafter(model), [batch] * 3, config, **quiet).steps == 3
    assert train(model, random_drafter(model), [batch] * 9, replace(config, steps=4), **quiet).steps == 4

    def forever():
        while True:
            yield batch

    report = train(model, random_drafter(model), forever(), replace(config, minutes=0.005), **quiet)
    assert 0.3 <= report.seconds < 3 and report.steps > 2


def test_progress_is_of_the_steps_since_the_last_line():
    meter, counts = Meter(2, torch.device("cpu")), torch.tensor([[4, 2], [2, 1]])
    for loss in (6.0, 2.0):
        meter.add(0, torch.tensor(loss), counts)
    meter.weigh(torch.tensor(4.0))
    meter.read()
    assert (meter.loss, meter.accuracy) == (2.0, [0.5, 0.5])
    meter.add(1, torch.tensor(3.0), torch.tensor([[4, 0], [0, 0]]))
    meter.weigh(torch.tensor(1.0))
    meter.read()
    meter.read()  # nothing new: what was read stands
    assert (meter.loss, meter.accuracy) == (3.0, [0.0, 0.0])
    clock = Clock(TrainConfig(minutes=1.0), train_drafter.new_accelerator(TrainConfig(cpu=True)))
    with clock.stopped():
        time.sleep(0.2)
    assert clock.seconds < 0.1


def test_a_loss_that_is_not_finite_stops_and_names_its_step():
    model = tiny_model()
    batch = torch.randint(3, VOCAB, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    drafter, config = random_drafter(model), TrainConfig(draft_len=2, cpu=True, steps=30, log_every=10)

    def batches():
        for step in range(30):
            if step == 6:
                drafter.lm_head.weight.data.fill_(float("nan"))
            yield batch

    with pytest.raises(ArgumentError, match="not finite at step 7;"):
        train(model, drafter, batches(), config, log=lambda _: None)


# The command


def base_dir(path: Path, **changes: object) -> str:
    tiny_model(**({"eos_token_id": None} | changes)).save_pretrained(path)  # which a random base would say at once
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def command(tmp_path: Path, *more: str, rows: list[object] | None = None) -> list[str]:
    texts = [{"text": "to be or not to be, that is it"}] * 6 + [CHAT] * 3 + [{"split": "test", "text": "q" * 40}]
    held = [CHAT | {"split": "val"}, {"text": "she sells sea shells", "split": "val"}]
    data = write(tmp_path / "data.jsonl", texts + held if rows is None else rows)
    base = tmp_path / "base"
    model = str(base) if base.exists() else base_dir(base)
    options = ["--length", "32", "--batch-size", "4", "--draft-len", "3", "--validate-tokens", "12", "--cpu"]
    return ["--model", model, "--data", data, "--output", str(tmp_path / "out"), *options, *more]


def test_the_command_makes_a_directory_that_loads(tmp_path, capsys):
    assert main(command(tmp_path, "--epochs", "2", "--exit-dim", "16", "--draft-vocab-size", "40")) == 0
    out, said = tmp_path / "out", capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl", "out"]
    drafter = RecurrentDrafter.from_pretrained(out)
    config = drafter.config
    assert (config.trained_draft_len, config.draft_len_per_beam, config.exit_dim) == (3, 3, 16)
    assert config.base_model == "base" and len(config.base_embedding_norms) == 8 and drafter.dtype == torch.float32
    learnt = {token for token in range(VOCAB) if token in drafter.draft_ids}
    assert {6 + BYTES.index(letter) for letter in "tobe"} < learnt and 6 + BYTES.index("q") not in learnt
    engine = ReDrafter.from_pretrained(tmp_path / "base", out)
    ids = torch.tensor([[1, 30, 40]])
    expected = engine.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert "frozen" in said and "12 windows" in said and "walked" in said
    card = (out / "README.md").read_text()
    assert "library_name: redrafter\nbase_model: base\n" in card and "data.jsonl" in card
    assert str(tmp_path) not in card and "--draft-vocab-size 40" in card and "tokens per step" in card
    assert "from 2 held-out prompts (5 beams x 3 tokens, 16 nodes)" in card

    more = ["--steps", "2", "--drafter", str(out), "--save-dtype", "bfloat16", "--validate-prompts", "0"]
    again = command(tmp_path, *more)
    assert main(again) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*again, "--overwrite"]) == 0
    assert RecurrentDrafter.from_pretrained(out).dtype == torch.bfloat16
    assert "not measured" in (out / "README.md").read_text()
    mute = base_dir(tmp_path / "mute", eos_token_id=list(range(VOCAB)))
    assert main(command(tmp_path, "--steps", "1", "--overwrite", "--model", mute)) == 0
    assert "not measured" in (out / "README.md").read_text() and "walked 0" not in capsys.readouterr().out


def test_what_a_user_can_mend_exits_with_2_and_one_line(tmp_path, capsys):
    def fails(said: str, *more: str, rows: list[object] | None = None) -> None:
        assert main(command(tmp_path, *more, rows=rows)) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("redrafter train: error: ") and said in error
        assert not (tmp_path / "out").exists()

    fails("data.jsonl:2: not JSON", rows=[{"text": "fine enough"}, "{"])
    fails("no row to train on", rows=[{"text": "fine enough", "split": "val"}])
    fails("--batch-size must be positive, got 0", "--batch-size", "0")
    fails("--distill must be from 0 to 1, got 1.5", "--distill", "1.5")
    fails("--draft-vocab-size 9999 is more", "--draft-vocab-size", "9999")
    fails("cannot load", "--model", str(tmp_path / "gone"))
    RecurrentDrafter(DrafterConfig(vocab_size=VOCAB, hidden_size=8)).save_pretrained(tmp_path / "other")
    fails("hidden size of 8", "--drafter", str(tmp_path / "other"))
    fails("--exit-dim is the drafter's own", "--drafter", str(tmp_path / "other"), "--exit-dim", "8")
    fails("not finite at step 2", "--lr", "1e30", "--steps", "4", "--warmup", "0", "--max-grad-norm", "1e30")
    base_dir(tmp_path / "small", vocab_size=50)
    fails("the base knows 50 ids", "--model", str(tmp_path / "small"))


def test_nothing_is_left_behind_when_saving_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert main(command(tmp_path, "--overwrite")) == 2 and "no drafter" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    (tmp_path / "out" / "thesis.txt").unlink()

    def broken(_: object, folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(RecurrentDrafter, "save_pretrained", broken)
    with pytest.raises(OSError, match="disk full"):
        main(command(tmp_path, "--steps", "1"))
    assert not list((tmp_path / "out").iterdir()) and sorted(p.name for p in tmp_path.glob(".*")) == []


def test_flags_and_fields_have_the_same_defaults():
    given = parse(["--model", "m", "--data", "a/x.jsonl", "y.jsonl", "--output", "o"])
    assert given == TrainConfig(model="m", data=("a/x.jsonl", "y.jsonl"), output="o")
    words = "--model m --data a/x.jsonl --output b/o --no-rnn --steps 7 --lr 0.5 --compile"
    changed = parse(words.split(" "))
    assert not changed.rnn and changed.steps == 7 and changed.compile
    shown = shown_command(changed)
    assert shown.startswith("redrafter train --model m --data x.jsonl --output o ")
    assert parse(shown.split()[2:]) == replace(changed, data=("x.jsonl",), output="o")
    with pytest.raises(SystemExit) as caught:
        parse(["--model", "m"])
    assert caught.value.code == 2
