"""Gossamer beside the systems that its users would pick instead: real processes, the same batches, four peers on lines of a known rate."""
