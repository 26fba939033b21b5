"""Messages between peers: frames, signed records, and the validation against a run's terms."""
