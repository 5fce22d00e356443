"""Drafters: guesses at the next tokens, for the single-sequence lane to verify."""
