# Sourced by the scripts in this folder: where Flower keeps its files, and how its commands reach the SuperLink.
. ./server.env
command -v flower-superlink >/dev/null || {
  echo "flower-superlink is not there: activate the environment with fedstrata[flower]" >&2
  exit 2
}
case $PWD in *[\"\\]*)
  echo "$PWD: Flower cannot read a path with \" or \\ in it" >&2
  exit 2 ;;
esac
export FLWR_HOME="$PWD/state"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1   # nothing is installed when a run begins
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
umask 077
mkdir -p "$FLWR_HOME"
# Flower wants an absolute path, and this folder may have been moved.
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:$PORT"
root-certificates = "$PWD/certificates/ca.crt"
END
# A field of what `flwr … --format json` says on stdin. Its exit code is 0 even when it failed.
field() {
  python -c '
import json, sys
answer = json.load(sys.stdin)
if not answer["success"]:
    sys.exit(" ".join(answer["error-message"].split()))
for key in sys.argv[1:]:
    answer = answer[int(key) if key.isdigit() else key]
print(answer)' "$@"
}
