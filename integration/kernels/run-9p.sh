#!/bin/sh
# Runs modules of static test programs as root on a kernel that has a client of 9p, with the emulator as server of one folder. It has it
# by two tags, so that a program can be two clients.
#   run-9p.sh KERNELS MODULES PROGRAM...     KERNELS: what fetch.sh made
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/vm.sh"

kernels=$1; shift
vm_root "$@"
cp -r "$kernels/9p/servers" "$vm/root/servers"
mkdir "$vm/folder"
virtfs=local,path=$vm/folder,security_model=none,multidevs=remap
vm_boot "$kernels"/9p/vmlinuz-* 1024 -virtfs "$virtfs,mount_tag=share" -virtfs "$virtfs,mount_tag=same"
