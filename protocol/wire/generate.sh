#!/bin/sh
# Generate the Python wire code beside peer.proto; with --check, only compare and fail when what is committed is stale.
# Run from the repository root, as `make proto` and `make check` do.
set -eu
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${BIN:-.venv/bin}/python" -m grpc_tools.protoc --proto_path=. --python_out="$out" --pyi_out="$out" protocol/wire/peer.proto
for file in peer_pb2.py peer_pb2.pyi; do
    if [ "${1:-}" = --check ]; then
        cmp -s "$out/protocol/wire/$file" "protocol/wire/$file" || { echo "error: protocol/wire/$file is stale; run make proto" >&2; exit 1; }
    else
        cp "$out/protocol/wire/$file" "protocol/wire/$file"
    fi
done
