"""What crosses between node and trainer: records over a Unix socket, bytes through a folder in shared memory."""
