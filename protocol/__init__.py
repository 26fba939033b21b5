"""The peer-to-peer protocol: identity, manifest, invite, messages and transports. It handles bytes, never tensors."""
