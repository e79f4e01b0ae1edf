"""From pieces of texts to the answers that clients expect, whole or as a stream."""
