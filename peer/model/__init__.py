"""The model that a manifest describes: its plan, weights, checkpoints, evaluation and export."""
