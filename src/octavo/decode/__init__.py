"""What sampled tokens mean: branches, stops.  Imports only core."""
