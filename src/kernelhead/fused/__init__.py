"""Fast versions of the mathematics, one file per backend."""
