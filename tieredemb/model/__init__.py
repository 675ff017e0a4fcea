"""Calls for a whole model, whichever of its modules hold tables: what a module has for its own, for all of them."""
