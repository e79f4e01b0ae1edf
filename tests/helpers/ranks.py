"""Programs on several ranks: how tests start them, and what they decode."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from helpers.adapters import PROJECTIONS, adapted
from helpers.command_line import byte_tokenizer
from helpers.eagle import random_head
from helpers.models import tiny_drafter, tiny_model, uneven_batch
from helpers.mtp import add_mtp
from redrafter import DraftTarget, Engine, PromptLookup, ReDrafter, ReDrafterError
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.mtp import MTPDrafter
from redrafter.model.supported import Support

VOCAB = 260  # holds the byte tokenizer; transformers 5.17 splits no head whose size the ranks do not divide
NEW = 20  # tokens of a text
# Shapes of tiny models that 2 and 4 ranks can share.
SHARED = {"vocab_size": VOCAB, "num_key_value_heads": 4}
# Models with fewer key-value heads than ranks, which hold the same ones then: the number of their heads.
FEW_HEADS = {"llama_of_one_key_head": 1, "llama_of_two_key_heads": 2}
# A model that is quantised when it is loaded, with whole groups of input features for each of two ranks.
INT4 = "llama_in_int4"
IN_GROUPS = {"head_dim": 16, "intermediate_size": 128}
WITH_MTP = "llama_with_mtp"  # a Llama whose checkpoint has an MTP layer
CHANGED = "changed"  # in place of what drafts: the engine is changed between calls
TESTS = Path(__file__).parents[1]


def launch(ranks: int, *words: object, module: bool = False) -> list[str]:
    """Return the command line that runs a program, or a module, on so many ranks of this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, *(["-m"] if module else []), *map(str, words)]


def environment() -> dict[str, str]:
    """Return the environment of ranks: they find the tests' helpers, and share two cores."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}


def run_on_ranks(
    ranks: int, *words: object, module: bool = False, seconds: float = 300, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks and wait for its end; the arguments are those of `launch`, and what stdin is."""
    command = launch(ranks, *words, module=module)
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, input=stdin or "", check=False
    )


def make_models(folder: Path, *kinds: str) -> Path:
    """Write tiny models of these architectures, a draft model and a drafter into a folder, and return the folder."""
    models = {kind: tiny_model(kind, **SHARED) for kind in kinds if kind not in (*FEW_HEADS, WITH_MTP, INT4)}
    models[INT4] = tiny_model("llama", **SHARED | IN_GROUPS)
    models[WITH_MTP] = tiny_model("llama", **SHARED)
    models |= {
        kind: tiny_model("llama", **SHARED | {"num_key_value_heads": heads}) for kind, heads in FEW_HEADS.items()
    }
    models["draft"] = tiny_model("llama", **SHARED | {"num_hidden_layers": 1})
    for name, model in models.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    add_mtp(models[WITH_MTP], folder / WITH_MTP)
    tiny_drafter(vocab_size=VOCAB).save_pretrained(folder / "drafter")
    random_head(vocab_size=VOCAB, draft_vocab_size=41).save_pretrained(folder / "eagle")
    return folder


def change_models(folder: Path, kind: str) -> None:
    """Write other weights of a model of `make_models`, another drafter and an adapter into its folder."""
    torch.manual_seed(9)
    for source, target in ((kind, f"new_{kind}"), ("drafter", "other_drafter")):
        load = AutoModelForCausalLM if source == kind else RecurrentDrafter
        model = load.from_pretrained(folder / source)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(folder / target)
    layers = [*PROJECTIONS, "o_proj", "down_proj"] if "moe" not in kind else ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted(model=AutoModelForCausalLM.from_pretrained(folder / kind), target_modules=layers).save_pretrained(
        folder / f"adapter_of_{kind}"
    )


