"""Assistants of Gemma 4: what they draft, what is written with them, and what is refused."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.generation import ON_BOTH_CACHES
from helpers.models import VOCAB, check_texts, tiny_model
from redrafter import CheckpointError, MismatchError, ReDrafter, UnsupportedError, boxed_pair
from redrafter.cli import main as redrafter
from redrafter.drafting.assistant import AssistantDrafter, AssistantProposer, all_layers_shared
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.plan import build_without_weights

pytest.importorskip("transformers.models.gemma4_assistant")
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

KINDS = ["sliding_attention", "full_attention"]
COMMON = {"sliding_window": 6, "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 97}
SHAPE = {"num_beams": 1, "draft_len_per_beam": 4, "node_budget": 5}


def base(**changes):
    layers = {"num_hidden_layers": 6, "layer_types": KINDS * 3, "num_kv_shared_layers": 2}
    layers |= COMMON | {"hidden_size_per_layer_input": 8} | changes
    model = tiny_model("gemma4_text", **layers)
    model.generation_config.eos_token_id = None
    return model


def assistant(clusters=False, **changes):
    """Make a tiny random assistant for `base()`."""
    own = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "layer_types": KINDS * 2}
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = tiny_model("gemma4_text", **COMMON | own | none, num_kv_shared_layers=0).config.to_dict()
    text["num_kv_shared_layers"] = 4
    # Ids are in clusters of one size.
    form = {"use_ordered_embeddings": clusters, "num_centroids": 1, "centroid_intermediate_top_k": 1}
    if clusters:
        form |= {
            "num_centroids": next(n for n in range(5, 98) if text["vocab_size"] % n == 0),
            "centroid_intermediate_top_k": 2,
        }
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text | changes, backbone_hidden_size=base().config.hidden_size, **form
    )
    torch.manual_seed(5)
    with all_layers_shared():
        made = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
        if clusters:
            made.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
    return made


@pytest.fixture(scope="module", params=["all ids", "clusters"])
def place(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assistant")
    assistant(request.param == "clusters").save_pretrained(folder)
    return folder


@ON_BOTH_CACHES
def test_drafts_are_those_of_transformers_and_change_no_text(on, place, monkeypatch):
    engine = ReDrafter.from_pretrained(base(), place, draft_from_text=False, **SHAPE)
    assert isinstance(engine.drafter, AssistantDrafter)
    theirs, propose, checked = AssistantDrafter.from_pretrained(place).assistant, AssistantProposer.propose, []
    theirs.generation_config.num_assistant_tokens = SHAPE["draft_len_per_beam"]

    def compared(self, state, sampler, noise, *caches):
        tree = propose(self, state, sampler, noise, *caches)
        for row in state.active.nonzero().flatten().tolist()[:1] if noise is None else ():
            text = state.tokens[row, : state.length[row] + 1][None]
            engine.model.generation_config.max_length = 999
            generator = SinglePositionMultiTokenCandidateGenerator(
                theirs, engine.model.get_input_embeddings(), engine.model.generation_config
            )
            read = engine.model(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
            drafts, _ = generator.get_candidates(text, {}, read, False, 0)
            assert tree.tokens[row].tolist() == drafts[0, text.shape[1] - 1 :].tolist()
            checked.append(text.shape[1])
        return tree

    monkeypatch.setattr(AssistantProposer, "propose", compared)
    check_texts(on(engine))
    assert max(checked) > 20  # more than a window


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_trees_of_an_assistant_change_no_text(scheme, place):
    engine = ReDrafter.from_pretrained(base(), place, num_beams=3, draft_len_per_beam=3, draft_quantization=scheme)
    check_texts(engine)


def test_an_assistant_of_another_base_is_refused(place):
    with pytest.raises(MismatchError, match="hidden size of 32"):
        ReDrafter.from_pretrained(base(hidden_size=48), place)
    with pytest.raises(MismatchError, match="it was made for another base"):
        ReDrafter.from_pretrained(base(global_head_dim=24), place)
    with pytest.raises(MismatchError, match="layer of the kind sliding_attention, and LlamaForCausalLM has none"):
        AssistantDrafter.from_pretrained(place).layers_shared(Target(tiny_model("llama")))


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    made = assistant()
    state = made.state_dict()
    state.pop("post_projection.weight")
    made.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"missing keys post_projection\.weight"):
        ReDrafter.from_pretrained(base(), tmp_path)


def test_info_shows_an_assistant(place, capsys):
    assert redrafter(["info", str(place), "--json"]) == 0
    drafter = json.loads(capsys.readouterr().out)["drafter"]
    assert (drafter["type"], drafter["layers"], drafter["vocabulary"]) == ("assistant", 4, VOCAB)


@pytest.mark.parametrize(
    "words", [["convert", "--to", "drafter", "--dry-run", "--drafter-model-dir"], ["info", boxed_pair(), "--drafter"]]
)
def test_an_assistant_is_used_as_it_is_and_not_converted(words, place, capsys):
    assert redrafter([*map(str, words), str(place)]) == 2
    assert "a drafter of the kind assistant can be used only as in its checkpoint" in capsys.readouterr().err


def test_an_assistant_is_not_trained_further(place):
    with pytest.raises(UnsupportedError, match="the kind assistant can be used only as in its checkpoint"):
        build_without_weights(TrainConfig(model=str(boxed_pair()), drafter=str(place)))
