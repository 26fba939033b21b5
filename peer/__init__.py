"""One running peer: its processes, its meetings, its data, model and checkpoints."""
