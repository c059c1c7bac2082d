#!/bin/sh
# Builds the programs that no Debian suite has from their Go modules, which `go` fetches and checks. Installs nothing.
#   go.sh DIR MODULE...     DIR: what fetch.sh made; MODULE: a folder of ./go
# Result: DIR/v/MODULE/bin, with each `tool` of MODULE/go.mod; cri-tools also has critest. A containerd gets a runc and a crun beside it.
# Quick when they are there already. Without the modules a containerd's folder gets the newest suite's programs, and this says so.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
dir=$(cd "$1" && pwd -P); shift
exec 8>"$dir/go-lock"
flock 8

export GOTOOLCHAIN=local GOFLAGS='-mod=readonly -buildvcs=false'
needed=$(sed -n 's/^go //p' "$here"/go/*/go.mod | sort -V | tail -n 1)

# A program is static, as upstream's own release is; runc needs C, and libseccomp from Debian's package.
build() { # MODULE BIN
  (
    cd "$here/go/$1"
    export CGO_ENABLED=0
    tags= flags='-s -w'
    case $1 in
      containerd-*)
        version=$(sed -n 's,.*github.com/containerd/containerd/v2 \(v[^ ]*\).*,\1,p' go.mod | head -n 1)
        flags="$flags -X github.com/containerd/containerd/v2/version.Version=${version#v}" ;;
      cri-tools-*) # a test program: `go mod tidy` would drop the requirements of its packages
        go test -c -trimpath -ldflags "$flags" -o "$2/critest" sigs.k8s.io/cri-tools/cmd/critest || exit 1 ;;
      runc-*) export CGO_ENABLED=1; tags='seccomp urfave_cli_no_docs netgo osusergo' flags="$flags -extldflags=-static" ;;
    esac
    # `set -e` does not hold in a condition.
    tools=$(go list tool) || exit 1
    # shellcheck disable=SC2086
    go build -trimpath -tags "$tags" -ldflags "$flags" -o "$2/" $tools || exit 1
  )
}

# The newest suite's programs beside a containerd; experimental's runc beside the older of the two.
companions() { # MODULE BIN
  for program in crun criu; do ln -s "../../sid/bin/$program" "$2/$program"; done
  case $1 in
    containerd-2.3) ln -s ../../experimental/bin/runc "$2/runc" ;;
    *) if [ -e "$dir/v/runc-1.5/bin/runc" ]; then ln -s ../../runc-1.5/bin/runc "$2/runc"; else ln -s ../../experimental/bin/runc "$2/runc"; fi ;;
  esac
}

for module in "$@"; do
  made=$dir/v/$module
  stamp="$(cat "$here/go.sh" "$here/go/$module/go.mod" "$here/go/$module/go.sum" | cksum) $(stat -c %Y "$dir/v/sid")"
  if [ "$(cat "$made/stamp" 2>/dev/null)" = "$stamp" ]; then continue; fi
  find_go "$dir" "$needed" || true
  rm -rf "$made" "$made.making"
  mkdir -p "$made.making/bin"
  echo "building $module from its Go module" >&2
  if build "$module" "$made.making/bin"; then
    echo "$stamp" > "$made.making/stamp"
  else
    case $module in
      containerd-*) echo "$module cannot be built here: its stories run on the containerd of Debian sid" >&2
        for program in containerd ctr containerd-shim-runc-v2; do ln -sf "../../sid/bin/$program" "$made.making/bin/$program"; done ;;
      *) echo "$module cannot be built here" >&2 ;;
    esac
  fi
  case $module in containerd-*) companions "$module" "$made.making/bin" ;; esac
  mv "$made.making" "$made"
done
