"""The trainer process: torch, every tensor, inner steps, and its side of each meeting. Started as `python -m gossamer.peer.trainer`."""
