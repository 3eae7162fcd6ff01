"""From a row of logits to a distribution and a draw: penalties, filters, randomness, chain."""
