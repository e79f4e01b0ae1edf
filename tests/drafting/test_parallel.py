"""The bytes of weights that a search with a parallel drafter reads are counted."""

import pytest
import torch

from helpers.models import tiny_model
from helpers.parallel import BLOCK, PARALLEL_FORMS, random_parallel_drafter
from helpers.training import known_text
from redrafter.drafting import parallel
from redrafter.drafting.drafter_model import partial_linear
from redrafter.drafting.proposer import State
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.train.teacher import Teacher


@pytest.mark.parametrize("depth", [1, BLOCK - 1])
@pytest.mark.parametrize("form", ["recurrent", "markov", "independent", "shortlist"])
def test_the_bytes_of_a_draft_are_those_of_the_weights_that_its_levels_read(form, depth, monkeypatch):
    drafter, model, read = random_parallel_drafter(**PARALLEL_FORMS[form]), tiny_model("llama"), []
    target, text, zero = Target(model), known_text(drafter), torch.zeros(1, dtype=torch.long)

    def recorded(layer, x, columns, *, with_bias):
        read.append(
            layer.weight[:, columns].nbytes + (layer.bias.nbytes if with_bias and layer.bias is not None else 0)
        )
        return partial_linear(layer, x, columns, with_bias=with_bias)

    monkeypatch.setattr(parallel, "partial_linear", recorded)
    drafter.lm_head.register_forward_hook(lambda head, *_: read.append(head.weight.nbytes))
    proposer = drafter.proposer(target, 2, depth, 1 + 2 * depth, None, False)
    ids = torch.arange(target.vocab_size)
    sampler = Sampler(seeds=None, processors=(), temperature=torch.ones(1), prompt=zero, limit=zero, ids=ids)
    with torch.no_grad(), Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(text)
        context = drafter.read_texts(text, output.hidden, output.embedding)(zero, torch.tensor([5]))
        state = State(text[:, 5:6], zero, output.hidden[:, 4], zero == 0)
        expand = proposer.scores(state, sampler, None, context)
        for level in range(depth):
            expand(level, text[:, 5 + level, None], zero[None])
    other = "head.", "lm_head.", "entry_embedding."  # the last is of entries
    once = [weight for name, weight in drafter.named_parameters() if not name.startswith(other)]
    assert drafter.draft_bytes(depth) == sum(weight.nbytes for weight in once) + sum(read)
