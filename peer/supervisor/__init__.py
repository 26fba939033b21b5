"""The supervisor: the process that the operator starts; it keeps node and trainer alive and tells what they do."""
