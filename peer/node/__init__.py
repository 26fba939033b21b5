"""The node process: asyncio, the network, no tensors. Started as `python -m gossamer.peer.node`."""
