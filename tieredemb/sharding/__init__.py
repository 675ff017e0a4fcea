"""One collection over several processes: who owns which rows, what is exchanged, and the module."""
