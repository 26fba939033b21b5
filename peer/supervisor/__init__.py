"""The supervisor: the process that the operator starts; it restarts node and trainer when they fail, and reports their state."""
