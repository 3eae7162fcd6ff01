"""Tests of the experiment behind `mlxgen compare`, without models."""
