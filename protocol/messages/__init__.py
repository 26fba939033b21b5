"""What peers say to each other: messages, signed records, frames, and the checks of a run's terms."""
