"""The tree of drafts that one step verifies: its shape, its search, and which of it is accepted."""
