"""Shared measurement code of `bench`, `tune`, `compare` and `evaluate`: prompts, workloads, timed runs, reports."""
