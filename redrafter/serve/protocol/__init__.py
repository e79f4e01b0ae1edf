"""Models of OpenAI's requests and responses, with the fields that are supported."""
