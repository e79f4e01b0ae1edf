"""Tensor parallelism: one model over several processes, each of which runs the same program on its part."""
