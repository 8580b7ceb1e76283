#!/bin/sh
# Tells the SuperLink the public keys in nodes/, each once. server.sh does it; call it again after adding a key.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
mkdir -p "$FLWR_HOME/registered"
for key in nodes/*.pub; do
  registered="$FLWR_HOME/registered/$(basename "$key")"
  cmp -s "$key" "$registered" && continue
  tries=0
  until answer=$(flwr supernode register "$key" federation --format json | field node-id 2>&1); do
    case $answer in *"already in use"*) break ;; esac
    tries=$((tries + 1))   # the SuperLink may still be starting
    [ $tries -lt 30 ] || { echo "$key is not registered: $answer" >&2; exit 1; }
    sleep 1
  done
  cp "$key" "$registered"
done
echo "registered: $(ls "$FLWR_HOME/registered" | tr '\n' ' ')"
