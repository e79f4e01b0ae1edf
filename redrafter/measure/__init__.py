"""Measure a pair on prompts in some mode: timed runs, replays, and their records."""
