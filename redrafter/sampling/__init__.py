"""From the target's logits to its own draw at every node of a tree."""
