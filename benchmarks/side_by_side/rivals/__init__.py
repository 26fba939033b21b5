"""The other systems, one file each: only their effect on one peer's training."""
