#!/bin/sh
# Builds containerd's client integration suite, a test package of its Go module, and the runc with faults that it uses.
#   client.sh DIR MODULE...     MODULE: a folder of ../matrix/go
# Result: DIR/MODULE/client.test and DIR/MODULE/runc-fp
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
mkdir -p "$1"
dir=$(cd "$1" && pwd -P); shift

export GOTOOLCHAIN=local GOFLAGS='-mod=readonly -buildvcs=false' CGO_ENABLED=0
find_go "$dir" "$(sed -n 's/^go //p' "$here"/../matrix/go/*/go.mod | sort -V | tail -n 1)"
for module in "$@"; do
  cd "$here/../matrix/go/$module"
  mkdir -p "$dir/$module"
  go build -trimpath -ldflags '-s -w' -o "$dir/$module/" github.com/containerd/containerd/v2/integration/failpoint/cmd/runc-fp
  go test -c -trimpath -ldflags '-s -w' -o "$dir/$module/client.test" github.com/containerd/containerd/v2/integration/client
done
