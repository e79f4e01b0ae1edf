"""How long draws take."""

import time

import torch

from redrafter.sampling.sampler import Sampler

IDS = torch.arange(49152)


def test_on_a_cpu_greedy_draws_of_16_bit_logits_take_about_as_long_as_those_of_float32():
    zero = torch.zeros(1, dtype=torch.long)
    sampler, depth = Sampler(None, (), torch.ones(1), zero, zero, IDS), torch.zeros(1, 12, dtype=torch.long)
    logits = torch.randn(1, 12, len(IDS)).bfloat16()

    def fastest(scores: torch.Tensor) -> float:
        times = []
        for _ in range(10):
            began = time.process_time()
            drawn = sampler.draw(scores, None, depth)
            times.append(time.process_time() - began)
        assert torch.equal(drawn, logits.argmax(-1))
        return min(times)

    assert fastest(logits) < 2.5 * fastest(logits.float())
