#!/bin/sh
# The SuperLink: TLS with the certificate in certificates/; only nodes whose keys are in nodes/ are let in, and only this
# machine may register keys and start runs.
# Runs until Ctrl-C or SIGTERM.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
python -m fedstrata.deployment.superlink --host "$HOST" --port "$PORT" \
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.crt --ssl-keyfile certificates/server.key \
  --enable-supernode-auth --database "$FLWR_HOME/superlink.db" --disable-runtime-dependency-installation &
superlink=$!
trap 'kill -TERM $superlink 2>/dev/null || true' TERM INT
{ SUPERLINK_PID=$superlink ./register.sh || kill -TERM $superlink 2>/dev/null; } &
while kill -0 $superlink 2>/dev/null; do
  wait $superlink || status=$?   # a signal ends the waiting, not the SuperLink
done
exit "${status:-0}"
