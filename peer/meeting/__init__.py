"""One meeting of two peers, without tensors: a machine without I/O, and the driver that connects it to the world. In the node."""
