"""Grammars that a generated text must follow.

Anyone may send a grammar, so each is compiled and followed in a separate process, with limits of time and memory. In
this process, `source` reads the user's grammar; `grammar` has the public class, starts a grammar's process, and queries
it about the texts that follow the grammar. In the other processes, which `redrafter.sandbox` starts, `child` reads a
vocabulary, then compiles and follows one grammar, within `limits`.
"""
