"""Drafters are found by their registrations, those of other packages by an entry point."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import redrafter
from helpers.generation import ON_BOTH_CACHES, same_as_model, same_undrafted
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model, uneven_batch
from redrafter import ArgumentError, CheckpointError, DrafterConfig, RecurrentDrafter, ReDrafter, drafting
from redrafter.cli import main as command
from redrafter.drafting.drafter_types import open_drafter_model, register_drafter
from redrafter.drafting.text_drafters import require
from redrafter.errors import UnsupportedError
from redrafter.files.drafter_kinds import declared_kinds, drafter_kinds

THIRD_PARTY = Path(__file__).parents[1] / "third_party"


@pytest.fixture
def search_again() -> Iterator[None]:
    """Let registrations be searched where a test has changed the path, and again after it."""
    declared_kinds.cache_clear()
    yield
    declared_kinds.cache_clear()


@pytest.fixture
def place(tmp_path, monkeypatch, search_again) -> Path:
    """Return the checkpoint of a drafter whose package is on the path."""
    monkeypatch.syspath_prepend(THIRD_PARTY)
    from bigram_drafter import BigramConfig, BigramDrafter

    torch.manual_seed(0)
    BigramDrafter(BigramConfig(vocab_size=VOCAB, hidden_size=HIDDEN)).save_pretrained(tmp_path / "bigram")
    monkeypatch.delitem(sys.modules, "bigram_drafter")  # so that the entry point alone leads to it
    monkeypatch.setattr("redrafter.files.drafter_kinds._defined", {})
    return tmp_path / "bigram"


@ON_BOTH_CACHES
def test_a_drafter_of_another_package_drafts_and_changes_no_token(place, llama, on):
    engine = on(ReDrafter.from_pretrained(llama, place))
    assert type(engine.drafter).__name__ == "BigramDrafter"
    assert engine.proposer.draft_bytes == 5 * sum(weight.nbytes for weight in engine.drafter.parameters())
    same_as_model(engine, *uneven_batch(), max_new_tokens=30)
    same_undrafted(engine, *uneven_batch(), do_sample=True, temperature=0.8, top_k=0, seed=3, max_new_tokens=30)


def test_info_describes_a_drafter_of_another_package_and_imports_neither_it_nor_torch(place):
    program = (
        "import sys; from redrafter.cli import main; main(sys.argv[1:]); "
        "print({'torch', 'bigram_drafter'} & {*sys.modules})"
    )
    path = os.pathsep.join((str(THIRD_PARTY), str(Path(redrafter.__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-c", program, "info", str(place), "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    document, imported = done.stdout.splitlines()
    document = json.loads(document)
    assert (document["kind"], document["drafter"]["type"], document["drafter"]["width"]) == (
        "drafter",
        "bigram",
        8,
    )
    assert imported == "set()"


def test_a_drafter_of_another_package_is_merged_with_its_base(place, tmp_path, llama, capsys):
    llama.save_pretrained(tmp_path / "base")
    parts = ["--base-model-checkpoint-dir", str(tmp_path / "base"), "--drafter-model-dir", str(place)]
    assert command(["convert", *parts, "--output-dir", str(tmp_path / "merged")]) == 0
    assert command(["info", str(tmp_path / "merged"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["drafter"]["type"] == "bigram"
    same_undrafted(ReDrafter.from_pretrained(tmp_path / "merged"), torch.arange(3, 12)[None], max_new_tokens=9)


def test_what_a_drafter_of_another_package_lacks_is_refused_by_its_kind(place):
    with pytest.raises(UnsupportedError, match=r"`redrafter train` cannot .* of the kind bigram"):
        require(open_drafter_model(place), "train")


def test_the_table_has_all_drafters_of_this_package():
    ours = {kind for kind in declared_kinds().values() if kind.module.startswith("redrafter.")}
    sources = [path.read_text(encoding="utf-8") for path in Path(drafting.__file__).parent.glob("*.py")]
    assert sum(source.count("\n@register_drafter()") for source in sources) == len(ours)
    assert all(kind.load().config_class.model_type in kind.model_types for kind in ours)


class OwnConfig(DrafterConfig):
    model_type = "own_recurrent"


@register_drafter("drafter of a program", "own_recurrent")
class OwnDrafter(RecurrentDrafter):
    config_class = OwnConfig


def test_a_drafter_that_a_program_defines_loads_without_an_entry_point(tmp_path, llama):
    OwnDrafter(OwnConfig(vocab_size=VOCAB, hidden_size=HIDDEN)).save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(llama, tmp_path)
    assert isinstance(engine.drafter, OwnDrafter)
    assert engine.drafter.config.kind == "drafter of a program"
    same_undrafted(engine, torch.arange(3, 12)[None], max_new_tokens=9)


def package(folder: Path, name: str, value: str, monkeypatch) -> None:
    """Write a package with an entry point for drafters, and put its folder on the path."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[redrafter.drafters]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("hollow", "hollow", r"entry point hollow = hollow of redrafter\.drafters must name a module and a class"),
        ("redrafter", "rival:Rival", "names a type that another drafter has"),
    ],
)
def test_an_entry_point_without_a_class_or_with_a_type_that_is_taken_is_refused(
    name, value, says, tmp_path, monkeypatch, search_again
):
    package(tmp_path, name, value, monkeypatch)
    with pytest.raises(ArgumentError, match=says):
        drafter_kinds()


@pytest.mark.parametrize("source", ["import no_such_module\n", "class Other:\n    pass\n"])
def test_a_package_that_cannot_be_imported_is_named(source, tmp_path, monkeypatch, search_again):
    package(tmp_path, "broken", "broken:Broken", monkeypatch)
    (tmp_path / "broken.py").write_text(source)
    (tmp_path / "config.json").write_text('{"model_type": "broken"}')
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(CheckpointError, match=r"broken, which defines drafters .* cannot be imported: "):
        ReDrafter.from_pretrained(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("settings", [{"quant_method": "bitsandbytes", "load_in_8bit": True}, {}, "fp8"], ids=str)
def test_a_drafter_of_this_library_with_quantised_weights_is_refused_by_name(settings, tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(UnsupportedError, match="give the drafter that was quantised"):
        open_drafter_model(tmp_path)
