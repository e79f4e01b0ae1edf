"""Grammars that a generated text must follow.

Anybody may send a grammar, so each is compiled and followed in a process of its own, with limits of time and memory.

In this process: `grammar` is the public class, `source` reads what a user wrote, `guided_text` is one text that
follows a grammar, `process` starts a grammar's process and talks to it. `wire` is what the processes say to each other,
`limits` are their limits. In the other processes, which `redrafter.sandbox` starts: `child` reads a vocabulary, then
follows one grammar, with `compiled` and `state`.
"""
