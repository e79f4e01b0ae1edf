"""Processes for input of strangers: each does one piece of work, within limits of time and memory, and can be killed.

In this process, `process` starts and ends them. In the other processes, `child` prepares what all work of a kind needs,
such as a vocabulary or a decoder, forks a process for each piece, and limits it. They exchange messages over the
connections of `multiprocessing`; messages from them are bytes, never pickles, as input that compromised a process must
not reach the program.
"""
