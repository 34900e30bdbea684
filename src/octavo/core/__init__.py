"""Plain data that every layer shares: requests, sequences, plans, events.  Imports nothing of octavo, no arrays."""
