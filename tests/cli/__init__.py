"""The command, driven as a user drives it, on real model directories."""
