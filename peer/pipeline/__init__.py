"""Hops of a staged run, without tensors, in the node: the hops of one holder as a state machine, and the driver of its lanes."""
