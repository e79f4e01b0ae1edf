"""Tensor parallelism: one model over several processes, which run the same program, each on its shard."""
