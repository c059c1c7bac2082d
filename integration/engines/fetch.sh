#!/bin/sh
# Lays Podman, Docker and logrotate of Debian bookworm, and kubectl of trixie, beside each other. Installs nothing.
#   fetch.sh [DIR]        DIR is target/engines of the repository when not given
# Result: DIR/bin/{podman,conmon,dockerd,docker,logrotate,kubectl}, each of which runs as it is. Quick when they are there already.
#
# Needs apt, dpkg-deb and patchelf (see matrix/setup.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
# what the programs are linked with and few machines have
libraries='libgpgme11 libassuan0 libgpg-error0 libsubid4 libpopt0 libseccomp2 libdevmapper1.02.1 libsystemd0 libselinux1 libglib2.0-0 libsqlite3-0'

begin "$here/fetch.sh" "${1:-$here/../../target/engines}" bin
suite_lists bookworm
# shellcheck disable=SC2086
unpack bookworm "$dir/x/bookworm" podman conmon docker.io logrotate $libraries
for program in podman conmon dockerd docker logrotate; do
  lay_out "$program" "$dir/x/bookworm" "$dir/making/bin"
  "$dir/making/bin/$program" --version >/dev/null 2>&1
done
suite_lists trixie
unpack trixie "$dir/x/trixie" kubectl libc6
lay_out kubectl "$dir/x/trixie" "$dir/making/bin"
"$dir/making/bin/kubectl" version --client >/dev/null
finish bin
