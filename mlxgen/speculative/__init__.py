"""Speculative decoding: rules, selection, verification, loop, statistics, closed forms."""
