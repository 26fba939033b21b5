"""Transport and Directory over libp2p: a supervised p2pd process, a Kademlia directory, and gRPC streams through libp2p."""
