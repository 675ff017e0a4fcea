"""The public modules."""
