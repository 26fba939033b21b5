"""The network interfaces of a peer, Transport and Directory; admission control and rate limits for all streams."""
