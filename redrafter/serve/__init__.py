"""The OpenAI-compatible server: requests of all protocols are batched into the steps of one engine."""
