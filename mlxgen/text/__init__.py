"""Text in and out: prompts to ids, ids to streamed text, stop strings."""
