"""The native engine: our own decoding loop, caches and fused arithmetic."""
