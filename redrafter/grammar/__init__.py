"""Grammars that a generated text must follow.

Anybody may send a grammar, so each is compiled and followed in a process of its own, with limits of time and memory.

In this process: `source` reads what a user wrote; `grammar` has the public class, starts a grammar's process, and asks
it about the texts that follow the grammar. In the other processes, which `redrafter.sandbox` starts: `child` reads a
vocabulary, then compiles and follows one grammar, within `limits`.
"""
