"""Draft models with another vocabulary than the target's, made from the target itself."""

import copy

import torch
from transformers import PreTrainedModel

from redrafter.drafting.vocabulary_map import VocabularyMap

START = 5  # what the draft models' texts begin with


def renumbered(model: PreTrainedModel, shared_share: float = 1.0) -> tuple[PreTrainedModel, VocabularyMap]:
    """Return a copy of a model in which every token has another id, and the map from the model's ids.

    Of the tokens a share is shared; the copy reads each of the others as two or three of its own.
    """
    size, generator = model.config.vocab_size, torch.Generator().manual_seed(8)
    new = torch.randperm(size, generator=generator)  # [V], the copy's id of each token
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for table, original in (
            (copied.get_input_embeddings(), model.get_input_embeddings()),
            (copied.get_output_embeddings(), model.get_output_embeddings()),
        ):
            table.weight[new] = original.weight.clone()
    shared = torch.rand(size, generator=generator) < shared_share
    counts = torch.ones(size, dtype=torch.long).where(shared, torch.randint(2, 4, (size,), generator=generator))
    pieces = torch.randint(0, size, (size, 3), generator=generator)
    pieces[shared, 0] = new[shared]
    pieces = pieces.where(torch.arange(3) < counts[:, None], 0)
    start = () if shared_share == 1 else (START,)
    return copied, VocabularyMap(pieces, counts, new.where(shared, 0), shared, start)
