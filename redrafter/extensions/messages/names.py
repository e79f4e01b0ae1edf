"""Names of Anthropic's protocol."""

MESSAGES_PATH = "/v1/messages"
# Claude Code's system prompt begins with a block of this kind: a hash for Anthropic's billing, another one in every
# request. It would keep all that follows from being found in the cache.
BILLING_MARK = "x-anthropic-billing-header"
