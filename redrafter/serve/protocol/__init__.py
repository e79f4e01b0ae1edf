"""OpenAI's requests and responses, and which of their fields are served."""
