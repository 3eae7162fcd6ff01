#!/bin/sh
# The acceptance rules against each other by environment variable alone: one run for each rule and
# seed, and of each run the lines that name the rule.
#
#   scripts/ab_acceptance.sh [options of `mlxgen generate`]
#   SEEDS="1 2 3 4 5" MLXGEN="python -m mlxgen" scripts/ab_acceptance.sh -p "Tell me about tea."
#
# Compare per_position_acceptance with the closed form of its rule: sum_prod for sampler-match,
# sum_min for stochastic. `mlxgen compare` does all of this properly, with intervals.
set -eu

if [ $# -eq 0 ]; then
  set -- -p "Tell me about tea." --temp 1.0 -n 128
fi

for stochastic in 0 1; do
  for seed in ${SEEDS:-1 2 3}; do
    # MLXGEN may be several words.
    # shellcheck disable=SC2086
    output=$(
      MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT=$stochastic MLXCEL_SPECULATIVE_ACCEPT_DIAG=1 \
        ${MLXGEN:-mlxgen} generate "$@" --seed "$seed"
    )
    printf '%s\n' "$output" | grep -e '\] rule=' -e '\] closed_form' | sed "s/^/seed=$seed /"
  done
done
