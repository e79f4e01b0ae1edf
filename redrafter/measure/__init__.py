"""What `bench`, `tune`, `compare` and `evaluate` share: workloads, timing, facts, reports."""
