"""What runs next.  No arrays, no clock, no sets: time is passed in as ``now``."""
