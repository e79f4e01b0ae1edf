"""Constants of Anthropic's protocol."""

MESSAGES_PATH = "/v1/messages"
# Claude Code's system prompt begins with a block of this kind: a hash for Anthropic's billing, which differs in every
# request. Kept in the prompt, it would prevent the cache from matching anything after it.
BILLING_MARK = "x-anthropic-billing-header"
