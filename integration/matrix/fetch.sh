#!/bin/sh
# Lays three generations of containerd, with their shim, runc and crun, beside each other. Installs nothing.
#   fetch.sh [DIR]        DIR is target/matrix of the repository when not given
# Result: DIR/v/SUITE/bin/{containerd,ctr,containerd-shim-runc-v2,runc,crun} for the Debian suites below, each of which
# runs as it is; the newest has criu, too: an older one does not know newer kernels. Quick when they are there already.
#
# Needs apt, dpkg-deb and patchelf (see setup.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
newest=sid

begin "$here/fetch.sh" "${1:-$here/../../target/matrix}" v
for suite in bookworm trixie "$newest"; do
  more=$(if [ "$suite" = "$newest" ]; then echo criu; fi)
  suite_lists "$suite"
  libraries=$(suite_apt "$suite" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances runc crun $more | grep '^lib' | sort -u)
  # shellcheck disable=SC2086
  unpack "$suite" "$dir/x/$suite" containerd runc crun $more $libraries
  bin=$dir/making/v/$suite/bin
  for program in containerd ctr containerd-shim-runc-v2 runc crun $more; do
    lay_out "$program" "$dir/x/$suite" "$bin"
    case $program in *shim*) flag=-v ;; *) flag=--version ;; esac
    "$bin/$program" $flag >/dev/null
  done
done
finish v
