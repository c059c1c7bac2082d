#!/bin/sh
# Lays two generations of containerd, with their shim, runc and crun, and the runc after them, beside each other. Installs nothing.
#   fetch.sh [DIR]        DIR is target/matrix of the repository when not given
# Result: DIR/v/SUITE/bin/{containerd,ctr,containerd-shim-runc-v2,runc,crun} for the Debian suites below, each of which
# runs as it is; the newest has criu, too: an older one does not know newer kernels. DIR/v/experimental/bin/runc is the runc of
# experimental, or of the newest suite when that has caught up. Quick when they are there already. go.sh adds what no suite has.
#
# Needs apt, dpkg-deb and patchelf (see setup.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
newest=sid

begin "$here/fetch.sh" "${1:-$here/../../target/matrix}" v
for suite in trixie "$newest"; do
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

suite_lists experimental
if suite_apt experimental apt-cache show runc 2>/dev/null | grep -q '^Package: runc$'; then
  unpack experimental "$dir/x/experimental" runc
  # its libraries are the newest suite's
  for libraries in lib lib64; do
    if [ -d "$dir/x/$newest/usr/$libraries" ]; then cp -al "$dir/x/$newest/usr/$libraries" "$dir/x/experimental/usr/"; fi
  done
  next=$dir/x/experimental
else
  next=$dir/x/$newest
fi
lay_out runc "$next" "$dir/making/v/experimental/bin"
"$dir/making/v/experimental/bin/runc" --version >/dev/null
finish v
