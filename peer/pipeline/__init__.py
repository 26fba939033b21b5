"""Hops of a staged run, without tensors: the state machine of one holder, without I/O, and the driver of its lanes. In the node."""
