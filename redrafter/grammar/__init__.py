"""Grammars that a text must follow, compiled and followed in processes of their own."""
