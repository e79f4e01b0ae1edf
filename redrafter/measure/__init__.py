"""Shared measurement code of `bench`, `compare` and `evaluate`: prompts, workloads, timed runs, reports."""
