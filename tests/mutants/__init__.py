"""Mutation testing: faults planted one at a time in the code that decides tokens, and the tests that find them.

Cosmic Ray generates the faults; `cosmic-ray.toml` here lists the files, the tests that guard each file, and the
mutants that may survive, with the reason. `make mutants` runs a sample.
"""
