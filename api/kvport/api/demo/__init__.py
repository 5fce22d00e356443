"""The demonstration: what kvport is for, on this machine, in under a minute.

Two servers with a home each and nothing shared, for each of three tiny models; one
computes a long prompt, the other answers it from the file that the first one exported.
"""
