"""Training loops around the modules: planning and fetching ahead of the batch that computes."""
