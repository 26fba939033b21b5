"""The members of the swarm: address book, peer exchange, presence in the directory, lifecycle, time of day. In the node."""
