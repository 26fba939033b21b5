"""The local page of `peer dashboard`: a server that reads the control sockets of peers on this machine, and what it serves."""
