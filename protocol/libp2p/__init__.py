"""The seams over libp2p: p2pd supervised, its DHT as a directory, gRPC streams through it."""
