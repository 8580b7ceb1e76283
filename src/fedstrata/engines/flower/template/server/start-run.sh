#!/bin/sh
# Starts a run and follows its log: start-run.sh [NAME]. Its directory is runs/NAME; if that exists, the run goes on from
# its last checkpoint. Ctrl-C ends the following, not the run; `flwr stop` ends that.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
out="$PWD/runs/${1:-$(date +%Y%m%d-%H%M%S)}"
mkdir -p runs
config="recipe=\"$PWD/recipe.toml\" out=\"$out\""
run=$(flwr run app federation --run-config "$config" --format json | field run-id)
flwr log "$run" federation --stream || true
status=$(flwr ls federation --run-id "$run" --format json | field runs 0 status)
echo "run $run: $status; $out"
[ "$status" = "finished:completed" ]
