"""A DLRM trained with tiered embedding tables on Criteo's click log, or on a generated one: see README.md."""
