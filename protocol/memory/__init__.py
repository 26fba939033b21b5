"""The seams in memory and virtual time: whole swarms in one process, deterministic."""
