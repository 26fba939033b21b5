"""The network in memory and in virtual time: streams and calls between peers of one process, for simulated swarms and for tests."""
