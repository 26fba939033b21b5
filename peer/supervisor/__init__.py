"""The supervisor: the process that the operator starts; it keeps node and trainer alive and reports what they do."""
