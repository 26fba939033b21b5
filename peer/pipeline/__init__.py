"""Hops of a staged run, without tensors: the hops of one holder as a state machine without I/O, and the driver of its lanes. In the node."""
