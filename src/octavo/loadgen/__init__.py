"""Load on any server that speaks OpenAI's API, and what it did under it.  Knows nothing of the engine."""
