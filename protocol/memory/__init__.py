"""In-memory network under virtual time: streams and unary calls between peers of one process, for simulated swarms and tests."""
