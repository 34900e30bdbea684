"""Who has which block.  Ids only: no bytes, no NumPy, no clock."""
