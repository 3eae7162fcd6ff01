"""The experiment behind `mlxgen compare`: arms, prompts, runs, a journal of them, intervals."""
