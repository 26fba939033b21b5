"""The machine that a peer runs on: home and runtime folders, settings, events and status. Any process may use it."""
