"""The machine that a peer runs on: home and runtime folders, settings, signals, events and status. Any process may use it."""
