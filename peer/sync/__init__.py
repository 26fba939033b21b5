"""State synchronization: whole states, fragments, and the result of a run, requested from other peers and served to them.

Runs in the node process and handles bytes only. `decide` says when another peer's weights are wanted; `StateSync` acts on it.
"""
