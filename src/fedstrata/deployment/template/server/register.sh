#!/bin/sh
# Tells the SuperLink the public keys in nodes/, each once. server.sh does it; call it again after adding a key.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
registered="$FLWR_HOME/registered"   # a copy of each key, and the number that Flower calls its node by
mkdir -p "$registered"
tries=0
until answer=$(flwr ls federation --format json 2>&1 | field success 2>&1); do   # it may still be starting
  [ -z "${SUPERLINK_PID:-}" ] || kill -0 "$SUPERLINK_PID" 2>/dev/null || exit 1
  tries=$((tries + 1))
  [ $tries -lt 30 ] || { echo "the SuperLink does not answer: $answer" >&2; exit 1; }
  sleep 1
done
for key in nodes/*.pub; do
  name=$(basename "$key" .pub)
  cmp -s "$key" "$registered/$name.pub" && continue
  if ! number=$(flwr supernode register "$key" federation --format json | field node-id 2>&1); then
    case $number in *"already in use"*) number="that it knows" ;; *)
      echo "$key is not registered: $number" >&2
      exit 1 ;;
    esac
  fi
  echo "$number" > "$registered/$name.number"
  cp "$key" "$registered/$name.pub"
done
for number in "$registered"/*.number; do
  echo "$(basename "$number" .number) is, to Flower, node $(cat "$number")"
done
echo "all keys are registered"
