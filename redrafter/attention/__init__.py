"""Attention of token trees and of prompts: what each token sees, masks, and attention functions."""
