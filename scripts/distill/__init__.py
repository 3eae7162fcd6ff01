"""Distillation of a small draft model from a llama target; see distill_draft.py beside it."""
