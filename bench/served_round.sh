#!/bin/bash
# One round of a client against a server of its own, so that no round finds another's prefixes:
#   bench/served_round.sh MODEL "SERVE OPTIONS" CLIENT [ARGUMENTS]      the client gets --url and --pid of the server besides
set -eu
model=$1 options=$2 port=${PORT:-8123}
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck disable=SC2086  # Options are words.
"$root/.venv/bin/onehead" serve --model "$model" --port "$port" --server.log_level warning $options &
server=$!
trap 'kill $server 2>/dev/null; wait $server' EXIT
for _ in $(seq 300); do
    curl -sf "http://127.0.0.1:$port/ready" >/dev/null && break
    kill -0 $server || exit 1
    sleep 0.2
done
"$@" --url "http://127.0.0.1:$port" --pid $server
