"""Processes for what strangers send: each does one piece of work, within bounds of time and memory, and can be killed.

In this process: `process` starts and ends them. In the other processes: `child` prepares what all work of a kind needs,
as a vocabulary or a decoder, forks a process for each piece, and bounds it. `frames` is the form of their messages.
"""
