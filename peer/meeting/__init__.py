"""One meeting of two peers, without tensors: a state machine without I/O, and the driver that carries out its commands. In the node."""
