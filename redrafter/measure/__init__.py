"""Code that `bench`, `tune`, `compare` and `evaluate` share: prompts, workloads, timed runs, conditions, reports."""
