#!/bin/sh
# This node, kept running: what it is and where its data is, node.toml says. Runs until Ctrl-C or SIGTERM.
set -eu
cd "$(dirname "$0")"
. ./node.env
command -v flower-supernode >/dev/null || {
  echo "flower-supernode is not there: activate the environment with fedstrata[flower]" >&2
  exit 2
}
export FLWR_HOME="$PWD/state"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1   # nothing is installed when a run begins
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
export FEDSTRATA_FLOWER_RECIPE="$PWD/recipe.toml"
export FEDSTRATA_FLOWER_MEMORY="$PWD/memory"   # what this client remembers between rounds; it never leaves
umask 077
mkdir -p "$FLWR_HOME"
python -m fedstrata flower check . || exit 2
stop=
node=
trap 'stop=yes; [ -z "$node" ] || kill -TERM $node 2>/dev/null || true' TERM INT
while [ -z "$stop" ]; do
  flower-supernode --superlink "$SUPERLINK" --root-certificates ca.crt --auth-supernode-private-key key \
    --host 127.0.0.1 --port "$PORT" --node-config node.toml &
  node=$!
  [ -z "$stop" ] || kill -TERM $node 2>/dev/null || true   # the signal came before we knew whom to pass it on to
  while kill -0 $node 2>/dev/null; do
    wait $node || true   # a signal ends the waiting; the node signs off first
  done
  [ -n "$stop" ] && break
  # Flower refuses a node whose last session was cut off until it has lapsed, after about a minute (code 2004).
  echo "the SuperNode has ended; it is started again in ${RESTART:-10} s" >&2
  sleep "${RESTART:-10}" &
  node=$!
  wait $node || true
done
