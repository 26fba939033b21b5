"""Who is there: the address book, and this peer's own presence in the directory. In the node."""
