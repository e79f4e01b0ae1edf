"""The base answers the prompts of a data set itself."""
