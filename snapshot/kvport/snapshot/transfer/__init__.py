"""Prefix state on the move: export and import of artifacts, and their ledger."""
