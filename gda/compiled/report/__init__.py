"""A rehearsal as text, as a picture and as advice, and read from a document. No JAX."""
