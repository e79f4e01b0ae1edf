"""The tree of draft tokens that a step verifies: its shape, the beam search that grows it, and acceptance."""
