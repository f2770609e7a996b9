"""What only makes a model faster. `optimize` is the one way in."""
