#!/bin/sh
# Starts a run and follows its log: start-run.sh [NAME]. Its directory is runs/NAME; if that exists, the run goes on from
# its last checkpoint. Ctrl-C ends the following, not the run.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
name=${1:-$(date +%Y%m%d-%H%M%S)}
case $name in *[!A-Za-z0-9._-]* | .*)
  echo "NAME = '$name': must be of letters, digits and . _ -, and not begin with a point" >&2
  exit 2 ;;
esac
out="$PWD/runs/$name"
mkdir -p runs
run=$(flwr run app federation --run-config "recipe=\"$PWD/recipe.toml\" out=\"$out\"" --format json | field run-id)
echo "run $run has begun; to end it: FLWR_HOME='$FLWR_HOME' flwr stop $run federation"
flwr log "$run" federation --stream || true
status=$(flwr ls federation --run-id "$run" --format json | field runs 0 status)
echo "run $run: $status; $out"
[ "$status" = "finished:completed" ]
