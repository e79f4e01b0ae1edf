"""Let a base answer the prompts of a data set itself, for its drafter to be trained on."""
