"""The command line: one file per verb. It draws, asks and reports; what a peer does is in `peer`."""
