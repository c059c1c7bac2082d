#!/bin/sh
# Runs modules of static test programs as root on every kernel of a folder.
#   run.sh KERNELS PROGRAMS MODULES PROGRAM...     KERNELS: what fetch.sh made; PROGRAMS: a folder with ours, whose self-test runs
# Fails when a program fails on a kernel, or does not come to its end.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/vm.sh"

kernels=$1; programs=$2; shift 2
vm_root "$@"
cp "$programs/bindguard" "$vm/root/bindguard"
failed=0
for kernel in "$kernels"/vmlinuz-*; do
  fuse=$kernels/fuse-${kernel##*/vmlinuz-}.ko
  rm -rf "$vm/root/fuse.ko" "$vm/root/servers"
  [ ! -e "$fuse" ] || cp "$fuse" "$vm/root/fuse.ko"
  cp -rL "$kernels/servers-${kernel##*/vmlinuz-}" "$vm/root/servers"
  vm_boot "$kernel" 1024 || failed=1
done
exit $failed
