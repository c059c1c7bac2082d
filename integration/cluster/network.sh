#!/bin/sh
# Lays three of Debian's CNI plugins beside each other, for pods that have a network of their own. Installs nothing.
#   network.sh DIR
# Result: DIR/bin/{loopback,ptp,host-local}.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

begin "$here/network.sh" "$1" bin
suite_lists bookworm
unpack bookworm "$dir/x" containernetworking-plugins
mkdir "$dir/making/bin"
for plugin in loopback ptp host-local; do mv "$dir/x/usr/lib/cni/$plugin" "$dir/making/bin/"; done
rm -rf "$dir/x"
finish bin
