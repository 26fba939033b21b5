"""Gossamer compared with alternative systems: real processes, the same batches, four peers on lines of a known rate."""
