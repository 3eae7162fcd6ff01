"""The tests of mlxgen; `tests.fixtures` holds what they share."""
