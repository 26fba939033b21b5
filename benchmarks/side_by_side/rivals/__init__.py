"""The other systems: one file each, with what it does to one peer's training, and nothing else."""