def load_engine(folder: Path, kind: str, method: str, tp_size: int) -> Engine:
    """Load a tiny model, on a CPU in double precision, with what drafts for it."""
    dtype = torch.float32 if torch.cuda.is_available() else torch.float64
    load: dict[str, Any] = {"dtype": dtype, "tp_size": tp_size, "experts_implementation": "eager"}
    load |= {"quantization": "int4", "dtype": torch.float32} if kind == INT4 else {}
    Engine.pauses = False
    if method in ("drafter", "eagle"):
        engine = ReDrafter.from_pretrained(folder / kind, folder / method, **load)
        if not torch.cuda.is_available():  # on a GPU the message would cost more than this head
            assert (engine.drafter.head_part is None) == (tp_size == 1)
        return engine
    if method == "mtp":
        engine = ReDrafter.from_pretrained(folder / kind, **load)
        assert isinstance(engine.drafter, MTPDrafter)
        return engine
    if method == "astray":  # every rank has a drafter of its own
        drafter = tiny_drafter(vocab_size=VOCAB)
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return ReDrafter.from_pretrained(folder / kind, drafter, **load)
    if method == "lookup":
        return PromptLookup.from_pretrained(folder / kind, **load)
    return DraftTarget.from_pretrained(folder / kind, folder / "draft", draft_len=3, **load)


def decode(folder: Path, kind: str, method: str, tp_size: int) -> dict[str, list[list[int]]]:
    """Decode an uneven batch in every mode, and return the texts by mode."""
    engine, (ids, mask) = load_engine(folder, kind, method, tp_size), uneven_batch()
    texts = {}
    for cache in ("dense", "paged"):
        if cache == "paged":
            engine.target.varlen = Support()
            if engine.draft_model is not None:
                engine.draft_model.varlen = Support()
        for sampled in (False, True):
            for speculate in (True, False):
                text = engine.generate(
                    ids % VOCAB,
                    mask,
                    max_new_tokens=NEW,
                    do_sample=sampled,
                    seed=5,
                    speculate=speculate,
                    eos_token_id=None,
                )
                name = f"{cache} {'sampled' if sampled else 'greedy'} {'drafts' if speculate else 'plain'}"
                texts[name] = text.tolist()
    return texts


def decode_changed(folder: Path, kind: str, tp_size: int) -> dict[str, Any]:
    """Decode after each change of an engine, and note which weights are refused; return the texts by the change."""
    engine, (ids, mask) = load_engine(folder, kind, "drafter", tp_size), uneven_batch()
    engine.target.varlen = Support()
    texts, new = dict[str, Any](), folder / f"new_{kind}"

    def write(name: str, **how: Any) -> None:
        texts[name] = engine.generate(ids % VOCAB, mask, max_new_tokens=NEW, eos_token_id=None, **how).tolist()

    write("before", do_sample=False)
    broken = {name: x.clone() for name, x in AutoModelForCausalLM.from_pretrained(new).state_dict().items()}
    name = next(name for name in broken if name.endswith("o_proj.weight"))
    broken[name][:, -1] = float("nan")  # in the part of the last rank alone
    for wrong in (broken, {name: broken[name]}, folder / "draft"):
        try:
            engine.update_weights(wrong)
        except ReDrafterError as error:
            texts[f"{type(error).__name__} {len(texts)}"] = True
    engine.update_weights(new)
    write("new weights, drafts", do_sample=True, seed=3)
    write("new weights, plain", do_sample=True, seed=3, speculate=False)
    engine.change_drafter(folder / "other_drafter")
    write("another drafter", do_sample=True, seed=3)
    engine.sleep()
    engine.wake()
    write("after sleep", do_sample=True, seed=3)
    engine.load_adapter("it", folder / f"adapter_of_{kind}")
    names = ["it", None, *["it"] * (len(ids) - 2)]
    write("adapter, drafts", do_sample=True, seed=3, adapter=names)
    write("adapter, plain", do_sample=True, seed=3, adapter=names, speculate=False)
    engine.unload_adapter("it")
    write("after the adapter", do_sample=True, seed=3)
    return texts


def main() -> None:
    """Decode on this rank what the arguments name, and write the texts into a file of its own."""
    folder, out, *jobs = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    texts = {
        job: decode_changed(Path(folder), kind, size) if method == CHANGED else decode(Path(folder), kind, method, size)
        for job in jobs
        for kind, _, method in [job.partition(":")]
    }
    Path(out, f"{rank}.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
