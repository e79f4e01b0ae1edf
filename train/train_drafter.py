"""Train a recurrent drafter for any Hugging Face causal LM. The base stays as it is.

    accelerate launch train/train_drafter.py --model BASE --data chat.jsonl --output drafter --mixed-precision bf16
    python train/train_drafter.py --model TINY --data text.jsonl --output drafter --length 128 --steps 200

`redrafter train` is the same. `train` is the loop, for programs with a model and batches of their own.
"""

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from redrafter.checkpoint import check_fit, embedding_norms, load_model, load_tokenizer
from redrafter.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, ReDrafterError
from redrafter.outputs import Stats
from redrafter.target import Target
from redrafter.train.card import Report, model_card, shape, sizes
from redrafter.train.config import TrainConfig, parse
from redrafter.train.data import Windows, documents, prompts, read_rows
from redrafter.train.loss import Unroll, anchors
from redrafter.train.output import check_output, save
from redrafter.train.progress import Clock, Meter
from redrafter.train.teacher import Teacher
from redrafter.train.walk import greedy_texts, walked

__all__ = ["Report", "TrainConfig", "main", "new_drafter", "train"]


def train(
    model: PreTrainedModel,
    drafter: RecurrentDrafter,
    batches: Iterable[tuple[Tensor, Tensor]],
    config: TrainConfig,
    *,
    accelerator: Accelerator | None = None,
    validate: Callable[[], object] | None = None,
    log: Callable[[str], object] = print,
) -> Report:
    """Train `drafter` in place, for `config.steps`, for `config.minutes`, or as long as there are batches.

    model: the base; it is moved to the accelerator's device. batches: token ids `[B, T]` int64 and mask `[B, T]` bool,
    true on the tokens that the base itself is to write; on the host, or on the device already. validate: called every
    `config.validate_every` steps on the main process; its time is not counted. Apart from that and from a line of
    progress, the host never waits for the device. Raises `ArgumentError` naming the step whose loss was not finite.
    """
    accelerator = accelerator or new_accelerator(config)
    device = accelerator.device
    unroll = Unroll(drafter.train(), config.draft_len, config.distill, config.compile)
    wrapped, optimizer = accelerator.prepare(unroll, _optimizer(drafter, config, device))
    embedding = model.to(device).get_input_embeddings()
    clock, meter = Clock(config, accelerator), Meter(config.draft_len, device)
    with Teacher(model) as teacher:
        for tokens, mask in batches:
            done = clock.done()
            if done >= 1:
                break
            rate = config.lr * _schedule(done, config.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate

            chosen, weight = anchors(mask, config.draft_len, config.decay, config.chunk if config.compile else 1)
            chosen, weight, tokens = (x.to(device, non_blocking=True) for x in (chosen, weight, tokens))  # [A], [A, K]
            hidden, logits = teacher.read(tokens)  # [B, T, D], [B, T, V]
            with torch.no_grad():
                page = unroll.page(tokens, hidden, embedding(tokens), logits)
            total = accelerator.reduce(weight.sum(), "mean")
            chunks = list(zip(chosen.split(config.chunk), weight.split(config.chunk), strict=True))
            for index, chunk in enumerate(chunks):
                # Each chunk goes back at once, so only its own logits are alive. Processes meet at the last one.
                last = index == len(chunks) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    loss, counts = wrapped(*chunk, *page)
                    accelerator.backward(loss / total)
                meter.add(clock.step, loss.detach(), counts)
            meter.weigh(weight.sum())
            accelerator.clip_grad_norm_(drafter.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

            clock.tick(tokens.numel() * accelerator.num_processes)
            if clock.step == 1:
                meter.read()  # waits: the first step compiles, and is not to be counted
                clock.start()
            if clock.step % config.log_every == 0:
                meter.read()
                if accelerator.is_main_process:
                    log(f"{clock}  {meter}  lr {rate:.1e}")
            if validate is not None and config.validate_every and clock.step % config.validate_every == 0:
                with clock.stopped():
                    if accelerator.is_main_process:
                        validate()
                    accelerator.wait_for_everyone()
    meter.read()
    drafter.eval()
    return Report(clock.step, clock.tokens, clock.seconds, meter.loss, meter.accuracy)


def new_accelerator(config: TrainConfig) -> Accelerator:
    """As `accelerate launch` configured it, but for what `config` says itself."""
    # With one draft step the matrix that carries the recurrence on has no gradient.
    handler = DistributedDataParallelKwargs(find_unused_parameters=config.draft_len == 1)
    return Accelerator(mixed_precision=config.mixed_precision, cpu=config.cpu, kwargs_handlers=[handler])


def new_drafter(model: PreTrainedModel, config: TrainConfig, draft_ids: Tensor | None = None) -> RecurrentDrafter:
    """An untrained float32 drafter for a base, on the host. draft_ids: `[V']` int64, the ids that it is to know."""
    base = model.config.get_text_config(decoder=True)
    drafter_config = DrafterConfig(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        exit_dim=config.exit_dim,
        num_draft_layers=config.num_layers,
        rnn=config.rnn,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        draft_len_per_beam=config.draft_len,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = RecurrentDrafter(drafter_config).float()
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        for layer in drafter.layers:  # residual layers begin as the identity
            nn.init.zeros_(layer.linear.weight)
            nn.init.zeros_(layer.linear.bias)
        if config.rnn:
            # Embeddings are often far smaller than hidden states. Unless they are brought to their size, the drafter
            # hardly sees for long which token it goes on from.
            nn.init.normal_(drafter.rnn_w.weight, std=1 / (base.hidden_size**0.5 * _embedding_size(model)))
    if draft_ids is not None:
        drafter.draft_ids.copy_(draft_ids)
    return drafter


@torch.no_grad()
def _embedding_size(model: PreTrainedModel) -> float:
    """Root mean square of some of a base's embeddings, as its own module gives them."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(min(1024, vocabulary), device=model.device)
    return float(model.get_input_embeddings()(ids).float().square().mean().sqrt().clamp(min=1e-6))


def _optimizer(drafter: RecurrentDrafter, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    matrices, vectors = ([w for w in drafter.parameters() if (w.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, fused=device.type == "cuda")


def _schedule(done: float, warmup: float) -> float:
    """Part of the peak learning rate when `done` of the training is done: linear up, a cosine down to 0."""
    return (done / warmup if done < warmup else 1.0) * (1 + math.cos(math.pi * done)) / 2


def run(config: TrainConfig, log: Callable[[str], object]) -> None:
    """Everything from the files of a command line to a directory that `RecurrentDrafter.from_pretrained` opens."""
    assert config.model is not None and config.output is not None
    output = Path(config.output)
    check_output(output, config.overwrite)
    accelerator = new_accelerator(config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    windows = _windows(config, tokenizer)
    model = load_model(
        config.model, dtype=config.dtype, device=accelerator.device, trust_remote_code=config.trust_remote_code
    )
    target = Target(model)  # refuses a base that could not be served
    if int(windows.tokens.max()) >= target.vocab_size:
        raise MismatchError(
            f"the tokenizer gives id {int(windows.tokens.max())}, the base knows {target.vocab_size} ids"
        )
    drafter = _drafter(config, target, windows)
    held_out = _HeldOut(config, target, tokenizer) if accelerator.is_main_process else None
    if held_out:
        log(f"base {target.name}, frozen; drafter of {sizes(model, drafter)}, trained; {len(windows):,} windows")

    def validate() -> Stats | None:
        if held_out is None or not held_out.texts:
            return None
        walk = held_out.walk(drafter)
        log(f"walked {walk.tokens_per_step:.3f} tokens per step over {len(held_out.texts)} held-out prompts")
        return walk

    steps_per_epoch = -(-len(windows) // (config.batch_size * accelerator.num_processes))
    batches = windows.batches(config.batch_size, config.seed, accelerator.process_index, accelerator.num_processes)
    report = train(
        model,
        drafter,
        batches,
        _with_end(config, steps_per_epoch),
        accelerator=accelerator,
        validate=validate,
        log=log,
    )
    if held_out:
        walk = validate()
        card = model_card(model, drafter, config, report, walk, len(held_out.texts))
        save(drafter, output, card, getattr(torch, config.save_dtype), config.overwrite)
        log(f"saved {output}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


class _HeldOut:
    """Held-out prompts as the base itself writes on from them, greedily."""

    def __init__(self, config: TrainConfig, target: Target, tokenizer: PreTrainedTokenizerBase):
        rows = read_rows([config.validate] if config.validate else config.data)
        chosen = (row for row in rows if row.split == "val" or (config.validate and row.split != "train"))
        room = config.length if target.context is None else min(config.length, target.context - 1)
        begun = prompts(chosen, tokenizer, config.validate_prompts, room, config.seed)
        written = zip(*greedy_texts(target, begun, config.validate_tokens), strict=True)
        stepped = [(text, start) for text, start in written if len(text) > start + 1]  # else it ended at once
        self.target, self.texts, self.starts = target, [text for text, _ in stepped], [start for _, start in stepped]

    def walk(self, drafter: RecurrentDrafter) -> Stats:
        """What `drafter` is worth on them, in the base's dtype, as it will be served."""
        model = self.target.model
        served = copy.deepcopy(drafter).to(model.device, model.dtype).eval()
        return walked(served, self.target, self.texts, self.starts, *shape(drafter))


def _windows(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    rows = (row for row in read_rows(config.data) if row.split in (None, "train"))
    found = (document for row in rows for document in documents(row, tokenizer))
    windows = Windows(found, config.length, tokenizer.bos_token_id)
    if not len(windows):
        raise CheckpointError(f"{', '.join(config.data)}: no row to train on")
    return windows


def _drafter(config: TrainConfig, target: Target, windows: Windows) -> RecurrentDrafter:
    """A new drafter, or the one to go on with; its config says what it is being trained for."""
    if config.drafter is not None:
        for name in ("num_layers", "exit_dim", "rnn", "draft_vocab_size"):
            if getattr(config, name) != getattr(TrainConfig, name):
                raise ArgumentError(f"--{name.replace('_', '-')} is the drafter's own: leave it out with --drafter")
        drafter = RecurrentDrafter.from_pretrained(config.drafter, dtype=torch.float32)
        check_fit(drafter, target)
    else:
        size, ids = config.draft_vocab_size, None
        if size is not None:
            if size > target.vocab_size:
                raise ArgumentError(f"--draft-vocab-size {size} is more than the base's {target.vocab_size} ids")
            ids = windows.counts(target.vocab_size).topk(size).indices.sort().values
        drafter = new_drafter(target.model, config, ids)
    name = target.model.config._name_or_path
    drafter.config.base_model = Path(name).resolve().name if Path(name).is_dir() else name
    drafter.config.base_embedding_norms = embedding_norms(target.embedding)
    drafter.config.trained_draft_len = config.draft_len
    return drafter


def _with_end(config: TrainConfig, steps_per_epoch: int) -> TrainConfig:
    """Epochs as steps; one epoch when nothing says when to end."""
    if config.epochs is None and (config.steps or config.minutes):
        return config
    by_epochs = math.ceil((config.epochs or 1) * steps_per_epoch)
    return replace(config, steps=min(by_epochs, config.steps or by_epochs))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status: 2, after one line that says why, for what a user can mend."""
    try:
        run(parse(argv), log=lambda line: print(line, flush=True))
    except ReDrafterError as error:
        print(f"redrafter train: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
