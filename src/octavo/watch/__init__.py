"""What the live map shows: the pool copied between two steps, and the last minutes of such copies."""
