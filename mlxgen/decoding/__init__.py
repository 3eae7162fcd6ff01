"""What plain and speculative decoding share, and plain decoding itself."""
