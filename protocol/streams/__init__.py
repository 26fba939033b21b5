"""The seams between a peer and the world: transport, directory, and what holds for every inbound stream."""
