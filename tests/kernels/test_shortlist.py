"""The kernels of a head in two stages against torch, in Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from redrafter import kernels
from redrafter.kernels.shortlist import BEST, RUN
from redrafter.tree.beam_search import Candidates

ROWS, BEAMS, VOCAB, WIDTH, COUNT = 2, 3, 700, 40, 22
NAMES = torch.randperm(900, generator=torch.Generator().manual_seed(5))[:VOCAB]
DRAWN = [False, True]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawing(noisy: bool, named: bool):
    """Return temperatures, noise and names for the kernels, and what turns scores of ids into those under the noise."""
    names, temperature, noise = NAMES if named else torch.arange(VOCAB), torch.tensor([0.5, 1.5]), random(ROWS, 2, 900)

    def under_noise(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not noisy:
            return scores
        here = noise[:, 1, None].expand(-1, BEAMS, -1).gather(2, names[ids])
        return scores / temperature[:, None, None] + here

    given = (temperature.to(DEVICE), noise.to(DEVICE)[:, 1]) if noisy else (None, None)
    return (*given, NAMES.to(DEVICE) if named else None), under_noise


@pytest.mark.parametrize("named", DRAWN)
@pytest.mark.parametrize("noisy", DRAWN)
def test_the_best_few_of_each_part_of_the_ids_are_candidates(noisy, named):
    rough, (given, under_noise) = random(ROWS, BEAMS, VOCAB), drawing(noisy, named)
    found = kernels.best_of_parts(rough.to(DEVICE), COUNT, *given).cpu()
    parts = -(-COUNT // BEST)
    assert found.shape == (ROWS, BEAMS, parts * BEST)
    scores = under_noise(rough, torch.arange(VOCAB).expand_as(rough))
    for part in range(parts):
        others = torch.arange(VOCAB) // RUN % parts != part
        best = scores.masked_fill(others, -torch.inf).topk(BEST).indices
        assert torch.equal(found[..., part * BEST : (part + 1) * BEST], best)


def test_candidates_are_different_ids_whatever_their_scores_are():
    rough = random(ROWS, BEAMS, 4 * COUNT)
    rough[0, 0], rough[0, 1], rough[1, 0, 3], rough[1, 1] = torch.nan, -torch.inf, torch.inf, 0.0
    found = kernels.best_of_parts(rough.to(DEVICE), COUNT, None, None, None).cpu().flatten(0, 1)
    assert 0 <= found.min() <= found.max() < 4 * COUNT
    assert all(len(set(ids.tolist())) == len(ids) for ids in found)


@pytest.mark.parametrize("named", DRAWN)
@pytest.mark.parametrize("noisy", DRAWN)
@pytest.mark.parametrize("narrow", DRAWN)
def test_candidates_have_the_scores_of_the_head(noisy, named, narrow):
    x, weight, (given, under_noise) = random(ROWS, BEAMS, WIDTH), random(VOCAB, WIDTH, seed=1), drawing(noisy, named)
    scale = random(VOCAB, seed=2).abs() if narrow else None
    weight = weight.to(torch.float8_e4m3fn if narrow else torch.float32)
    x = x.half() if narrow else x
    ids = torch.randint(VOCAB, (ROWS, BEAMS, COUNT), generator=torch.Generator().manual_seed(3))
    on_device = (None if t is None else t.to(DEVICE) for t in (x, weight, scale, ids))
    found = kernels.candidate_scores(*on_device, *given).cpu()
    wide = weight.float() if scale is None else weight.float() * scale[:, None]
    torch.testing.assert_close(found, under_noise((x.float() @ wide.T).gather(2, ids), ids), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("named", DRAWN)
def test_the_best_candidates_are_those_of_torch(named):
    ids = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(n))[:COUNT] for n in range(6)])
    found, total = Candidates(random(ROWS, BEAMS, COUNT), ids.view(ROWS, BEAMS, COUNT)), random(ROWS, BEAMS, seed=1)
    names = NAMES if named else None
    expected = found.best(total, 5, names)
    on_device = [None if x is None else x.to(DEVICE) for x in (*found, total, names)]
    score, source, token = kernels.best_candidates(*on_device[:3], 5, on_device[3])
    torch.testing.assert_close(score.cpu(), expected[0])
    assert torch.equal(source.cpu(), expected[1])
    assert torch.equal(token.cpu(), expected[2])


def test_no_candidate_is_likelier_than_its_beam_and_none_is_chosen_twice():
    scores, total = torch.full((64, 3, 20), -40.0), -30 * random(64, 3).abs()
    scores[:, :, 7] = 23.7 + random(64, 3, seed=1).abs()
    scores[0, 0], scores[0, 1, 7:], scores[1, 2, 3] = torch.nan, -torch.inf, torch.inf
    ids = torch.arange(20).expand(64, 3, -1)
    given = (x.to(DEVICE) for x in (scores, ids, total))
    score, source, token = (x.cpu() for x in kernels.best_candidates(*given, 5, None))
    assert bool((score <= total.gather(1, source)).all())
    pairs = zip(source.tolist(), token.tolist(), strict=True)
    assert all(len(set(zip(*row, strict=True))) == 5 for row in pairs)
