"""The native engine: this package's decoding loop, caches and fused arithmetic."""
