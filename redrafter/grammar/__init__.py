"""Grammars that a generated text must follow.

Anybody may send a grammar, so each is compiled and followed in a process of its own, with limits of time and memory.

In this process: `grammar` is the public class, `source` reads what a user wrote, `guided_text` is one text that follows
a grammar, `process` talks to a grammar's process and `zygotes` starts it. `wire` is the protocol between the processes,
`limits` their limits. In the other processes: `zygote` holds a vocabulary and forks a `child` for each grammar, which
uses `compiled` and `state`.
"""
