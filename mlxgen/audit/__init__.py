"""Proving a pair right: the checks of `mlxgen verify`."""
