"""What peers say to each other and how it travels: identity, manifest, invite, messages, transports. Bytes, never tensors."""
