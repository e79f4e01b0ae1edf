"""Attention of token trees and of prompts: what each token sees, the masks that say so, and attention functions."""
