import math

import pytest
import torch

from redrafter.sampling.noise import ACCEPT, DRAFT, branch, gumbel, streams

IDS = torch.arange(500)


def test_noise_depends_on_seed_position_and_id_alone():
    seeds, positions = torch.tensor([3, 9]), torch.tensor([[5, 6, 7], [6, 7, 8]])
    noise = gumbel(seeds, positions, IDS)
    assert noise.shape == (2, 3, 500)
    assert noise.dtype == torch.float32
    assert torch.equal(gumbel(seeds[1:], positions[1:, 2:], IDS[100:])[0, 0], noise[1, 2, 100:])
    assert not torch.equal(noise[0, 1], noise[1, 0])  # same position, another seed
    assert not torch.equal(noise[0, 0], noise[0, 1])  # same seed, another position


def test_the_stream_is_that_of_the_published_generator():
    """SplitMix64 from state 1234567: the first outputs listed with the reference implementation."""
    from redrafter.sampling import noise

    state = torch.tensor([1234567]) + (torch.arange(3) + 1) * noise.GAMMA
    outputs = [value % 2**64 for value in noise.mix(state).tolist()]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_seed_has_the_same_noise_in_every_version():
    seeds, positions = torch.tensor([3, 1 << 40]), torch.tensor([[0], [7]])
    assert branch(seeds, DRAFT).tolist() == [3768710290976403573, -6876903479599513362]
    assert branch(seeds, ACCEPT).tolist() == [-7247550404934420262, -2737591804719522787]
    assert streams(seeds, positions).tolist() == [[8883187925210353900], [7849264056826424574]]
    expected = torch.tensor([[[0.1455783397, 1.6828247309]], [[0.5281530619, 0.0837517902]]])
    torch.testing.assert_close(gumbel(seeds, positions, torch.tensor([0, 96])), expected)


def test_noise_is_gumbel_distributed_and_finite():
    noise = gumbel(torch.arange(40), torch.arange(100).expand(40, 100), IDS)
    assert noise.isfinite().all()
    values = noise.flatten().double().sort().values
    expected = (-(-values).exp()).exp()  # the distribution function at each value
    observed = (torch.arange(len(values)) + 0.5) / len(values)
    assert (expected - observed).abs().max() < 1.63 / math.sqrt(len(values))  # Kolmogorov-Smirnov, 1 %


def test_argmax_with_noise_samples_from_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 200_000
    noise = gumbel(torch.tensor([1]), torch.arange(draws)[None], torch.arange(5))[0]
    frequencies = (logits + noise).argmax(-1).bincount(minlength=5) / draws
    expected = logits.softmax(-1)
    sigma = (expected * (1 - expected) / draws).sqrt()
    assert ((frequencies - expected).abs() < 4 * sigma).all()


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["seeds", "positions", "ids"])
def test_neighbours_are_uncorrelated(dim):
    noise = gumbel(torch.arange(50), torch.arange(50).expand(50, 50), IDS)
    count = noise.shape[dim] - 1
    a, b = noise.narrow(dim, 1, count), noise.narrow(dim, 0, count)
    r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
    assert r.abs() < 5 / math.sqrt(a.numel())
